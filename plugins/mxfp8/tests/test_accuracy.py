"""What the formats cost in accuracy: against torchao inside plain transformers, and on a real model; and a gate that can
fail."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from kvcore.config import Config
from kvcore.engine.cache import KVCache
from kvcore_transformers.commands.accuracy_report import Accuracy, Sums, compare, read_texts, shipped_texts
from kvcore_transformers.models.loading import cache_for, load_model, load_tokenizer
from kvcore_transformers.models.weights import ensure_model

TOKENS = 45
NO_SCALE = 127  # the byte that means 1.0


def make(model, name: str, memory: str = "2MiB", **cache) -> KVCache:
    return cache_for(model, Config.from_mapping({"cache": {"format": name, "memory": memory, **cache}}))


def measured(model, tokens, name, *, chunk=32, scaled=True, **cache) -> Accuracy:
    """A format against fp32 where nothing else differs."""
    with make(model, "fp32") as baseline, make(model, name, **cache) as tested:
        if not scaled:
            lose_scales(tested)
        return compare(model, baseline, tested, tokens, chunk=chunk).accuracy()


def lose_scales(cache: KVCache) -> None:
    """Have every block scale be 1.0 once it is stored."""
    store = cache.store.store

    def lossy(layer, rows, *args, **kwargs):
        fence = store(layer, rows, *args, **kwargs)
        for name in rows:
            cache.store.pools["full"].field(layer, f"{name}_block_scale", "scale").fill_(NO_SCALE)
        return fence

    cache.store.store = lossy  # type: ignore[method-assign]


class ByTorchao(transformers.DynamicCache):
    """Keys and values as torchao's reference keeps them."""

    def __init__(self, config, element, rule) -> None:
        super().__init__(config=config)
        self.element, self.rule = element, rule

    def update(self, keys, values, layer, *args, **kwargs):
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

        def kept(rows):
            scale, data = to_mx(rows.contiguous(), self.element, 32, ScaleCalculationMode[self.rule])
            return to_dtype(data, scale, self.element, 32, torch.float32)

        return super().update(kept(keys), kept(values), layer, *args, **kwargs)


@pytest.mark.parametrize("chunk", [1, 32])
@pytest.mark.parametrize(
    ("name", "element", "options"),
    [
        ("mxfp8", torch.float8_e4m3fn, {}),
        ("mxfp8", torch.float8_e4m3fn, {"scale_rule": "floor", "scale_layout": "interleaved"}),
        ("mxfp8_e5m2", torch.float8_e5m2, {"scale_layout": "interleaved"}),
        ("mxfp8_e5m2", torch.float8_e5m2, {"scale_rule": "floor", "order": "token_major"}),
    ],
)
def test_the_figures_are_those_of_torchao_in_plain_transformers(mx_models, name, element, options, chunk) -> None:
    """Chunk by chunk or token by token, through pages: the predictions of one pass over torchao's rounded tensors."""
    pytest.importorskip("torchao")
    model, tokens = mx_models.tiny_model(), mx_models.prompt(TOKENS, 1)
    ids, sums = torch.tensor(tokens), Sums()
    caches = (
        transformers.DynamicCache(config=model.config),
        ByTorchao(model.config, element, options.get("scale_rule", "rceil").upper()),
    )
    with torch.inference_mode():
        exact, rounded = (model(input_ids=ids[None], cache=cache, use_cache=True).logits[0, :-1] for cache in caches)
    sums.count(exact, rounded, ids[1:])
    want = sums.accuracy()
    found = measured(model, tokens, name, chunk=chunk, page_size=32, format_options=options)
    assert want.kl > 1e-4, "rounding shows"
    assert found.kl == pytest.approx(want.kl, rel=2e-2)
    assert found.perplexity == pytest.approx(want.perplexity, rel=1e-3)
    assert found.top1_agreement == pytest.approx(want.top1_agreement, abs=1.5 / TOKENS)


@pytest.mark.parametrize("scale_layout", ["flat", "interleaved"])
def test_lost_scales_show(mx_models, scale_layout) -> None:
    model, tokens = mx_models.tiny_model(), mx_models.prompt(TOKENS, 2)
    options = {"page_size": 32, "format_options": {"scale_layout": scale_layout}}
    kept = measured(model, tokens, "mxfp8", **options)
    lost = measured(model, tokens, "mxfp8", scaled=False, **options)
    assert kept.kl < 0.05
    assert lost.kl > 20 * kept.kl
    assert lost.top1_agreement < kept.top1_agreement


# --- the real model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm():
    """The demonstration model, and the shipped texts as tokens."""
    pytest.importorskip("gguf")
    directory = ensure_model(None)
    tokenizer = load_tokenizer(directory)
    texts = [tokenizer(text)["input_ids"] for text in read_texts(shipped_texts()).values()]
    assert len(texts) == 2
    assert sum(map(len, texts)) - 2 >= 768
    return load_model(directory), texts


def on_smollm(smollm, name: str, *, scaled: bool = True, **cache) -> Accuracy:
    """A format against bf16, over both texts."""
    model, texts = smollm
    total = Sums()
    with make(model, "bf16", "32MiB") as baseline, make(model, name, "16MiB", **cache) as tested:
        if not scaled:
            lose_scales(tested)
        for tokens in texts:
            total.add(compare(model, baseline, tested, tokens, chunk=64))
    return total.accuracy()


@pytest.mark.model
@pytest.mark.timeout(900)
def test_mxfp8_on_the_real_model(smollm) -> None:
    found = on_smollm(smollm, "mxfp8")
    assert found.kl <= 0.02
    assert found.top1_agreement >= 0.93
    assert found.perplexity == pytest.approx(found.baseline_perplexity, rel=0.02)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_mxfp8_e5m2_on_the_real_model(smollm) -> None:
    """Two bits of mantissa less than bf16 has beyond e4m3's: measurably worse, and far from broken."""
    found = on_smollm(smollm, "mxfp8_e5m2")
    assert found.kl <= 0.04
    assert found.top1_agreement >= 0.88
    assert found.perplexity == pytest.approx(found.baseline_perplexity, rel=0.05)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_without_scales_the_real_model_cannot_read(smollm) -> None:
    """The gate can fail: the same elements with every scale 1.0."""
    found = on_smollm(smollm, "mxfp8", scaled=False)
    assert not found.perplexity <= 1000
    assert not math.isclose(found.perplexity, found.baseline_perplexity, rel_tol=0.02)
    assert found.kl > 0.02
    assert found.top1_agreement < 0.93
