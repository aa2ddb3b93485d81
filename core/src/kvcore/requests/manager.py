"""Admission, allocation and request life cycle of one model (integers only; ``docs/requests.md`` tells the story).

One manager serves all ranks of a model. It never touches a byte of cache: a step reaches the stores as a
:class:`kvcore.requests.stepplan.StepPlan`. Every call either does all it was asked or raises and changes nothing. A manager is
not thread-safe: the engine's scheduler owns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvcore.contract import IndexSpace, Unique
from kvcore.errors import ConfigError, EmptyPromptError, RequestError
from kvcore.layout import Int64Array
from kvcore.requests import checkpoints
from kvcore.requests.counts import ManagerStats, RangeStats, count_units
from kvcore.requests.holds import Hold
from kvcore.requests.integrity import check_units
from kvcore.requests.payload import Payload
from kvcore.requests.ranges import RangeBudget, RangeSet
from kvcore.requests.rules import (
    demand_live,
    demand_reversible,
    demand_rewindable,
    demand_rollback,
    demand_step_fits,
    joint_prefix,
)
from kvcore.requests.spaces import slots_held
from kvcore.requests.stepplan import StepPlan, StepRow
from kvcore.requests.steps import StepBook, step_rows
from kvcore.requests.table import RangeKey, Request, RequestTable, demand_filled, token_count
from kvcore.requests.unit_lists import arriving_units, final_payloads

__all__ = ["Hold", "Manager", "ManagerStats", "RangeBudget", "RangeStats", "Request"]


class Manager(Unique):
    """The units of one model and the requests that own them.

    Args:
        budgets: one per layer group and unit range.
        spaces: index spaces by kind.
        max_requests: bound on live requests; None for none.

    Raises ConfigError for an unknown kind of space, options it refuses, or a range without a usable unit.
    """

    def __init__(
        self, budgets: Sequence[RangeBudget], spaces: Mapping[str, IndexSpace], *, max_requests: int | None = None
    ) -> None:
        if max_requests is not None and max_requests < 1:
            raise ConfigError("a cache must admit at least one request", max_requests=max_requests)
        self._ranges = RangeSet(budgets, spaces)
        self._requests = RequestTable(max_requests)
        self._steps = StepBook(self._ranges, self._requests)
        self._holds: set[Hold] = set()

    # --- looking -----------------------------------------------------------------------------------------------------

    @property
    def max_request_tokens(self) -> int | None:
        """Longest request an empty cache holds; None where length does not matter."""
        return self._ranges.max_tokens()

    @property
    def requests(self) -> tuple[Request, ...]:
        """Live requests, oldest first."""
        return tuple(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def get(self, request_id: str, *, generation: int | None = None) -> Request:
        """The live request. UnknownRequestError; StaleHandleError where the id is now of another generation."""
        return self._requests.get(request_id, generation)

    def units(self, request_id: str, group: str, range: str) -> Int64Array:
        """Region unit ids of a request by logical unit, a copy ``int64 [N]``; dead units are the null unit."""
        return self._requests.get(request_id)._tables[self._ranges.find(group, range).key].copy()

    def slots(self, request_id: str, group: str, range: str, start: int, stop: int) -> Int64Array:
        """Where the tokens ``[start, stop)`` of a request are now: :func:`kvcore.requests.spaces.slots_held`."""
        request, part = self._requests.get(request_id), self._ranges.find(group, range)
        lost = () if part.exact else request.overwritten(part.key)
        return slots_held(request._tables[part.key], part.null, part.spec, request._length, start, stop, lost)

    def free_units(self, group: str, range: str) -> Int64Array:
        """Every allocatable unit id now, ascending: what a test may fill with poison."""
        return self._ranges.find(group, range).allocator.free_units()

    def payloads(
        self, request_id: str, start: int, stop: int, *, last: bool, total: int | None = None
    ) -> tuple[Payload, ...]:
        """Units that became final when the cache grew from ``start`` to ``stop`` tokens: one payload per unit range, and
        two of a ring whose rows pass its end.

        Called once per chunk with adjoining chunks it lists every unit once; ``(0, length, last=True)`` lists all that a
        request needs to go on elsewhere. A payload without units is legal. RequestError outside ``0 <= start <= stop <= reserved``, and
        for units that no step has reached yet.

        Args:
            total: length at the end of the chunks, where it is known: units that are dead by then are left out.
        """
        return final_payloads(self._ranges, self._requests.sound(request_id), start, stop, last=last, total=total)

    def destinations(self, request_id: str, length: int) -> dict[RangeKey, Int64Array]:
        """Where a transfer of ``length`` tokens lands: unit ids by logical unit, −1 where nothing arrives.

        ``int64 [N]`` by ``(group, range)``. What is −1 is dead at that length, or belongs to no token of it.
        """
        return arriving_units(self._ranges, self._requests.get(request_id), length)

    def joint_prefix(self, request_id: str, at_most: int) -> int:
        """Longest prefix of a request, up to ``at_most`` tokens, that :meth:`fork` can share in every range.

        A state serves its exact length and those of its checkpoints, a window only where all of it is still there. What
        one range cannot serve no other makes up for.
        """
        return joint_prefix(self._ranges, self._requests.sound(request_id), at_most)

    def stats(self) -> ManagerStats:
        """Count units and requests."""
        return count_units(self._ranges, len(self._requests), len(self._steps))

    # --- admission ---------------------------------------------------------------------------------------------------

    def can_admit(self, num_tokens: int, *, headroom_tokens: int = 0) -> bool:
        """Whether a new request of ``num_tokens`` fits now, counted in whole units.

        Args:
            headroom_tokens: also leave whole units free for this many tokens of others (decode growth). A prompt that
                fits an empty cache may never fit with headroom, so ask with 0 when nothing else runs.
        """
        if num_tokens < 1 or headroom_tokens < 0 or self._requests.full:
            return False
        return all(
            part.admission_units(num_tokens) + part.growth(headroom_tokens) <= part.allocator.free_count
            for part in self._ranges.values()
        )

    def admit(self, request_id: str, num_tokens: int, *, external: bool = False) -> Request:
        """Admit a request of length 0 and hold units for ``num_tokens``.

        Args:
            external: a transfer or restore fills the units; then :meth:`set_length` says how far. They are not zeroed.

        Raises, in this order: EmptyPromptError for no tokens, PromptTooLongError where an empty cache could not hold
        them, DuplicateRequestError, CapacityError when units or requests are short now.
        """
        num_tokens = token_count(num_tokens, request_id)
        if num_tokens < 1:
            raise EmptyPromptError(
                "a prompt needs at least one token",
                request=request_id,
                num_tokens=num_tokens,
                remedy="answer it without the cache, or begin it with a start token",
            )
        first = {key: part.first_live(num_tokens) if external else 0 for key, part in self._ranges.items()}
        needs = {
            key: part.num_units(num_tokens) - first[key] if external else part.admission_units(num_tokens)
            for key, part in self._ranges.items()
        }
        if external:
            self._ranges.demand_fits(request_id, num_tokens, num_tokens)
        else:
            self._ranges.demand_admissible(request_id, num_tokens)
        self._requests.check_new(request_id)
        self._ranges.demand_free(needs, request=request_id)
        request = self._requests.add(request_id, external=external)
        for key, part in self._ranges.items():
            dead = np.full(first[key], part.null, np.int64)
            request._tables[key] = np.concatenate((dead, part.allocate(needs[key], unwritten=not external)))
        request._reserved = num_tokens
        return request

    def fork(self, request_id: str, new_id: str, prefix_tokens: int) -> Request:
        """Admit ``new_id`` with the first ``prefix_tokens`` tokens of a request, sharing its units by count.

        No byte moves: a shared unit is copied when one of its owners first writes into it. 0 tokens share nothing.
        A prefix that ends at a checkpoint shares its state too. Checkpoints stay with the request they were taken of.
        RequestError past the request's length or while it is in a step; UnsupportedError where an index space no longer
        holds what the prefix needs.
        """
        prefix_tokens = token_count(prefix_tokens, request_id)
        request = self._requests.filled(request_id)
        self._requests.check_new(new_id)
        demand_rewindable(self._ranges, request, prefix_tokens, checkpoints=True)
        self._end_filling(request)
        fork = self._requests.add(new_id)
        for key, part in self._ranges.items():
            kept = request._checkpoints.get(prefix_tokens, {})
            table = kept.get(key, request._tables[key])[: part.num_units(prefix_tokens)].copy()
            fork._written[key] = request.overwritten(key)
            fork.wrote(key, request.reach(key, prefix_tokens), prefix_tokens)
            table[: part.evict_before(prefix_tokens)] = part.null
            part.allocator.retain(part.real(table))
            fork._tables[key] = table
        fork._length = fork._reserved = prefix_tokens
        return fork

    # --- growing and shrinking ---------------------------------------------------------------------------------------

    def reserve(self, request_id: str, num_new: int) -> Request:
        """Hold units for ``num_new`` tokens past the length, all ranges or none.

        CapacityError when they are short now, PromptTooLongError where an empty cache could not hold them.
        """
        num_new = token_count(num_new, request_id)
        request = self._requests.idle(request_id)
        if num_new < 0:
            raise RequestError("cannot reserve a negative number of tokens", request=request_id, num_new=num_new)
        stop = request._length + num_new
        self._ranges.demand_fits(request_id, request._length, stop)
        missing = {key: part.missing(request._tables[key], stop) for key, part in self._ranges.items()}
        self._ranges.demand_free(missing, request=request_id)
        self._grow(request, stop)
        return request

    def set_length(self, request_id: str, length: int) -> Request:
        """Say that a transfer or restore has filled the first ``length`` tokens of an external request.

        May be called again with more tokens; the first step, fork or truncation ends the filling. RequestError for
        other requests, for fewer tokens than before, or past ``reserved``.
        """
        length = token_count(length, request_id)
        request = self._requests.idle(request_id)
        if not request._external:
            raise RequestError(
                "only a request admitted as external is filled from outside", request=request_id, state=request.state
            )
        if not request._length <= length <= request._reserved:
            raise RequestError(
                "length outside what is filled and reserved",
                request=request_id,
                length=length,
                filled=request._length,
                reserved=request._reserved,
            )
        demand_live(self._ranges, request, length)
        for key, part in self._ranges.items():
            request.wrote(key, part.space.arrived_reach(part.spec, length), length)
        request._length = length
        return request

    def truncate(self, request_id: str, length: int) -> Request:
        """Forget the tokens past ``length`` and drop every unit that holds none of the rest.

        The unit that ``length`` falls into stays, also where it is shared. RequestError past the length or in a step;
        UnsupportedError where an index space cannot go back.
        """
        length = token_count(length, request_id)
        request = self._requests.filled(request_id)
        demand_rewindable(self._ranges, request, length)
        self._end_filling(request, length)
        for key, part in self._ranges.items():
            request._tables[key] = checkpoints.shorten(part, request._tables[key], part.num_units(length))
            request.wrote(key, request.reach(key, length), length)
        checkpoints.drop(self._ranges, request, [other for other in request._checkpoints if other > length])
        request._length = request._reserved = length
        return request

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint(self, request_id: str) -> None:
        """Keep the state of a request at its present length, so that :meth:`rollback` can go back to it.

        No unit is taken and no byte moves: the next step finds the state shared and writes into a copy, which needs a free
        unit (:meth:`plan_step` says CapacityError). A checkpoint serves its exact length and goes with the request, or
        when the request is taken back below it. A second one at one length, one of no tokens, and one of a model
        without a state change nothing. RequestError while the request is in a step, being filled or spoiled.
        """
        request = self._requests.filled(request_id)
        self._end_filling(request)
        checkpoints.keep(self._ranges, request)

    def drop_checkpoints(self, request_id: str, *, below: int | None = None) -> None:
        """Give up the checkpoints of a request at fewer than ``below`` tokens (all by default), in any state."""
        request = self._requests.get(request_id)
        checkpoints.drop(self._ranges, request, [at for at in request.checkpoints if below is None or at < below])

    def rollback(self, request_id: str, num_tokens: int) -> Request:
        """Take back the last ``num_tokens`` tokens of a request, in every range or in none.

        Ranges of tokens drop them as :meth:`truncate` does; a state needs a checkpoint at exactly that length, or no
        token left: then the next step begins with a fresh one. A spoiled request is ready again afterwards. 0 tokens
        change nothing (of a spoiled request: its state is that of a checkpoint at its length).

        RequestError for more tokens than there are, or in a step; UnsupportedError, with the lengths of the checkpoints,
        where a range cannot go back.
        """
        request = self._requests.settled(request_id)
        length = request._length - token_count(num_tokens, request_id)
        if not 0 <= length <= request._length:
            raise RequestError(
                "not a number of tokens that the request can give up",
                request=request_id,
                num_tokens=num_tokens,
                length=request._length,
            )
        if num_tokens == 0 and not request._spoiled:
            return request
        demand_filled(request)
        demand_rollback(self._ranges, request, length)
        self._end_filling(request, length)
        checkpoints.roll_back(self._ranges, request, length)
        return request

    def release(self, request_id: str, *, generation: int | None = None) -> None:
        """End a request in any state and give its units back; the id may be used again at once.

        Units that a copy is holding, or that an open step is still going to write, become allocatable when the hold
        is released or the step is committed or abandoned. A second call raises UnknownRequestError (StaleHandleError
        with a ``generation`` whose id was admitted again), so a late release never frees another request's units.
        """
        request = self._requests.get(request_id, generation)
        for key, table in self._requests.remove(request).items():
            part = self._ranges[key]
            part.allocator.release(part.real(table))

    def demand_quiet(self, request_id: str) -> None:
        """Raise RequestError where an open step rewrites a state of the request: a copy of it would be of no length."""
        if any(part.exact for part in self._ranges.values()):
            self._requests.settled(request_id)

    def hold(self, request_id: str, *, live_at: int = 0) -> Hold:
        """Quarantine all units a request owns now, for an asynchronous copy, until :meth:`Hold.release`.

        Args:
            live_at: leave out units that are dead at this many tokens, as :meth:`payloads` does with ``total``.
        """
        request = self._requests.get(request_id)
        return Hold(
            [(part, part.real(request._tables[key][part.first_live(live_at) :])) for key, part in self._ranges.items()],
            self._holds,
        )

    def hold_payloads(self, payloads: Sequence[Payload]) -> Hold:
        """Quarantine the units of payloads just made, as :meth:`hold` does those of a request."""
        return Hold([(self._ranges.find(item.group, item.range), item.ids) for item in payloads], self._holds)

    # --- steps -------------------------------------------------------------------------------------------------------

    def plan_step(self, rows: Sequence[tuple[str, int]], *, speculative: bool = False) -> StepPlan:
        """Plan one step: ``(request, new tokens)`` per row, in batch order.

        Holds the units the new tokens need, and replaces shared units they write into by copies: for all rows and
        ranges, or for none. Each row's request is in the step until :meth:`commit` or :meth:`abandon`; other requests
        may be in another open step.

        Args:
            rows: ``(request, new tokens)`` in batch order.
            speculative: units that serve one length only (states) are not written in place: of each row the state after
                every new token goes to a unit of its own (:attr:`kvcore.requests.stepplan.RangePlan.trail`), so that
                :meth:`commit` may accept any number of them. Takes a unit a token until then.

        Raises RequestError for a row without new tokens, twice in the plan, in another open step or being filled;
        UnknownRequestError; PromptTooLongError; CapacityError with ``needed`` and ``free`` of the first short range.
        """
        requests, counts, decode = step_rows(self._requests, rows)
        if decode and not speculative:
            plan = self._steps.open_decode(requests)
            if plan is not None:
                return plan
        pairs = list(zip(requests, counts, strict=True))
        demand_step_fits(self._ranges, pairs, speculative=speculative)
        reserved = [request._reserved for request in requests]
        for request, count in pairs:
            self._end_filling(request)
            self._grow(request, request._length + count)
        return self._steps.open(pairs, reserved, speculative=speculative)

    def commit(self, plan: StepPlan, accepted: Sequence[int] | None = None) -> tuple[StepRow, ...]:
        """The step ran: lengths advance by the accepted tokens of each row (all by default).

        A row whose request was released meanwhile (also when its id was admitted again) is skipped: aborting during a
        step is ordinary, the other rows stand. Returns the skipped rows. Units that only rejected tokens were written to come
        back, unless they were reserved before the step, and a speculative step leaves each request the state after its last
        accepted token.

        Raises StaleHandleError for a plan that is not open (committed, abandoned, or another manager's), RequestError
        for ``accepted`` that does not match the rows, UnsupportedError where an index space cannot go back over rejected
        tokens; nothing is changed then.
        """
        counts = [row.count for row in plan.rows]
        if accepted is None:
            return self._steps.commit(plan, counts)
        counts = [token_count(n, row.request) for n, row in zip(accepted, plan.rows, strict=False)]
        if len(accepted) != len(plan.rows) or any(
            not 0 <= n <= row.count for n, row in zip(counts, plan.rows, strict=True)
        ):
            raise RequestError(
                "accepted tokens do not match the rows",
                step=plan.step,
                expected=[row.count for row in plan.rows],
                got=list(accepted),
            )
        speculative = self._steps.speculative(plan)
        for row, count in zip(plan.rows, counts, strict=True):
            if count < row.count:
                request = self._requests.find(row.request, row.generation)
                end = row.start + count
                demand_reversible(self._ranges, row.request, request, row.stop, end, speculative=speculative)
        return self._steps.commit(plan, counts)

    def abandon(self, plan: StepPlan, *, ran: bool = True) -> tuple[StepRow, ...]:
        """The step failed or never ran: lengths and shared units are as before it, whatever it wrote meanwhile.

        Units it took stay reserved and are fresh again in the next plan. Returns the rows whose request was released
        meanwhile. StaleHandleError for a plan that is not open.

        Args:
            ran: False where no byte was written. Else a request whose state the step has rewritten in place, not in a
                copy, is spoiled: it can be released, or rolled back to a checkpoint; other calls raise RequestError.
        """
        return self._steps.abandon(plan, ran=ran)

    # --- integrity ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every unit is free, quarantined, or referenced as often as it is named."""
        check_units(self._ranges, self._requests, self._steps, self._holds)

    # --- what several calls share --------------------------------------------------------------------------------------

    def _grow(self, request: Request, stop: int) -> None:
        for key, part in self._ranges.items():
            table = request._tables[key]
            missing = part.missing(table, stop)
            if missing:
                request._tables[key] = np.concatenate((table, part.allocate(missing, unwritten=not request._external)))
        request._reserved = max(request._reserved, stop)

    def _end_filling(self, request: Request, length: int | None = None) -> None:
        """A request that goes on at ``length`` (its own by default) is filled from outside no more."""
        if not request._external:
            return
        request._external = False
        length = request._length if length is None else length
        for key, part in self._ranges.items():
            table = request._tables[key]
            # What the transfer did not fill still holds bytes of earlier owners.
            untouched = np.arange(len(table)) >= part.first_live(request._length)
            untouched[part.arriving(request._length)] = False
            part.mark(part.real(table[untouched]), unwritten=True)
            part.evict(table, part.evict_before(length))  # it may have been filled past what was reserved at first
