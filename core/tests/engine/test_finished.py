"""How many units wait to be taken over, counted as prompts come and go, against a recount of everything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine.handover import Finished


def part(name: str, capacity: int) -> Any:
    """A unit range, as far as its size and name go."""
    made = type("Part", (), {})()
    made.allocator = SimpleNamespace(capacity=capacity)
    made.budget = SimpleNamespace(group="full", range=name)
    return made


PARTS = {"pages": part("pages", 20), "rows": part("rows", 6)}
UNITS = st.lists(st.tuples(st.sampled_from(sorted(PARTS)), st.lists(st.integers(1, 40), max_size=8)), max_size=4)


@given(st.lists(st.tuples(st.sampled_from("abcd"), UNITS), max_size=20), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_count_is_that_of_a_recount(moves: list[tuple[str, Any]], fraction: float) -> None:
    """A request that is there leaves, one that is not comes; units may come twice, of one request and of several."""
    finished, held = Finished(), dict[str, Any]()
    for name, units in moves:
        if name in held:
            finished.discard(name)
            finished.discard(name)
            del held[name]
        else:
            held[name] = [(PARTS[of], np.array(ids, np.int64)) for of, ids in units]
            finished.add(name, SimpleNamespace(units=lambda units=held[name]: iter(units)))  # type: ignore[arg-type]
        assert (len(finished), {key for key in "abcd" if key in finished}) == (len(held), set(held))
        counts = {
            key: len({unit for lists in held.values() for of, ids in lists if of is item for unit in ids.tolist()})
            for key, item in PARTS.items()
        }
        over = {key for key, count in counts.items() if count > int(fraction * PARTS[key].allocator.capacity)}
        found = finished.over(fraction)
        assert (found is None) == (not over)
        if found is not None:
            assert found["range"] in over
            assert found["held_units"] == counts[found["range"]]
            assert found["limit_units"] == int(fraction * PARTS[found["range"]].allocator.capacity)
            assert found["prompts"] == len(held)
