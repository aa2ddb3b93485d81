"""kivi2 against a plain simulation in numpy: what lies in memory bit for bit, and attention in fp64, over random chunks,
retractions, forks, rejected tokens and aborts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kvcore import KVCache, LayerGroup, ModelSpec, Shard, TensorSpec, load_config, load_plugins
from kvcore.contract import AttendParams
from kvcore_kivi2.format import Kivi2

LAYERS, HEADS, QUERY_HEADS = (2, 5), 2, 6
WIDTHS = {"k": 64, "v": 32}
SPEC = LayerGroup(
    "full", LAYERS, tuple(TensorSpec(name, HEADS, width) for name, width in WIDTHS.items()), num_query_heads=QUERY_HEADS
)
SCALE = 0.11


@pytest.fixture
def cache() -> Iterator[KVCache]:
    settings = {"cache.format": "kivi2", "cache.memory": "2MiB", "cache.max_requests": 8, "cache.max_tokens": 400}
    config = load_config(None, {**settings, "retraction.policy": "backup"})
    with KVCache.create(ModelSpec("m", (SPEC,), "fp32"), config, load_plugins(config)) as made:
        made.poison_freed = True
        yield made


# --- the simulation --------------------------------------------------------------------------------------------------


def two_bits(run: np.ndarray) -> tuple[list[int], np.float16, np.float16]:
    """Codes, scale and zero point of one run of fp16 numbers, one after the other."""
    low, high = float(run.min()), float(run.max())
    scale = np.float16(np.float32(np.float32(high) - np.float32(low)) / np.float32(3))
    codes = []
    for value in run.tolist():
        step = np.float32(np.float32(value - low) / np.float32(scale)) if scale > 0 else np.float32(0)
        codes.append(int(min(3, max(0, np.rint(step)))))
    return codes, scale, np.float16(low)


@dataclass
class Sequence:
    """One layer of one request: every token in fp16, and how long it was."""

    rows: dict[str, np.ndarray] = field(default_factory=lambda: {n: np.empty((0, HEADS, w)) for n, w in WIDTHS.items()})

    def group(self, name: str, number: int) -> dict[str, np.ndarray]:
        """Bytes of one whole group of 32 tokens."""
        rows = self.rows[name][32 * number : 32 * number + 32]
        width = WIDTHS[name]
        if name == "k":
            codes = np.zeros((HEADS, width, 8), np.uint8)
            scale, zero = np.zeros((2, HEADS, width), np.float16)
        else:
            codes = np.zeros((HEADS, 32, width // 4), np.uint8)
            scale, zero = np.zeros((2, HEADS, 32, width // 32), np.float16)
        for place in np.ndindex(scale.shape):
            if name == "k":
                head, channel = place
                run, first = rows[:, head, channel], 0
                target = codes[head, channel]
            else:
                head, token, block = place
                run, first = rows[token, head, 32 * block : 32 * block + 32], 8 * block
                target = codes[head, token]
            values, scale[place], zero[place] = two_bits(run)
            for n, value in enumerate(values):
                target[first + n // 4] |= value << 2 * (n % 4)
        return {name: codes, f"{name}_scale": scale, f"{name}_zero": zero}

    def read(self, name: str, length: int) -> np.ndarray:
        """What attention reads of the first ``length`` tokens, fp64 ``[length, H, D]``."""
        out = self.rows[name][:length].astype(np.float64)
        for number in range(max(0, length // 32 - 1)):
            for place in np.ndindex(out.shape[1:]):
                head, channel = place
                if name == "k":
                    codes, scale, zero = two_bits(self.rows[name][32 * number : 32 * number + 32, head, channel])
                    out[32 * number : 32 * number + 32, head, channel] = np.array(codes) * float(scale) + float(zero)
            if name == "v":
                for token in range(32 * number, 32 * number + 32):
                    for head in range(HEADS):
                        for block in range(WIDTHS[name] // 32):
                            cut = slice(32 * block, 32 * block + 32)
                            codes, scale, zero = two_bits(self.rows[name][token, head, cut])
                            out[token, head, cut] = np.array(codes) * float(scale) + float(zero)
        return out


def attention(
    sequence: Sequence,
    q: np.ndarray,
    length: int,
    window: int | None,
    sinks: np.ndarray | None,
    bias: np.ndarray | None,
) -> np.ndarray:
    """The newest tokens' attention, one query and head after the other: ``q [T, Hq, Dk]``, ``bias [T, Hq, length]``."""
    k, v = sequence.read("k", length), sequence.read("v", length)
    out = np.zeros((len(q), QUERY_HEADS, WIDTHS["v"]))
    for n in range(len(q)):
        at = length - len(q) + n
        first = 0 if window is None else max(0, at - window + 1)
        for head in range(QUERY_HEADS):
            mine = head // (QUERY_HEADS // HEADS)
            scores = k[first : at + 1, mine] @ q[n, head] * SCALE
            if bias is not None:
                scores += bias[n, head, first : at + 1]
            top = scores.max() if sinks is None else max(scores.max(), sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
            out[n, head] = weights / total @ v[first : at + 1, mine]
    return out


# --- both side by side -----------------------------------------------------------------------------------------------


class Pair:
    """A cache and the simulation of its requests."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.cache = cache
        self.rng = np.random.default_rng(seed)
        self.live: dict[str, dict[int, Sequence]] = {}
        self.away: dict[str, Any] = {}
        self.checked = 0

    def admit(self, name: str, tokens: int) -> None:
        self.cache.admit(name, tokens)
        self.live[name] = {layer: Sequence() for layer in LAYERS}

    def length(self, name: str) -> int:
        return len(self.live[name][LAYERS[0]].rows["k"])

    def step(self, counts: dict[str, int], accepted: dict[str, int] | None = None, **params: Any) -> None:
        """Store and attend, and compare attention of every row."""
        total = sum(counts.values())
        sinks = params.pop("sinks", None)
        window = params.pop("window", None)
        longest = max(self.length(name) + count for name, count in counts.items())
        bias = self.rng.standard_normal((total, QUERY_HEADS, longest)) if params.pop("biased", False) else None
        with self.cache.begin(list(counts.items())) as step:
            for layer in LAYERS:
                # Channels of very unlike size, as keys have.
                rows = {
                    name: self.rng.standard_normal((total, HEADS, width))
                    * np.exp(self.rng.normal(0, 2, (1, HEADS, width)))
                    for name, width in WIDTHS.items()
                }
                step.store(layer, {name: torch.from_numpy(x).to(torch.float32) for name, x in rows.items()})
                q = self.rng.standard_normal((total, QUERY_HEADS, WIDTHS["k"])).astype(np.float32)
                out = torch.full((total, QUERY_HEADS, WIDTHS["v"]), torch.nan)
                given, added = (None if x is None else torch.from_numpy(x).float() for x in (sinks, bias))
                step.attend(layer, torch.from_numpy(q), out, AttendParams(SCALE, window, given, added))
                at = 0
                for name, count in counts.items():
                    mine = self.live[name][layer]
                    for tensor, x in rows.items():
                        new = x[at : at + count].astype(np.float32).astype(np.float16)
                        mine.rows[tensor] = np.concatenate((mine.rows[tensor], new))
                    mine_of = slice(at, at + count)
                    want = attention(
                        mine,
                        q[mine_of].astype(np.float64),
                        self.length_of(mine),
                        window,
                        sinks,
                        None if bias is None else bias[mine_of],
                    )
                    np.testing.assert_allclose(
                        out[at : at + count].numpy(), want, rtol=2e-4, atol=2e-4 * np.abs(want).max()
                    )
                    at += count
            step.commit(None if accepted is None else [accepted[name] for name in counts])
        for name, count in (accepted or {}).items():
            for sequence in self.live[name].values():
                self.cut(sequence, self.length_of(sequence) - counts[name] + count)

    @staticmethod
    def length_of(sequence: Sequence) -> int:
        return len(sequence.rows["k"])

    @staticmethod
    def cut(sequence: Sequence, length: int) -> None:
        sequence.rows = {name: rows[:length] for name, rows in sequence.rows.items()}

    def compare(self, name: str) -> None:
        """Every byte that a later step can read."""
        length = self.length(name)
        assert self.cache.length(name) == length
        pool = self.cache.store.pools["full"]
        ring, groups = (self.cache.units(name, "full", part) for part in ("recent", "groups"))
        assert len(groups) == length // 32
        for layer, sequence in self.live[name].items():
            for tensor in WIDTHS:
                newest = np.arange(max(0, length - 63), length)  # the next query sees 64, itself included
                got = pool.field(layer, f"{tensor}_recent", "x")[torch.from_numpy(ring[newest % 96])].numpy()
                np.testing.assert_array_equal(got, sequence.rows[tensor][newest])
                for number, unit in enumerate(groups.tolist()):
                    for region, want in sequence.group(tensor, number).items():
                        np.testing.assert_array_equal(pool.field(layer, region, "x")[unit].numpy(), want, region)
                        self.checked += want.size

    def retract(self, name: str) -> None:
        self.away[name] = (self.cache.retract(name), self.live.pop(name))

    def resume(self, name: str) -> None:
        handle, self.live[name] = self.away.pop(name)
        self.cache.resume(handle)


@pytest.mark.parametrize("seed", range(4))
def test_no_difference_over_random_chunks_and_retractions(cache: KVCache, seed: int) -> None:
    pair = Pair(cache, seed)
    rng = np.random.default_rng(100 + seed)
    retractions = 0
    for name in "abc":
        pair.admit(name, 1)
    for turn in range(14):
        names = [name for name in pair.live if rng.random() < 0.8]
        decode = turn % 3 == 2
        counts = {name: 1 if decode else int(rng.choice([1, 2, 31, 32, 33, 70, 110])) for name in names}
        counts = {name: count for name, count in counts.items() if pair.length(name) + count < 280}
        if counts:
            pair.step(counts)
        if pair.live and rng.random() < 0.5:
            pair.retract(str(rng.choice(list(pair.live))))
            retractions += 1
        if pair.away and rng.random() < 0.7:
            pair.resume(str(rng.choice(list(pair.away))))
    for name in list(pair.away):
        pair.resume(name)
    for name in pair.live:
        pair.compare(name)
    assert retractions >= 3
    assert pair.checked > 10_000
    cache.check_integrity()


def test_windows_sinks_bias_and_unlike_lengths_in_one_decode_step(cache: KVCache) -> None:
    pair = Pair(cache, 7)
    for name, tokens in (("a", 130), ("b", 3), ("c", 64)):
        pair.admit(name, tokens)
        pair.step({name: tokens})
    sinks = np.random.default_rng(1).normal(0, 2, QUERY_HEADS)
    pair.step({"a": 1, "b": 1, "c": 1}, sinks=sinks)
    pair.step({"b": 1, "a": 1}, window=40, biased=True)
    pair.step({"a": 5, "c": 2}, window=70, sinks=sinks, biased=True)
    for name in "abc":
        pair.compare(name)


@pytest.mark.parametrize("kept", [0, 1, 5, 20])
def test_rejected_tokens_leave_nothing(cache: KVCache, kept: int) -> None:
    """A group that is completed by drafts and then again by other tokens holds the others."""
    pair = Pair(cache, 3)
    pair.admit("a", 60)
    pair.step({"a": 60})
    pair.step({"a": 20}, {"a": kept})
    pair.compare("a")
    pair.step({"a": 40})
    pair.step({"a": 1})
    pair.compare("a")


def test_forks_go_their_own_ways(cache: KVCache) -> None:
    pair = Pair(cache, 4)
    pair.admit("a", 90)
    pair.step({"a": 90})
    cache.fork("a", "b", 70)
    pair.live["b"] = {}
    for layer, sequence in pair.live["a"].items():
        pair.live["b"][layer] = Sequence(dict(sequence.rows))
        pair.cut(pair.live["b"][layer], 70)
    pair.compare("b")
    pair.step({"a": 7, "b": 30})
    pair.step({"a": 1, "b": 1})
    for name in "ab":
        pair.compare(name)
    cache.release("a")
    pair.step({"b": 1})
    pair.compare("b")
    cache.check_integrity()


def test_a_row_that_is_released_inside_a_step_writes_nothing(cache: KVCache) -> None:
    pair = Pair(cache, 5)
    for name in "ab":
        pair.admit(name, 60)
        pair.step({name: 60})
    arena = cache.store.arenas()["full"]
    step = cache.begin([("a", 40)])
    cache.release("a")
    before = arena.array().copy()
    step.store(LAYERS[0], {name: torch.ones(40, HEADS, width) for name, width in WIDTHS.items()})
    np.testing.assert_array_equal(arena.array(), before)
    step.abandon()
    pair.compare("b")


@pytest.mark.parametrize("dropped", [3, 31])
def test_a_group_with_a_dropped_token_is_not_written(cache: KVCache, dropped: int) -> None:
    cache.admit("a", 64)
    with cache.begin([("a", 64)]) as step:
        valid = torch.ones(64, dtype=torch.bool)
        valid[dropped] = False
        rows = {name: torch.ones(64, HEADS, width) for name, width in WIDTHS.items()}
        step.store(LAYERS[0], rows, valid)
        zeros = cache.store.pools["full"].field(LAYERS[0], "v_zero", "x")
        first, second = cache.units("a", "full", "groups").tolist()
        assert not zeros[first].any()
        assert (zeros[second] == 1).all()


def test_what_is_not_a_number_shows_and_what_is_too_large_saturates(cache: KVCache) -> None:
    cache.admit("a", 96)
    rows = {name: torch.zeros(96, HEADS, width) for name, width in WIDTHS.items()}
    rows["k"][5, 0, 7] = torch.nan
    rows["v"][6, 1, 3] = 1e6
    with cache.begin([("a", 96)]) as step:
        step.store(LAYERS[0], rows)
        pool, unit = cache.store.pools["full"], int(cache.units("a", "full", "groups")[0])
        zero, scale = (pool.field(LAYERS[0], f"k_{part}", "x")[unit] for part in ("zero", "scale"))
        assert zero.isnan().sum() == 1
        assert zero[0, 7].isnan()
        assert scale[0, 7].isnan()
        top = pool.field(LAYERS[0], "v_scale", "x")[unit]
        assert top[1, 6, 0] == torch.tensor(65504 / 3).half()
        assert top.isfinite().all()


def test_a_cache_of_another_kind_is_refused() -> None:
    fmt = Kivi2()
    for tensors, space, reason in (
        ((TensorSpec("latent", 1, 64),), "sequence", "k and v"),
        ((TensorSpec("k", 2, 40), TensorSpec("v", 2, 32)), "sequence", "multiple of 32"),
        ((TensorSpec("k", 2, 32), TensorSpec("v", 1, 32)), "sequence", "as many heads"),
    ):
        answer = fmt.supports(LayerGroup("full", (0,), tensors, num_query_heads=2, space=space))
        assert not answer
        assert reason in answer.reason


def test_whole_groups_are_encoded_to_the_bit() -> None:
    fmt = Kivi2()
    layout = fmt.layout(SPEC, page_size=16, shard=Shard(), arena="page_major")
    generator = torch.Generator().manual_seed(5)
    rows = {name: 3 * torch.randn(96, HEADS, width, generator=generator) for name, width in WIDTHS.items()}
    rows["k"][:, 0, 7] = 2.5  # a run of one value
    exact = Sequence({name: values.half().numpy() for name, values in rows.items()})
    encoded = fmt.encode(layout, rows)
    for name in WIDTHS:
        for n in range(3):
            for part, want in exact.group(name, n).items():
                np.testing.assert_array_equal(encoded[part, "x"][n].numpy(), want, part)
    for name, values in fmt.decode(layout, encoded, torch.float64).items():
        np.testing.assert_allclose(values[:64].numpy(), exact.read(name, 96)[:64], rtol=1e-6, atol=1e-6)
