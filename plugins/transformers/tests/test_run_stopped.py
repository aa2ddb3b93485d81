"""``kvcore run`` when one of its processes is stopped: alive for the kernel, silent for everybody else.

Slow: real processes, and each run waits for the silence to be long enough.
"""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SILENCE_S = 4.0


@pytest.fixture
def start(run_kit, prompt, tmp_path, tiny_directory):
    """A run of one short prompt with a long answer, then prompts that take the prefill process a long time."""
    prompts = run_kit.prompt_file(tmp_path / "p.jsonl", prompt, enumerate([(5, 400), *[(1500, 4)] * 3]))
    settings = tmp_path / "kvcore.toml"
    settings.write_text(f"[transfer]\npeer_timeout_s = {SILENCE_S}\n")
    options = ("--model", str(tiny_directory), "--prompts", prompts, "--config", str(settings))
    run = run_kit.Run(*options, "--chunk", "4", "--json")
    yield run
    for pid in run_kit.children(run.process.pid):
        os.kill(pid, signal.SIGKILL)
    run.process.kill()
    run.end()


def stop(run, role):
    """Stop a process in the middle of the run; its id, and when."""
    pids = run.pids()
    run.wait_line(r"r0 pulled")
    os.kill(pids[role], signal.SIGSTOP)
    return pids, time.monotonic()


def test_a_stopped_prefill_process(start, run_kit):
    """What waits for it fails typed in time and what has arrived is served; going on later changes nothing."""
    pids, stopped = stop(start, "prefill")
    start.wait_line(r"r3 failed", seconds=30)
    failed = [at - stopped for at, line in start.lines if " failed: " in line]
    assert len(failed) >= 2
    assert max(failed) < SILENCE_S + 10
    os.kill(pids["prefill"], signal.SIGCONT)
    assert run_kit.ended(pids["prefill"]), "it goes on computing for nobody"
    code, out = start.end()
    report = json.loads(out)
    results = {item["id"]: item for item in report["results"]}
    assert (code, results["r0"]["error"], len(results["r0"]["tokens"])) == (1, None, 400)
    assert (report["agreement"], report["agreement_plain"]) == (1.0, 1.0)
    lost = [item["error"]["code"] for item in results.values() if item["error"]]
    assert len(lost) == report["failed"] >= 2
    assert set(lost) == {"peer_lost"}
    assert "Traceback" not in start.text
    assert all(run_kit.gone(pid) for pid in pids.values())


def test_a_stopped_decode_process(start, run_kit):
    """Every request fails typed, also those it had all of: nobody would ever say what became of them."""
    pids, stopped = stop(start, "decode")
    code, out = start.end()
    assert time.monotonic() - stopped < SILENCE_S + 15
    report = json.loads(out)
    assert (code, report["failed"], report["agreement"]) == (1, 4, None)
    assert {item["error"]["code"] for item in report["results"]} == {"peer_lost"}
    assert "Traceback" not in start.text
    assert all(run_kit.gone(pid) for pid in pids.values())
