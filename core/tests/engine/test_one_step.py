"""A step is its own: what is over touches nothing, one is open at a time, and a cache is held once."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvcore import (
    Config,
    KVCache,
    LayerGroup,
    ModelSpec,
    TensorSpec,
    load_config,
    load_plugins,
)
from kvcore.contract import AttendParams
from kvcore.engine.step import Step
from kvcore.errors import (
    BackupError,
    CapacityError,
    EmptyPromptError,
    RequestError,
    StaleHandleError,
    StepTooLargeError,
    UnsupportedError,
)

TENSORS = (TensorSpec("k", 2, 8), TensorSpec("v", 2, 8))
MODEL = ModelSpec("tiny", (LayerGroup("full", (0, 1), TENSORS, 2),), "fp32")


def build(**overrides: object) -> KVCache:
    settings = {"cache.page_size": 4, "cache.memory": "64KiB", "cache.max_rows": 4, "cache.max_tokens": 16}
    config: Config = load_config(None, {**settings, **overrides})
    return KVCache.create(MODEL, config, load_plugins(config))


@pytest.fixture
def cache() -> Iterator[KVCache]:
    with build() as made:
        for name in "ab":
            made.admit(name, 1)
        yield made


def rows(value: float, count: int = 1) -> dict[str, torch.Tensor]:
    return {name: torch.full((count, 2, 8), value) for name in "kv"}


def memory(cache: KVCache) -> dict[str, bytes]:
    return {name: arena.tensor().numpy().tobytes() for name, arena in cache.store.arenas().items()}


def ops(step: Step) -> dict[str, Callable[[], Any]]:
    q, out = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    return {
        "store": lambda: step.store(0, rows(3.0)),
        "attend": lambda: step.attend(0, q, out, AttendParams(1.0)),
        "run": lambda: step.run("score", 0, {}),
        "load": lambda: step.load(0, torch.tensor([5]), rows(0.0)),
        "batch": lambda: step.batch("full"),
        "state_slots": lambda: step.state_slots("full"),
        "state_trail": lambda: step.state_trail("full"),
        "commit": lambda: step.commit(),
        "abandon": lambda: step.abandon(),
    }


@pytest.mark.parametrize("end", ["commit", "abandon"])
@pytest.mark.parametrize("op", list(ops(None)))  # type: ignore[arg-type]
def test_a_step_that_is_over_touches_nothing(cache: KVCache, op: str, end: str) -> None:
    """Also where another step is open by now: its batch is not the old one's."""
    old = cache.begin([("a", 1)])
    old.store(0, rows(1.0))
    getattr(old, end)()
    new = cache.begin([("b", 1)])
    new.store(0, rows(2.0))
    before, counts = memory(cache), dict(cache.store.op_counts)
    with pytest.raises(StaleHandleError):
        ops(old)[op]()
    assert memory(cache) == before
    assert cache.store.op_counts == counts
    assert new.is_open
    new.commit()
    with pytest.raises(StaleHandleError):
        ops(old)[op]()
    assert memory(cache) == before
    assert cache.length("b") == 1


def test_a_second_step_is_refused_and_the_first_lives(cache: KVCache) -> None:
    first = cache.begin([("a", 1)])
    before, units = memory(cache), cache.units("b", "full", "pages").tolist()
    with pytest.raises(RequestError, match="a step is open") as error:
        cache.begin([("b", 1)])
    assert error.value.fields["rows"] == ["a"]
    assert memory(cache) == before
    assert cache.units("b", "full", "pages").tolist() == units
    assert cache.open_step is first
    first.store(0, rows(1.0))
    first.commit()
    assert cache.open_step is None
    with cache.begin([("b", 1)]) as second:
        second.store(0, rows(2.0))
        second.commit()
    for name, value in (("a", 1.0), ("b", 2.0)):
        got = rows(0.0)
        cache.store.load(0, torch.from_numpy(cache.slots(name, "full", 0, 1)), got)
        assert all(bool((x == value).all()) for x in got.values())


def test_a_late_store_does_not_reach_a_request_that_came_into_its_units(cache: KVCache) -> None:
    step = cache.begin([("a", 1)])
    step.store(0, rows(1.0))
    step.commit()
    kept = cache.retract("a")
    cache.admit("v", 1)
    before = memory(cache)
    with pytest.raises(StaleHandleError):
        step.store(0, rows(9.0))
    assert memory(cache) == before
    cache.release("v")
    cache.resume(kept)
    with pytest.raises(StaleHandleError):
        step.store(0, rows(9.0))


@pytest.mark.parametrize(
    ("asked", "key"), [([("a", 40)], "cache.max_tokens"), ([(n, 1) for n in "abcde"], "cache.max_rows")]
)
def test_a_limit_is_not_a_shortage(cache: KVCache, asked: list[tuple[str, int]], key: str) -> None:
    """Never "retract and retry": nothing is planned, nothing taken."""
    for name in "cde":
        cache.admit(name, 1)
    free, before = cache.stats().manager, memory(cache)
    with pytest.raises(StepTooLargeError) as error:
        cache.begin(asked)
    assert error.value.fields["key"] == key
    assert not isinstance(error.value, CapacityError)
    assert cache.stats().manager == free
    assert memory(cache) == before
    with cache.begin([("a", 1)]) as step:  # nothing is left open
        step.store(0, rows(1.0))
        step.commit()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_is_held_once_is_not_copied(cache: KVCache, way: Callable[[Any], Any]) -> None:
    step = cache.begin([("a", 1)])
    side = cache.serve()
    held = [cache, step, cache.manager, cache.store, cache.store.pools["full"], cache.store.arenas()["full"], side]
    for one in held:
        with pytest.raises(UnsupportedError, match="neither copied nor pickled") as error:
            way(one)
        assert error.value.fields["kind"] == type(one).__name__
    step.store(0, rows(1.0))
    step.commit()
    cache.check_integrity()


def test_closing_twice_closes_nobody_elses_file() -> None:
    cache = build()
    fds = [arena.fd for arena in cache.store.arenas().values()]
    cache.close()
    import os

    reader, writer = os.pipe()
    assert {reader, writer} & set(fds), "the numbers are used again"
    cache.close()
    del cache
    os.write(writer, b"x")
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.close(writer)


def test_a_process_may_end_with_an_open_cache() -> None:
    code = (
        "from kvcore import *\n"
        "t = (TensorSpec('k', 2, 8), TensorSpec('v', 2, 8))\n"
        "m = ModelSpec('tiny', (LayerGroup('full', (0,), t, 2),), 'fp32')\n"
        "c = load_config(None, {'cache.memory': '64KiB'})\n"
        "import kvcore.engine.cache as home\n"
        "home.kept = [KVCache.create(m, c, load_plugins(c.plugins)) for _ in range(3)]\n"
        "home.kept.append(home.kept)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_handle_of_another_cache_is_refused(cache: KVCache) -> None:
    with build() as other:
        for one, value in ((cache, 1.0), (other, 2.0)):
            one.admit("r", 3)
            with one.begin([("r", 3)]) as step:
                for layer in (0, 1):
                    step.store(layer, rows(value, 3))
                step.commit()
        theirs, ours = cache.retract("r"), other.retract("r")
        for call in (other.resume, other.drop):
            with pytest.raises(BackupError, match="another cache's"):
                call(theirs)
        assert "r" not in other.manager
        other.resume(ours)
        cache.resume(theirs)
        for one, value in ((cache, 1.0), (other, 2.0)):
            got = rows(0.0, 3)
            one.store.load(1, torch.from_numpy(one.slots("r", "full", 0, 3)), got)
            assert all(bool((x == value).all()) for x in got.values())


@pytest.mark.parametrize("tokens", [0, -1])
def test_an_empty_prompt_is_not_announced(cache: KVCache, tokens: int) -> None:
    side = cache.serve()
    with pytest.raises(EmptyPromptError):
        side.begin("e", tokens)
    side.begin("e", 3)  # the real one is no duplicate


def test_calls_of_several_threads_take_turns() -> None:
    """Requests come and go in four threads while a fifth steps: every byte is its owner's."""
    errors: list[BaseException] = []
    with build(**{"cache.memory": "256KiB"}) as cache:

        def live(name: str, value: float) -> None:
            try:
                for turn in range(30):
                    request = f"{name}{turn}"
                    cache.admit(request, 4)
                    with lock, cache.begin([(request, 4)]) as step:
                        for layer in (0, 1):
                            step.store(layer, rows(value, 4))
                        step.commit()
                    got = rows(0.0, 4)
                    cache.store.load(1, torch.from_numpy(cache.slots(request, "full", 0, 4)), got)
                    assert all(bool((x == value).all()) for x in got.values())
                    cache.release(request)
            except BaseException as error:  # noqa: BLE001 -- shown by the test
                errors.append(error)

        lock = threading.Lock()  # one step at a time is the caller's to see to
        threads = [threading.Thread(target=live, args=(name, float(n + 1))) for n, name in enumerate("wxyz")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        cache.check_integrity()
        assert cache.stats().manager.requests == 0


def test_a_call_waits_for_the_one_that_is_inside(cache: KVCache) -> None:
    seen: list[str] = []
    inside, go = threading.Event(), threading.Event()
    plan_step = cache.manager.plan_step

    def slow(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert go.wait(10)
        seen.append("step")
        return plan_step(*args, **kwargs)

    cache.manager.plan_step = slow  # type: ignore[method-assign]
    stepping = threading.Thread(target=lambda: cache.begin([("a", 1)]).abandon())
    stepping.start()
    assert inside.wait(10)
    admitting = threading.Thread(target=lambda: (cache.admit("c", 1), seen.append("admit")))
    admitting.start()
    admitting.join(0.05)
    assert admitting.is_alive(), "it did not wait"
    go.set()
    stepping.join(10)
    admitting.join(10)
    assert seen == ["step", "admit"]
    assert np.all(cache.units("c", "full", "pages") >= 0)


def test_a_cache_closed_inside_a_step_hides_nobodys_error() -> None:
    cache = build()
    cache.admit("a", 1)
    step = cache.begin([("a", 1)])

    def a_pass() -> None:
        with step:
            cache.close()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        a_pass()
    assert not step.is_open
    assert cache.open_step is None
    for op, call in ops(step).items():
        with pytest.raises(StaleHandleError, match="the cache is closed"):
            pytest.fail(f"{op} gave {call()}")


@pytest.mark.parametrize("accepted", [[1.0], ["1"]])
def test_a_refused_commit_leaves_the_step_open(cache: KVCache, accepted: list[Any]) -> None:
    """A list of a float tensor is what a speculating engine has at hand."""
    step = cache.begin([("a", 1)])
    step.store(0, rows(1.0))
    with pytest.raises(RequestError, match="whole number"):
        step.commit(accepted)
    cache.check_integrity()
    assert cache.open_step is step
    step.commit([1])
    assert cache.length("a") == 1


def test_a_closed_cache_says_so() -> None:
    cache = build()
    cache.admit("a", 1)
    step = cache.begin([("a", 1)])
    cache.close()
    calls: dict[str, Callable[[], Any]] = {
        "admit": lambda: cache.admit("b", 1),
        "fork": lambda: cache.fork("a", "b", 1),
        "begin": lambda: cache.begin([("a", 1)]),
        "retract": lambda: cache.retract("a"),
        "serve": cache.serve,
        "connect": lambda: cache.connect("tcp://127.0.0.1:1"),
        "store": lambda: step.store(0, rows(1.0)),
    }
    for call in calls.values():
        with pytest.raises(StaleHandleError):
            call()
    cache.close()
