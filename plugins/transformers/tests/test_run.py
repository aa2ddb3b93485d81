"""``kvcore run`` as a user starts it: real processes, a tiny saved model, and everything that can go wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time

import pytest

from kvcore.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

PAGE_BYTES = 3 * 2 * 2 * 16 * 16 * 4


@pytest.fixture
def busy_prompts(run_kit, tmp_path, prompt):
    """One short prompt with a long answer, then prompts that take the prefill process a long time."""
    return run_kit.prompt_file(tmp_path / "busy.jsonl", prompt, enumerate([(5, 400), *[(1500, 4)] * 6]))


def test_sixteen_prompts_and_bad_ones(run_kit, tmp_path, prompt, tiny_directory):
    """Served, refused one by one, compared, reported: the exit code says that something failed."""
    lengths = (1, 15, 16, 17, 31, 32, 33, 64, 65, 256, 250, 40, 41, 42, 43, 100)
    path = tmp_path / "prompts.jsonl"
    run_kit.prompt_file(path, prompt, enumerate((length, 12) for length in lengths))
    with path.open("a") as file:
        for bad in (
            {"id": "empty", "token_ids": []},
            {"id": "r3", "token_ids": [1, 2]},
            {"id": "foreign", "token_ids": [97]},
            {"id": "long", "token_ids": [1] * 3000},
            {"id": "text", "text": "no tokenizer here"},
        ):
            file.write(json.dumps(bad) + "\n")
    memory = 100 * PAGE_BYTES
    run = run_kit.Run(
        "--model", str(tiny_directory), "--prompts", str(path), "--json", "--memory", str(memory), "--chunk", "64"
    )
    pids = run.pids()
    code, out = run.end()
    report = json.loads(out)
    assert code == 1
    assert (report["requests"], report["failed"]) == (21, 5)
    assert (report["agreement"], report["agreement_plain"]) == (1.0, 1.0)
    assert report["workers"] == pids
    assert report["bytes_moved"] == {"full/kv": sum(-(-n // 16) for n in lengths) * PAGE_BYTES}
    assert report["ops"]["load"] == 0
    assert report["ops"]["attend_decode"] > 0
    assert (report["format"], report["transport"]) == ("fp32", "shm")
    assert 0 < report["pulled_early"] < 1
    assert report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"]
    assert report["transfer_gbps"] > 0
    errors = {(item["id"], item["error"]["code"]) for item in report["results"] if item["error"]}
    assert errors == {
        ("empty", "empty_prompt"),
        ("r3", "duplicate_request"),
        ("foreign", "config"),
        ("long", "prompt_too_long"),
        ("text", "config"),
    }
    assert [item["id"] for item in report["results"]][-5:] == ["empty", "r3", "foreign", "long", "text"]
    served = {item["id"]: item for item in report["results"] if not item["error"]}
    assert len(served) == 16
    assert all(len(item["tokens"]) == 12 for item in served.values())
    assert all(run_kit.gone(pid) for pid in pids.values())


# One policy is enough for every day: within one process the engine's tests try all of them.
@pytest.mark.parametrize(
    "policy",
    ["backup", *(pytest.param(name, marks=pytest.mark.model) for name in ("recompute", "host_pool"))],
)
def test_little_memory_retracts(run_kit, tmp_path, prompt, tiny_directory, policy):
    path = run_kit.prompt_file(
        tmp_path / "p.jsonl", prompt, enumerate((length, 40) for length in (30, 31, 14, 47, 1, 62))
    )
    memory = str(10 * PAGE_BYTES)
    run = run_kit.Run(
        "--model", str(tiny_directory), "--prompts", path, "--json", "--memory", memory, "--retraction", policy
    )
    code, out = run.end()
    report = json.loads(out)
    assert (code, report["failed"]) == (0, 0)
    assert (report["agreement"], report["agreement_plain"]) == (1.0, 1.0)
    assert report["retractions"] > 0
    expected = {"recompute": "recomputed"}.get(policy, "resumed")
    assert report[expected] == report["retractions"] == report["resumed"] + report["recomputed"]
    assert report["ops"]["load"] == 0


def test_kill_9_of_the_prefill_process(run_kit, busy_prompts, tiny_directory):
    """What was not transferred fails typed within ten seconds, what was goes on, and nothing is left."""
    run = run_kit.Run("--model", str(tiny_directory), "--prompts", busy_prompts, "--json", "--chunk", "4")
    pids = run.pids()
    run.wait_line(r"r0 pulled")
    os.kill(pids["prefill"], signal.SIGKILL)
    killed = time.monotonic()
    run.wait_line(r"r6 failed", seconds=20)
    failed = [at for at, line in run.lines if " failed: " in line]
    assert len(failed) >= 5
    assert max(failed) - killed < 10
    code, out = run.end()
    report = json.loads(out)
    assert code == 1
    results = {item["id"]: item for item in report["results"]}
    assert len(results["r0"]["tokens"]) == 400
    assert results["r0"]["error"] is None
    assert (report["agreement"], report["agreement_plain"]) == (1.0, 1.0)
    lost = [item["error"] for item in results.values() if item["error"]]
    assert len(lost) == report["failed"] >= 5
    assert {error["code"] for error in lost} == {"peer_lost"}
    assert all(run_kit.gone(pid) for pid in pids.values())


@pytest.mark.model
def test_kill_9_of_the_decode_process(run_kit, busy_prompts, tiny_directory):
    run = run_kit.Run("--model", str(tiny_directory), "--prompts", busy_prompts, "--json", "--chunk", "4")
    pids = run.pids()
    run.wait_line(r"r0 pulled")
    os.kill(pids["decode"], signal.SIGKILL)
    killed = time.monotonic()
    code, out = run.end()
    assert time.monotonic() - killed < 20
    report = json.loads(out)
    assert (code, report["failed"], report["agreement"]) == (1, 7, None)
    assert {item["error"]["code"] for item in report["results"]} == {"peer_lost"}
    assert all(run_kit.gone(pid) for pid in pids.values())


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, r"r0 pulled"), pytest.param(signal.SIGTERM, r"prefill process", marks=pytest.mark.model)],
)
def test_an_interrupt_ends_cleanly(run_kit, busy_prompts, tiny_directory, number, moment):
    run = run_kit.Run("--model", str(tiny_directory), "--prompts", busy_prompts, "--json", "--chunk", "4")
    pids = run.pids()
    run.wait_line(moment)
    run.process.send_signal(number)
    begun = time.monotonic()
    code, out = run.end()
    assert time.monotonic() - begun < 60
    assert (code, out) == (130, "")
    assert "Traceback" not in run.text
    assert "interrupted" in run.text
    assert all(run_kit.gone(pid) for pid in pids.values())


@pytest.mark.model
def test_kill_9_of_the_parent_leaves_no_process(run_kit, busy_prompts, tiny_directory):
    run = run_kit.Run("--model", str(tiny_directory), "--prompts", busy_prompts, "--json", "--chunk", "4")
    pids = run.pids()
    run.wait_line(r"r0 pulled")
    run.process.kill()
    run.end()
    assert all(run_kit.gone(pid, seconds=15) for pid in pids.values())


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--model", "/nowhere"), 2, "does not exist"),
        (("--format", "fp33"), 2, "fp32"),
        (("--transport", "smm"), 2, "shm"),
        (("--retraction", "host_tensr"), 2, "host_tensor"),
        (("--memory", "64MiBB"), 2, "MiB"),
        (("--memory", "1KiB"), 2, "memory"),
        (("--prompts", "/nowhere.jsonl"), 2, "cannot be read"),
        (("--chunk", "100000"), 2, "chunk"),
    ],
)
def test_what_cannot_work_is_refused_before_a_process_is_started(
    tiny_directory, monkeypatch, capsys, options, code, words
):
    def never(*args, **kwargs):
        raise AssertionError(f"a process is started: {args}")

    monkeypatch.setattr(subprocess, "Popen", never)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", never)
    base = () if "--model" in options else ("--model", str(tiny_directory))
    got = main(["run", *base, *options])
    out, text = capsys.readouterr()
    assert (got, out) == (code, "")
    assert words in text
    assert "Traceback" not in text
