"""A model of full and sliding layers through the façade: what is evicted is poisoned, what is read is a dense oracle's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvcore.config import load_config
from kvcore.contract import AttendParams
from kvcore.engine.cache import KVCache
from kvcore.engine.peers import ReceiveDone, ReceiveFailed, ReceiveSide, SendDone, SendFailed, SendSide
from kvcore.errors import PromptTooLongError, UnsupportedError
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec

PAGE, WINDOW, QUERY_HEADS, DIM_K, DIM_V = 4, 10, 4, 8, 6
TENSORS = (TensorSpec("k", 2, DIM_K), TensorSpec("v", 2, DIM_V))
FULL, SLIDING, DRAFT = (0, 3), (1, 2), (10,)
WINDOWS = {**dict.fromkeys(FULL), **dict.fromkeys(SLIDING, WINDOW), **dict.fromkeys(DRAFT, WINDOW)}
MODEL = ModelSpec(
    "hybrid",
    (
        LayerGroup("full", FULL, TENSORS, QUERY_HEADS),
        LayerGroup("swa", SLIDING, TENSORS, QUERY_HEADS, space="window", space_options=(("window", WINDOW),)),
        # Its storage is also layer 11's.
        LayerGroup(
            "swa", DRAFT, TENSORS, QUERY_HEADS, space="window", space_options=(("window", WINDOW),), role="draft",
            shares=((11, 10),),
        ),
    ),
    "fp32",
)  # fmt: skip
GROUPS = ("full", "swa", "draft/swa")


def build(memory: str = "192KiB", **overrides: object) -> KVCache:
    settings = {"cache.page_size": PAGE, "cache.memory": memory, "cache.max_requests": 4, "cache.max_tokens": 32}
    config = load_config(None, {**settings, **overrides})
    return KVCache.create(MODEL, config, load_plugins(config))


def poison(cache: KVCache) -> None:
    """Fill every unit that nobody owns."""
    for group in GROUPS:
        cache.store.pools[group].fill(cache.manager.free_units(group, "pages"), 0xFF)


class Dense:
    """Keys and values of whole sequences in plain arrays, and attention over them token by token in fp64."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.kept: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}

    def rows(self, name: str, layer: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        new = tuple(self.rng.standard_normal((count, 2, dim)).astype(np.float32) for dim in (DIM_K, DIM_V))
        old = self.kept.get((name, layer), (np.zeros((0, 2, DIM_K), np.float32), np.zeros((0, 2, DIM_V), np.float32)))
        self.kept[name, layer] = (np.concatenate((old[0], new[0])), np.concatenate((old[1], new[1])))
        return new

    def cut(self, name: str, new_name: str, length: int) -> None:
        for layer in WINDOWS:
            k, v = self.kept[name, layer]
            self.kept[new_name, layer] = (k[:length], v[:length])

    def attend(self, name: str, layer: int, q: np.ndarray) -> np.ndarray:
        keys, values = self.kept[name, layer]
        out = np.zeros((len(q), QUERY_HEADS, DIM_V))
        first = len(keys) - len(q)
        for n in range(len(q)):
            position = first + n
            for head in range(QUERY_HEADS):
                seen = [t for t in range(position + 1) if WINDOWS[layer] is None or t > position - WINDOW]
                scores = np.array([float(q[n, head] @ keys[t, head // 2].astype(np.float64)) for t in seen]) * 0.3
                weights = np.exp(scores - scores.max())
                out[n, head] = (weights / weights.sum()) @ values[seen, head // 2].astype(np.float64)
        return out


def forward(cache: KVCache, dense: Dense, rows: list[tuple[str, int]]) -> None:
    """One step of every layer, compared with the oracle; then everything free is poisoned."""
    with cache.begin(rows) as step:
        for layer, window in WINDOWS.items():
            new = [dense.rows(name, layer, count) for name, count in rows]
            k, v = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*new, strict=True))
            step.store(layer, {"k": k, "v": v})
            q = dense.rng.standard_normal((len(k), QUERY_HEADS, DIM_K)).astype(np.float32)
            out = torch.full((len(k), QUERY_HEADS, DIM_V), torch.nan)
            reader = 11 if layer == 10 else layer
            step.attend(reader, torch.from_numpy(q), out, AttendParams(sm_scale=0.3, window=window))
            at = 0
            for name, count in rows:
                want = dense.attend(name, layer, q[at : at + count])
                np.testing.assert_allclose(out[at : at + count].numpy(), want, rtol=2e-4, atol=2e-5)
                at += count
        step.commit()
    poison(cache)


@pytest.fixture
def cache() -> Iterator[KVCache]:
    with build() as cache:
        for group in GROUPS:  # the null units stay zero
            cache.store.pools[group].arena.array()[cache.layouts[group].envelope_bytes :] = 0xFF
        cache.poison_freed = True
        yield cache


def assert_empty(cache: KVCache) -> None:
    cache.check_integrity()
    assert all(part.free == part.capacity for part in cache.stats().manager.ranges)


def test_hundreds_of_tokens_with_eviction_equal_a_dense_oracle(cache: KVCache) -> None:
    """Prompts in chunks longer than the window and single tokens, three requests at once."""
    dense = Dense(1)
    for name, prompt in (("a", 90), ("b", 13), ("c", 41)):
        cache.admit(name, prompt)
    forward(cache, dense, [("a", 29), ("b", 3)])
    forward(cache, dense, [("b", 10), ("a", 1), ("c", 21)])
    forward(cache, dense, [("a", 30), ("c", 2)])
    forward(cache, dense, [("a", 30)])
    for n in range(40):
        rows = [("a", 1), ("b", 1 + n % 2), ("c", 1)][n % 3 :]
        forward(cache, dense, rows)
        cache.check_integrity()
    for name in "abc":
        evicted = int(np.count_nonzero(cache.units(name, "swa", "pages") == 0))
        assert evicted > 3, "nothing was evicted: the test shows nothing"
        live = len(cache.units(name, "swa", "pages")) - evicted
        assert live <= -(-WINDOW // PAGE) + 1
        assert not np.any(cache.units(name, "full", "pages") == 0)
    for name in "abc":
        cache.release(name)
    assert_empty(cache)


def test_retraction_carries_the_window_and_resumes(cache: KVCache) -> None:
    dense = Dense(2)
    cache.admit("a", 50)
    for count in (30, 20, 1, 1, 1):
        forward(cache, dense, [("a", count)])
    handle = cache.retract("a", b"sampler")
    window = len({position // PAGE for position in range(53 - WINDOW + 1, 53)})
    pages = {"full": 14, "swa": window, "draft/swa": window}
    a_page = PAGE * 2 * (DIM_K + DIM_V) * 4
    assert handle.bytes_by_component == {
        f"{group}/kv": pages[group] * a_page * len(layers)
        for group, layers in zip(GROUPS, (FULL, SLIDING, DRAFT), strict=True)
    }
    assert_empty(cache)
    poison(cache)
    cache.admit("other", 24)  # other units than before, and other bytes in the old ones
    forward(cache, dense, [("other", 24)])
    cache.resume(handle)
    for count in (1, 1, 7, 1, 20, 1):
        forward(cache, dense, [("a", count), ("other", 1)])
    cache.release("a")
    cache.release("other")
    assert_empty(cache)


def test_a_fork_at_the_last_page_finds_its_whole_window(cache: KVCache) -> None:
    dense = Dense(3)
    cache.admit("a", 31)
    forward(cache, dense, [("a", 31)])
    # Pages from position 16 on are there, and a query at 25 sees 16 … 25.
    for at_most, usable in ((31, 31), (28, 28), (25, 25), (24, 0), (0, 0), (99, 31)):
        assert cache.manager.joint_prefix("a", at_most) == usable
    with pytest.raises(UnsupportedError) as error:
        cache.fork("a", "b", 15)
    assert error.value.fields["group"] == "swa"
    cache.fork("a", "b", 28)
    dense.cut("a", "b", 28)
    for _ in range(12):
        forward(cache, dense, [("b", 2), ("a", 1)])
        cache.check_integrity()
    cache.release("a")
    for _ in range(6):
        forward(cache, dense, [("b", 1)])
    cache.release("b")
    assert_empty(cache)


def test_rejected_tokens_leave_the_window_of_the_accepted_ones(cache: KVCache) -> None:
    dense = Dense(4)
    cache.admit("a", 20)
    forward(cache, dense, [("a", 20)])
    for accepted in (1, 4, 2, 3, 1, 4, 4, 1, 2):
        before = dict(dense.kept)
        with cache.begin([("a", 4)]) as step:
            for layer in WINDOWS:
                k, v = dense.rows("a", layer, 4)
                step.store(layer, {"k": torch.from_numpy(k), "v": torch.from_numpy(v)})
            step.commit([accepted])
        poison(cache)
        for layer in WINDOWS:
            length = len(before["a", layer][0]) + accepted
            k, v = dense.kept["a", layer]
            dense.kept["a", layer] = (k[:length], v[:length])
        forward(cache, dense, [("a", 1)])
        cache.check_integrity()


def test_every_request_and_a_whole_step_fit_what_is_put_aside() -> None:
    """With as many requests as configured, each behind a full window, a step of the configured size always fits."""
    with build("1MiB") as cache:
        assert cache.request_capacity == 4
        dense, names = Dense(5), ["a", "b", "c", "d"]
        for name in names:
            assert cache.can_admit(100)
            cache.admit(name, 100)
        assert not cache.can_admit(1)
        for _ in range(3):
            for name in names:
                forward(cache, dense, [(name, 32)])
        forward(cache, dense, [(name, 8) for name in names])
        forward(cache, dense, [(name, 2) for name in names])
        cache.check_integrity()


def test_attention_past_what_is_kept_is_refused(cache: KVCache) -> None:
    cache.admit("a", 3)
    with cache.begin([("a", 3)]) as step:
        q, out = torch.zeros(3, QUERY_HEADS, DIM_K), torch.zeros(3, QUERY_HEADS, DIM_V)
        for window in (None, WINDOW + 1):
            with pytest.raises(UnsupportedError) as error:
                step.attend(1, q, out, AttendParams(1.0, window=window))
            assert error.value.fields["got"] == window
        step.attend(1, q, out, AttendParams(1.0, window=WINDOW - 1))
        step.attend(0, q, out, AttendParams(1.0))


def test_a_step_that_no_window_can_ever_hold_is_refused_for_good() -> None:
    with build("16KiB") as cache:
        limit = cache.token_capacity
        assert limit is not None
        with pytest.raises(PromptTooLongError):
            cache.admit("a", limit + 1)
        cache.admit("a", limit)
        assert cache.manager.max_request_tokens == limit


# --- prefill to decode ---


def take(side: SendSide | ReceiveSide, kinds: tuple[type, ...]) -> object:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        side.wait_event(0.2)
        for event in side.events():
            if isinstance(event, kinds):
                return event
    raise AssertionError("no event")


@pytest.mark.parametrize("ask_first", [True, False])
@pytest.mark.parametrize("length", [1, 9, 12, 47, 64])
def test_prefill_to_decode_moves_the_final_window_only(cache: KVCache, length: int, ask_first: bool) -> None:
    dense = Dense(6)
    with build() as decode:
        for group in GROUPS:
            decode.store.pools[group].arena.array()[decode.layouts[group].envelope_bytes :] = 0xFF
        send = cache.serve()
        receive = decode.connect(send.address)
        if ask_first:
            receive.ask("r", length)
        cache.admit("r", length)
        send.begin("r", length)
        for start in range(0, length, 9):
            stop = min(start + 9, length)
            forward(cache, dense, [("r", stop - start)])
            send.offer("r", start, stop, last=stop == length)
        if not ask_first:
            receive.ask("r", length)
        done = take(receive, (ReceiveDone, ReceiveFailed))
        assert isinstance(done, ReceiveDone)
        window = len({position // PAGE for position in range(max(0, length - WINDOW + 1), length)})
        a_page = PAGE * 2 * (DIM_K + DIM_V) * 4
        assert done.bytes_by_component == {
            "full/kv": -(-length // PAGE) * a_page * 2,
            "swa/kv": window * a_page * 2,
            "draft/swa/kv": window * a_page,
        }
        assert isinstance(take(send, (SendDone, SendFailed)), SendDone)
        assert_empty(cache)
        poison(decode)
        for count in (1, 1, 6, 1, 15, 1):
            forward(decode, dense, [("r", count)])
        decode.check_integrity()


def test_offered_window_pages_stay_whatever_becomes_of_the_request(cache: KVCache) -> None:
    """Pages that a step took after the first offer are held too, and pages that are dead at the end are not."""
    dense = Dense(7)
    with build() as decode:
        send = cache.serve()
        receive = decode.connect(send.address)
        cache.admit("r", 60)
        send.begin("r", 60)
        for start in range(0, 60, 20):
            forward(cache, dense, [("r", 20)])
            send.offer("r", start, start + 20, last=start == 40)
        cache.manager.release("r")  # behind the façade's back, which would abort the transfer
        held = {part.group: part.quarantined for part in cache.stats().manager.ranges}
        assert held == {"full": 15, "swa": 3, "draft/swa": 3}
        poison(cache)
        receive.ask("r", 60)
        assert isinstance(take(receive, (ReceiveDone, ReceiveFailed)), ReceiveDone)
        assert isinstance(take(send, (SendDone, SendFailed)), SendDone)
        assert_empty(cache)
        forward(decode, dense, [("r", 1)])
