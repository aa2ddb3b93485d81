"""Faults of engines that lose or misplace a part of a request, put into kvcore's own copies on purpose.

A fault says which units of a component are copied, and from where. It is applied where kvcore decides this: in the
reads that a receiver makes of an offer, and in the blocks that a retraction saves and restores. Everything that is
counted, announced and checked stays as it was, so that only what arrives can give the fault away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from kvcore.contract import ReadJob
from kvcore.engine.cache import KVCache
from kvcore.requests.payload import Payload
from kvcore.transfer.session import incoming

Ids = npt.NDArray[np.int64]
Way = Literal["transfer", "retraction"]


def everything(first: int, count: int) -> Ids:
    """Positions ``[count]`` of the units that are copied: all."""
    return np.arange(count)


def nothing(first: int, count: int) -> Ids:
    """None of them."""
    return np.arange(0)


def the_same(ids: Ids, cache: KVCache, group: str, range: str) -> Ids:
    """Each unit is copied from where it is."""
    return ids


@dataclass(frozen=True)
class Fault:
    """What goes wrong with the units of some components.

    Attributes:
        name: for people.
        hits: whether a component is affected.
        pick: ``pick(first, count)``: positions of the units that are copied, ``first`` the logical index of the first.
        source: ``source(ids, cache, group, range)``: where they are copied from, in the cache they are in.
        regions: where given, nothing of these regions is copied, and all of the others.
    """

    name: str
    hits: Callable[[str], bool]
    pick: Callable[[int, int], Ids] = everything
    source: Callable[[Ids, KVCache, str, str], Ids] = the_same
    regions: tuple[str, ...] = ()

    def parts(self, payload: Payload, cache: KVCache | None) -> Iterator[tuple[Payload, Ids]]:
        """Each component of a payload by itself: what of it is copied, and the positions; sources where a cache is given."""
        for component in payload.components:
            ids, at = payload.ids, np.arange(payload.num_units)
            if self.hits(component):
                at = self.pick(payload.first, payload.num_units)
                if cache is not None:
                    ids = self.source(ids, cache, payload.group, payload.range)
            yield Payload.of(payload.group, payload.range, (component,), payload.first, ids[at], payload.layers), at


def another_slot(ids: Ids, cache: KVCache, group: str, range: str) -> Ids:
    """The slot after each one, past the last again the first that a request may hold."""
    pool = cache.store.pools[group]
    first, end = pool.first_unit(range) + 1, pool.end_unit(range)
    assert end - first > 1, "with one slot there is no other"
    return first + (ids - first + 1) % (end - first)


def page_before(ids: Ids, cache: KVCache, group: str, range: str) -> Ids:
    """Each page gets what belongs to the one before it, the first what belongs to the last."""
    return np.roll(ids, 1)


def backwards(ids: Ids, cache: KVCache, group: str, range: str) -> Ids:
    """The pages of what is copied at once, in reverse order."""
    return ids[::-1]


def but_the_last(pages: int) -> Callable[[int, int], Ids]:
    """All but the page that is the last of so many."""
    return lambda first, count: np.flatnonzero(first + np.arange(count) != pages - 1)


def every_other(first: int, count: int) -> Ids:
    """Pages with an odd number."""
    return np.flatnonzero((first + np.arange(count)) % 2 == 1)


def starts(*prefixes: str) -> Callable[[str], bool]:
    """Components that begin like one of these."""
    return lambda component: component.startswith(prefixes)


STATE_LOST = Fault("the state is not saved", starts("state/"), nothing)
STATE_OF_ANOTHER = Fault("the state is saved from another request's slot", starts("state/"), source=another_slot)
WINDOW_SHIFTED = Fault("window pages are shifted by one", starts("swa/"), source=page_before)
SCALES_LEFT = Fault("scales are left behind", lambda component: component.endswith("/block_scale"), nothing)
PAGES_LOST = Fault("half of the full pages are lost", starts("full/"), every_other)
FAULTS = (STATE_LOST, STATE_OF_ANOTHER, WINDOW_SHIFTED, SCALES_LEFT, PAGES_LOST)

# What the text does not show, or not surely, and bytes must.
PAGES_REVERSED = Fault("pages of full attention are in another order", starts("full/"), source=backwards)
WINDOW_SCALES_LEFT = Fault("scales of the window layers are left behind", starts("swa/block_scale"), nothing)


def last_page_lost(pages: int) -> Fault:
    """The last of a request's pages of full attention is lost."""
    return Fault("the last page of full attention is lost", starts("full/"), but_the_last(pages))


def state_lost(region: str) -> Fault:
    """One of a layer's convolutions loses its state, in all layers."""
    return Fault(f"the state of {region} is lost", starts("state/"), regions=(region,))


@contextmanager
def broken(fault: Fault, ways: Sequence[Way], *, sending: KVCache, decoding: KVCache) -> Iterator[None]:
    """Have ``fault`` on these ways from ``sending`` to ``decoding``, and from ``decoding`` to its backup and back."""
    with (
        reads_broken(fault, sending) if "transfer" in ways else _nothing(),
        blocks_broken(fault, decoding) if "retraction" in ways else _nothing(),
    ):
        yield


@contextmanager
def reads_broken(fault: Fault, sending: KVCache) -> Iterator[None]:
    """A receiver in this process reads an offer with a fault."""
    pull_of = incoming.pull_of

    def faulty(plan: Any, record: Any, offer: Any) -> Any:
        pull = pull_of(plan, record, offer)
        jobs: list[ReadJob] = []
        for source, landed in zip(pull.units, pull.landed, strict=True):
            for part, at in fault.parts(source, sending):
                if at.size:
                    jobs += [
                        ReadJob(part.group, program, part.ids, landed.ids[at])
                        for program in _programs(plan, part, fault.regions if fault.hits(part.components[0]) else ())
                    ]
        return dataclasses.replace(pull, jobs=tuple(jobs))

    with patch("kvcore.transfer.session.receiver.pull_of", faulty):
        yield


def _programs(plan: Any, part: Payload, without: Sequence[str]) -> Any:
    """How one component is moved, without some regions."""
    if not without:
        return plan.split(part.group, part.range, part.components, part.layers)[1]
    cut = [
        dataclasses.replace(item, fields={key: ids for key, ids in item.fields.items() if key[0] not in without})
        for item in plan.selections(part.group, part.layers)
    ]
    return plan._build(part.group, part.components, cut)


@contextmanager
def blocks_broken(fault: Fault, decoding: KVCache) -> Iterator[None]:
    """A retraction saves and restores its blocks with a fault."""
    retractor = decoding._retractor
    blocks, retract, backup = retractor._blocks, retractor.retract, retractor._backup
    assert backup is not None
    restore = backup.restore
    saving = False
    into: list[Payload] = []

    def faulty(payloads: Sequence[Payload]) -> Any:
        into[:] = payloads
        return blocks([part for payload in payloads for part, _ in fault.parts(payload, decoding if saving else None)])

    def restoring(key: str, given: Sequence[Any]) -> Any:
        """What a region held stays there."""
        kept = [
            (units, ids, units[ids].clone())
            for payload in into
            for region in fault.regions
            if any(fault.hits(component) for component in payload.components)
            for layer in decoding.layouts[payload.group].layers
            for units in [decoding.store.pools[payload.group].units(layer, region)]
            for ids in [payload.ids.tolist()]
        ]
        fence = restore(key, given)
        fence.wait()
        for units, ids, held in kept:
            units[ids] = held
        return fence

    def retracting(*arguments: Any, **named: Any) -> Any:
        nonlocal saving
        saving = True
        try:
            return retract(*arguments, **named)
        finally:
            saving = False

    with (
        patch.object(retractor, "_blocks", faulty),
        patch.object(retractor, "retract", retracting),
        patch.object(backup, "restore", restoring),
    ):
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield
