"""Who holds each layer group, and what is refused by name before memory is touched."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import msgspec
import pytest

from kvcore.config import load_config
from kvcore.contract import IndexSpace
from kvcore.engine.sizing import plan_capacity
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.layout import Layout, SpaceSpec
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, Shard


class EachChunk(IndexSpace):
    """Like one state a request, but listed with every chunk."""

    kind = "each_chunk"

    def num_units(self, spec: SpaceSpec, length: int) -> int:
        return int(length > 0)

    def first_live(self, spec: SpaceSpec, length: int) -> int:
        return 0

    def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
        return 0, int(stop > 0)


def test_a_model_whose_state_nobody_holds_is_refused_with_its_name(chain: ModuleType) -> None:
    for components in ([], [chain.Numbers(), chain.Numbers()]):
        registry = chain.Registry(*components)
        with pytest.raises(UnsupportedError, match="exactly one state component") as error:
            registry.state_component(chain.CHAIN, model="chain-7b")
        fields = error.value.fields
        assert (fields["model"], fields["group"], fields["states"]) == ("chain-7b", "chain", ["h"])
        assert fields["got"] == ["numbers"] * len(components)
        assert error.value.remedy
    with pytest.raises(UnsupportedError) as error:
        chain.KVCache.create(chain.MODEL, load_config(), load_plugins(()))
    assert error.value.fields["model"] == "chain"
    assert chain.Registry(chain.Numbers()).state_component(chain.CHAIN).name == "numbers"


@pytest.mark.parametrize(("final", "kind"), [("each_chunk", "per_request"), ("prompt_done", "each_chunk")])
def test_a_state_that_is_final_at_another_time_than_its_space_lists_it(
    chain: ModuleType, monkeypatch: pytest.MonkeyPatch, final: str, kind: str
) -> None:
    """Sent before it is final, a receiver goes on from an old state; never sent, from none."""

    class Numbers(chain.Numbers):  # type: ignore[name-defined, misc]
        def layout(self, group: LayerGroup, *, shard: Shard, arena: Any) -> Layout:
            assert group.prefix != "full"
            return super().layout(group, shard=shard, arena=arena)  # type: ignore[no-any-return]

    model = ModelSpec("m", tuple(_in_space(group, kind) for group in chain.MODEL.groups), "fp32")
    spaces = {**load_plugins(()).index_spaces(), "each_chunk": EachChunk()}
    monkeypatch.setattr(chain.Registry, "index_spaces", lambda self: spaces)
    Numbers.final = final
    with pytest.raises(UnsupportedError, match="disagree on when the state is final") as error:
        chain.build(model, Numbers())
    fields = error.value.fields
    assert (fields["component"], fields["final"], fields["kind"]) == ("numbers", final, kind)
    assert fields["expected"] != final
    Numbers.final = fields["expected"]
    with chain.build(model, Numbers()) as cache:
        cache.admit("a", 3)


def _in_space(group: LayerGroup, kind: str) -> LayerGroup:
    return msgspec.structs.replace(group, space=kind) if group.kind == "state" else group


def test_slots_are_put_aside_for_checkpoints(chain: ModuleType) -> None:
    """4 requests: with 2 checkpoints each, 12 slots and the null one; what grows has the rest."""
    made = {}
    for checkpoints in (0, 2):
        with chain.build(**{"cache.checkpoints": checkpoints}) as cache:
            units = cache.capacity.units
            assert units["chain"] == units["draft/count"] == {"slots": 1 + 4 * (1 + checkpoints)}
            assert cache.capacity.per_request_bytes == (2 + 1) * 8 * (1 + checkpoints)
            assert cache.request_capacity == 4
            assert cache.capacity.allocated_bytes <= cache.config.cache.memory
            again = plan_capacity(cache.layouts, 32768, 4, step_tokens=64, step_rows=64, checkpoints=checkpoints)
            assert again == cache.capacity
            made[checkpoints] = units["full"]["pages"]
            for n in range(4):
                cache.admit(f"r{n}", 1)
            chain.run(cache, *((f"r{n}", [n]) for n in range(4)))
            if checkpoints:  # every request can use its share at once
                for n in range(4):
                    cache.checkpoint(f"r{n}")
                chain.run(cache, *((f"r{n}", [n, n]) for n in range(4)), accepted=[1] * 4, speculative=True)
    assert made[0] >= made[2]
    with pytest.raises(ConfigError, match="wrong value"):
        load_config(None, {"cache.checkpoints": -1})
