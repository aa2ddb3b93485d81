"""``kvcore run`` with windows, with latents and with states: real prefill and decode processes, little memory, interrupts.

Slow: each run starts four processes that import torch and transformers.
"""

from __future__ import annotations

import json
import signal
import time

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PAGE = 4
LENGTHS = (30, 31, 14, 47, 1, 33)
NEW = 28
# Room for so few pages that requests are taken off. Where all layers have windows nothing grows, and nothing is.
MEMORY = {
    "gemma3": 24 * 3 * 2 * 2 * PAGE * 16 * 4,  # pages; layers, k and v, heads, slots, dim, fp32
    "mistral": 60 * 3 * 2 * 2 * PAGE * 16 * 4,
    "deepseek": 28 * 3 * PAGE * (32 + 16) * 4,  # pages; layers, slots, latent and rope, fp32
}
COMPONENTS = {
    "gemma3": {"full/kv", "swa/kv"},
    "mistral": {"swa/kv"},
    "deepseek": {"full/kv"},
    "inkling": {"full/kv", "swa/kv", "state/conv"},
    "qwen3_next": {"full/kv", "state/conv", "state/recurrent"},
}


@pytest.fixture
def start(run_kit, zoo, hybrid_kit, make_cache, prompt, tmp_path):
    """``start(name, backend)``: a run of a saved model, one of its prompts as text; ended when the test is."""
    runs = []

    def begin(name, backend="host_tensor"):
        model, plugins = zoo.make(name), ""
        directory = zoo.save(model, tmp_path / "model")
        if name in zoo.HYBRIDS:
            plugins = f"plugins = {[*hybrid_kit.PLUGINS]}\n"
        memory = MEMORY.get(name) or hybrid_kit.memory_for(make_cache, model, 24)
        prompts = tmp_path / "prompts.jsonl"
        run_kit.prompt_file(prompts, prompt, enumerate((length, NEW) for length in LENGTHS))
        with prompts.open("a") as file:
            file.write(json.dumps({"id": "text", "text": "w3 w14 w15 w92 w6 w53", "max_new_tokens": NEW}) + "\n")
        settings = tmp_path / "kvcore.toml"
        settings.write_text(
            f"{plugins}[cache]\npage_size = {PAGE}\nmax_requests = 4\nmax_tokens = 64\nmemory = {memory}\n"
        )
        options = ("--model", directory, "--prompts", prompts, "--config", settings, "--retraction", backend)
        runs.append(run_kit.Run(*map(str, options), "--chunk", "16", "--json"))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.end()


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("gemma3", "host_tensor"),
        ("gemma3", "host_pool"),
        ("deepseek", "host_tensor"),
        ("deepseek", "host_pool"),
        ("mistral", "host_pool"),
        ("inkling", "host_pool"),
        ("qwen3_next", "host_tensor"),
    ],
)
def test_two_processes_give_the_tokens_of_one_and_of_plain_transformers(start, run_kit, name, backend):
    """With so little memory that requests are retracted, and each comes back from the backend."""
    run = start(name, backend)
    pids = run.pids()
    code, out = run.end()
    assert code == 0, run.text
    report = json.loads(out)
    assert (report["requests"], report["failed"]) == (len(LENGTHS) + 1, 0)
    assert (report["agreement"], report["agreement_plain"]) == (1.0, 1.0)
    assert all(len(item["tokens"]) == NEW for item in report["results"])
    assert len({item["tokens"][-1] for item in report["results"]}) > 1, "texts that do not differ show nothing"
    assert report["retractions"] == report["resumed"]
    assert (report["retractions"] > 0) == (name != "mistral")
    assert {component for component, count in report["bytes_moved"].items() if count} == COMPONENTS[name]
    text = report["results"][-1]
    assert (text["id"], text["prompt_tokens"]) == ("text", 6)
    assert text["text"] == " ".join(f"w{token}" for token in text["tokens"])
    # Latents are expanded by the model, which needs them back; all else is attended to where it lies.
    assert (report["ops"]["load"] > 0) == (name == "deepseek")
    assert (report["ops"]["attend_decode"] > 0) == (name != "deepseek")
    assert all(run_kit.gone(pid) for pid in pids.values())


def test_an_interrupt_ends_every_process_also_at_the_end(start, run_kit):
    """Ctrl-C while two other processes compute what the two that served are compared with."""
    run = start("gemma3", "host_pool")
    run.wait_line(r"comparing with")
    workers = [pid for pid in run_kit.children(run.process.pid) if not run_kit.gone(pid, seconds=0)]
    assert len(workers) >= 2
    run.process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    code, out = run.end()
    assert time.monotonic() - begun < 10
    assert (code, out) == (130, "")
    assert "Traceback" not in run.text
    assert all(run_kit.gone(pid) for pid in workers)
