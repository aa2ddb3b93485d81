"""``kvcore run`` with block scales, as a user starts it: two processes, transfer, retraction, equal tokens."""

from __future__ import annotations

import json

import pytest
import torch

from kvcore.config import Config
from kvcore_transformers.modeling.attention import ATTENTION, PagedBatch
from kvcore_transformers.modeling.steady import steady_rows
from kvcore_transformers.models.loading import cache_for
from kvcore_transformers.models.weights import ensure_model

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 128, 130, 40)
NEW = 24

LAYOUTS = {
    "flat": ("--page-size", "16"),
    "interleaved": ("--page-size", "32", "--set", "cache.format_options.scale_layout=interleaved"),
}


def token_bytes(models) -> dict[str, int]:
    """What the components of a token take, written out."""
    heads = models.LAYERS * 2 * models.KV_HEADS
    return {"full/kv": heads * models.DIM, "full/block_scale": heads * models.DIM // 32}


@pytest.fixture(scope="module")
def served(mx_models, tmp_path_factory):
    """``served(layout, *options)``: the report of sixteen prompts on a tiny model."""
    directory = mx_models.save(mx_models.tiny_model(), tmp_path_factory.mktemp("model"))
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"id": f"r{n}", "token_ids": mx_models.prompt(length, n)} for n, length in enumerate(LENGTHS)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(layout: str, name: str, *options: str):
        fixed = ("--model", str(directory), "--prompts", str(prompts), "--max-new-tokens", str(NEW))
        return mx_models.run(*fixed, "--format", name, *LAYOUTS[layout], *options)

    return run


@pytest.mark.model  # four processes that load torch, and one of them more than once
@pytest.mark.parametrize(("layout", "name"), [("interleaved", "mxfp8"), ("flat", "mxfp8_e5m2")])
def test_sixteen_requests(served, mx_models, layout, name) -> None:
    """Every page is pulled with its scales, and decoding goes on as if nothing had moved."""
    report = served(layout, name, "--memory", "4MiB")
    assert (report["requests"], report["failed"], report["agreement"]) == (16, 0, 1.0)
    page = int(LAYOUTS[layout][1])
    tokens = sum(-(-length // page) * page for length in LENGTHS)
    # Interleaved scales are padded to fours: the padding is not moved.
    assert report["bytes_moved"] == {key: tokens * each for key, each in token_bytes(mx_models).items()}
    assert report["ops"]["load"] == 0
    assert report["ops"]["attend_decode"] > 0
    assert (report["format"], report["retractions"]) == (name, 0)


@pytest.mark.model  # four processes that load torch, and one of them more than once
@pytest.mark.parametrize(("layout", "backend"), [("flat", "host_tensor"), ("interleaved", "host_pool")])
def test_forced_retraction_changes_no_token(served, mx_models, layout, backend) -> None:
    """B2: restored, not recomputed."""
    page = int(LAYOUTS[layout][1])
    each = sum(token_bytes(mx_models).values())
    padding = 0 if layout == "flat" else token_bytes(mx_models)["full/block_scale"]
    # Room for the longest request and little else, and answers that outgrow a page of either size.
    memory = (224 + page) * (each + padding)
    report = served(layout, "mxfp8", "--memory", str(memory), "--retraction", backend, "--max-new-tokens", "40")
    assert (report["requests"], report["failed"], report["agreement"]) == (16, 0, 1.0)
    assert report["retractions"] > 0
    assert report["resumed"] == report["retractions"]
    assert report["recomputed"] == 0


def test_company_changes_no_bit(mx_models) -> None:
    """A format that rounds to three bits makes visible what a last bit changes: so no last bit may depend on who else is
    in a batch, or runs that are batched unlike would part."""
    model = mx_models.tiny_model()
    model.set_attn_implementation(ATTENTION)
    steady_rows(model)
    lengths = (1, 15, 33, 70, 2)
    together = logits(mx_models, model, lengths, [range(5)])
    for batches in ([[0], [1], [2], [3], [4]], [[4, 0], [3, 1, 2]]):
        apart = logits(mx_models, model, lengths, batches)
        assert apart.keys() == together.keys()
        assert [key for key, found in apart.items() if not torch.equal(found, together[key])] == []


@torch.inference_mode()
def logits(models, model, lengths, batches) -> dict[tuple[int, int], torch.Tensor]:
    """Of every request's prompt and of a few more tokens, the requests of a batch in one forward pass."""
    found = {}
    with cache_for(model, Config.from_mapping({"cache": {"format": "mxfp8", "memory": "2MiB"}})) as cache:
        for batch in batches:
            for n in batch:
                cache.admit(str(n), lengths[n])
            for start, stop in ((None, 0), *((k, k + 1) for k in range(4))):
                spans = [(n, 0 if start is None else lengths[n] + start, lengths[n] + stop) for n in batch]
                ids = [token for n, lo, hi in spans for token in models.prompt(99, n)[lo:hi]]
                at = [position for _, lo, hi in spans for position in range(lo, hi)]
                with cache.begin([(str(n), hi - lo) for n, lo, hi in spans]) as step:
                    out = model(
                        input_ids=torch.tensor([ids]),
                        position_ids=torch.tensor([at]),
                        cache=PagedBatch(step, cache.model),
                        use_cache=True,
                    ).logits[0]
                    step.commit()
                ends = torch.tensor([hi - lo for _, lo, hi in spans]).cumsum(0) - 1
                found |= {(n, hi): out[end] for (n, _, hi), end in zip(spans, ends, strict=True)}
    return found


@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("memory", ["256MiB", "4640KiB"], ids=["roomy", "retraction"])
def test_the_real_model(mx_models, memory) -> None:
    """Transfer and retraction add no error of their own: 16 requests, the tokens of a single process."""
    pytest.importorskip("gguf")
    ensure_model(None)
    report = mx_models.run("--format", "mxfp8", "--memory", memory)
    assert (report["requests"], report["failed"], report["agreement"]) == (16, 0, 1.0)
    assert report["bytes_moved"]["full/kv"] == 32 * report["bytes_moved"]["full/block_scale"]
    assert report["ops"]["load"] == 0
    assert (report["retractions"] > 0) == (memory != "256MiB")
    assert report["resumed"] == report["retractions"]
    assert report["recomputed"] == 0
