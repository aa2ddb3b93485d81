"""States of a forward pass: what slots hold, who may write them, and which rows may share a pass."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

from kvcore.errors import LayoutError, RequestError, UnsupportedError
from kvcore_transformers.modeling.attention import ATTENTION, kvcore_paged
from kvcore_transformers.modeling.bias_rows import BiasGeometry
from kvcore_transformers.modeling.state_batch import StateBatch
from kvcore_transformers.modeling.steady import steady_rows
from kvcore_transformers.models.hybrids import bias_extents

KINDS = ("inkling", "qwen3_next")


@pytest.fixture
def serving(zoo, hybrid_kit, make_cache):
    """``serving(name)``: a model on ``kvcore_paged`` and a cache for it."""

    def make(name, **changes):
        model = zoo.hybrid(name, **changes)
        model.set_attn_implementation(ATTENTION)
        cache = make_cache(model, **hybrid_kit.OPTIONS)
        hybrid_kit.poison(cache)
        return model, cache

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_the_slots_hold_what_plain_transformers_holds(zoo, hybrid_kit, make_cache, prompt, name, dtype):
    """Every state of every layer, in the dtype plain transformers has it in: fp32 for the convolutions of a bf16 Inkling
    and for recurrent states, the model's for the convolution of Qwen3-Next."""
    plain, model = zoo.hybrid(name, dtype=dtype), zoo.hybrid(name, dtype=dtype)
    assert (plain.dtype, model.dtype) == (dtype, dtype)
    model.set_attn_implementation(ATTENTION)
    plain_format = "bf16" if dtype is torch.bfloat16 else "fp32"
    cache = make_cache(model, format=plain_format, **hybrid_kit.OPTIONS)
    texts, held = {"r": prompt(22, 4)}, DynamicCache(config=plain.config)
    cache.admit("r", 20)
    for count in (20, 1, 1):
        hybrid_kit.step(model, cache, texts, [("r", count)])
    with torch.inference_mode():
        for part in torch.tensor([texts["r"]]).split((20, 1, 1), dim=1):
            plain(input_ids=part, cache=held, use_cache=True)
    near = 1e-5 if dtype is torch.float32 else 0.1
    (group,) = (group for group in cache.model.groups if group.kind == "state")
    (slot,) = cache.units("r", "state", "slots").tolist()
    for layer in group.layers:
        convs = list(held.layers[layer].conv_states.values())
        recurrent = list(held.layers[layer].recurrent_states.values())
        for state in group.states:
            here = cache.state("state").field(layer, state.name, "x")[slot]
            there = (convs if state.kind == "conv" else recurrent).pop(0)[0]
            # transformers keeps one input more of a convolution than a convolution looks back to.
            there = there[:, 1:] if state.kind == "conv" else there
            assert (here.dtype, here.shape) == (there.dtype, there.shape)
            assert there.norm() > 0
            assert (here - there).norm() <= near * there.norm(), (layer, state.name)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_computes_the_same_bits_alone_and_in_company(serving, hybrid_kit, prompt, name):
    """So that two runs of the same prompts that are batched unlike agree. Convolutions, recurrences and the position bias,
    that is: rows of equally many pages, since attention adds up a longer row's pages in another order."""
    dense = {"inkling": {"mlp_layer_types": ["dense"] * 3}, "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]}}[name]
    texts = {row: prompt(14 + n, n) for n, row in enumerate("abc")}
    got = []
    for company in (["a"], ["b", "a", "c"]):
        model, cache = serving(name, **dense)
        steady_rows(model)
        for row in company:
            cache.admit(row, len(texts[row]) - 2)
            hybrid_kit.step(model, cache, texts, [(row, len(texts[row]) - 2)])
        for _ in range(2):
            logits = hybrid_kit.step(model, cache, texts, [(row, 1) for row in company])
        (slot,) = cache.units("a", "state", "slots").tolist()
        group = cache.model.group("state")
        views = [cache.state("state").field(layer, s.name, "x") for layer in group.layers for s in group.states]
        got.append((logits[company.index("a")], *(view[slot].clone() for view in views)))
    assert all(torch.equal(*pair) for pair in zip(*got, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_a_request_released_within_its_forward_pass_writes_no_state(serving, hybrid_kit, prompt, name):
    """Its slot may be another's by then; and −1 is not the last slot."""
    model, cache = serving(name)
    texts = {row: prompt(9, n) for n, row in enumerate("abc")}
    for row in texts:
        cache.admit(row, 8)
        hybrid_kit.step(model, cache, texts, [(row, 8)])
    pool, (slot,) = cache.store.pools["state"], cache.units("b", "state", "slots").tolist()
    kept = cache.units("a", "state", "slots").tolist()

    def everything():
        return torch.cat([view.flatten(1).clone() for view in pool.unit_views("slots")], 1)

    before, released = everything(), []

    def release(module, given):
        if not released:
            released.append(cache.release("b"))

    layers = model.model.layers
    layers[1].register_forward_pre_hook(release)
    with cache.begin([("a", 1), ("b", 1)]) as step, torch.inference_mode():
        batch = StateBatch(step, cache, model.config)
        ids = torch.tensor([[texts[row][8]] for row in "ab"])
        model(input_ids=ids, position_ids=torch.full((2, 1), 8), cache=batch, use_cache=True)
        stale = step.commit()
    assert [row.request for row in stale] == ["b"]
    after = everything()
    changed = (before != after).any(1).nonzero().flatten().tolist()
    assert set(changed) == {*kept, slot}, "the first layer was through when it was released"
    assert not after[0].any(), "the null slot stays zero"
    last = cache.model.group("state").states[0].name
    field = cache.state("state").field(cache.model.group("state").layers[-1], last, "x")
    old = cache.units("c", "state", "slots").tolist()
    assert slot not in old
    assert field[slot].flatten().tolist() == _field_of(before, pool, field, slot)


def _field_of(before, pool, field, slot):
    """What a field of a slot held in a snapshot of all bytes."""
    (view,) = pool.unit_views("slots")
    size = field[slot].numel() * field.element_size()
    at = field.data_ptr() - view.data_ptr()
    return before[slot][at : at + size].view(field.dtype).tolist()


def test_rows_without_a_past_have_no_state_and_others_their_newest(serving, hybrid_kit, prompt):
    """None and a state of zeros are not the same to a model: it chooses its arithmetic by it. What was given back is what
    is read next, also within a forward pass."""
    model, cache = serving("qwen3_next")
    cache.admit("a", 4)
    with cache.begin([("a", 4)]) as step:
        batch = StateBatch(step, cache, model.config)
        assert (batch.get_conv_state(0), batch.get_recurrent_state(0)) == (None, None)
        assert not batch.has_previous_state(0)
    hybrid_kit.step(model, cache, {"a": prompt(4, 0)}, [("a", 4)])
    with cache.begin([("a", 1)]) as step:
        batch = StateBatch(step, cache, model.config)
        before = batch.get_conv_state(0)
        assert batch.has_previous_state(0)
        assert before.abs().max() > 0
        assert batch.get_recurrent_state(0).abs().max() > 0
        inputs = torch.full((1, 80, 1), 7.0)
        assert torch.equal(batch.update_conv_state(inputs, 0), torch.cat([before, inputs], -1))
        assert torch.equal(batch.get_conv_state(0), torch.cat([before[..., 1:], inputs], -1))
        batch.update_recurrent_state(torch.full((1, 4, 8, 12), 3.0), 0)
        assert batch.get_recurrent_state(0).unique().tolist() == [3.0]


def test_rows_with_unlike_numbers_of_tokens_are_refused(serving, hybrid_kit, prompt):
    _, cache = serving("qwen3_next")
    for row in "ab":
        cache.admit(row, 4)
    with cache.begin([("a", 4), ("b", 3)]) as step, pytest.raises(RequestError) as refusal:
        StateBatch(step, cache, None)
    assert refusal.value.fields["counts"] == [3, 4]


def test_rows_of_unlike_length_are_refused_where_attention_is_scaled_by_position(serving, hybrid_kit, prompt):
    """Wrong numbers otherwise: the model has one scale for all rows."""
    model, cache = serving("inkling_scaled")
    texts = {"a": prompt(9, 0), "b": prompt(9, 1)}
    for row, count in (("a", 8), ("b", 5)):
        cache.admit(row, count)
        hybrid_kit.step(model, cache, texts, [(row, count)])
    with pytest.raises(RequestError) as refusal:
        hybrid_kit.step(model, cache, texts, [("a", 1), ("b", 1)])
    assert refusal.value.fields["lengths"] == [5, 8]


def test_states_the_cache_was_not_made_for_are_refused(serving, hybrid_kit, prompt):
    """A layer, a number, a dtype, a shape, a convolution of another length: none is rounded, cut or passed over."""
    _, cache = serving("qwen3_next")
    cache.admit("a", 4)
    with cache.begin([("a", 4)]) as step:
        inputs = torch.zeros(1, 80, 4)
        batch = lambda: StateBatch(step, cache, None)  # noqa: E731
        with pytest.raises(UnsupportedError, match="not made for"):
            batch().update_conv_state(inputs, 1)
        with pytest.raises(UnsupportedError, match="not made for"):
            batch().update_conv_state(inputs, 0, state_idx=1)
        with pytest.raises(LayoutError, match="float32"):
            batch().update_conv_state(inputs.double(), 0)
        with pytest.raises(LayoutError, match="not what"):
            batch().update_conv_state(inputs[:, :40], 0)
        with pytest.raises(LayoutError, match="not as long"):
            batch().update_conv_state(inputs, 0, conv_kernel_size=3)
        with pytest.raises(LayoutError, match="not what"):
            batch().update_recurrent_state(torch.zeros(2, 4, 8, 12), 0)
        with pytest.raises(RequestError, match="rows"):
            batch().update(torch.zeros(2, 2, 4, 16), torch.zeros(2, 2, 4, 16), 1, kwargs={})
        late = batch()
        late.update_conv_state(inputs, 2)
        with pytest.raises(UnsupportedError, match="went back"):
            late.update_conv_state(inputs, 0)


# --- position bias ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("starts", "tokens"), [((0,), 7), ((9,), 4), ((3, 20, 11), 1), ((5, 5), 2), ((2, 13), 3)])
@pytest.mark.parametrize("extent", [1, 4, 12])
def test_the_bias_of_rows_of_unlike_length(starts, tokens, extent):
    """Against the definition, a loop over rows, queries and keys; the model's own module computes what is brought over."""
    torch.manual_seed(0)
    module = InklingRelativeLogits(3, extent)
    module.proj.data.normal_()
    states = torch.randn(len(starts), tokens, 2, 3)
    geometry = BiasGeometry(starts, tokens)
    queries = torch.arange(tokens) + geometry.query_offset(extent)
    bias = module(states, queries, torch.arange(geometry.key_length(extent)))
    rows = geometry.rows(bias, extent)
    assert rows.shape == (len(starts) * tokens, 2, max(starts) + tokens)
    profile = states @ module.proj
    for row, start in enumerate(starts):
        for token in range(tokens):
            for key in range(start + token + 1):
                distance = start + token - key
                want = profile[row, token, :, distance] if distance < extent else torch.zeros(2)
                assert torch.equal(rows[row * tokens + token, :, key], want), (row, token, key)


def test_a_bias_of_other_positions_is_refused():
    with pytest.raises(RequestError, match="position bias"):
        BiasGeometry((3, 8), 1).rows(torch.zeros(2, 4, 1, 9), 4)


def test_only_a_model_whose_bias_is_understood_may_pass_one(serving, hybrid_kit):
    """Qwen3-Next has none: what came along under that name would be of unknown positions."""
    _, cache = serving("qwen3_next")
    cache.admit("a", 4)
    keys, kwargs = torch.zeros(1, 2, 4, 16), {}
    with cache.begin([("a", 4)]) as step:
        StateBatch(step, cache, zoo_config()).update(keys, keys, 1, kwargs=kwargs)
        query = torch.zeros(1, 4, 4, 16)
        with pytest.raises(UnsupportedError, match="position_bias"):
            kvcore_paged(torch.nn.Module(), query, keys, keys, None, position_bias=torch.zeros(1, 4, 4, 4), **kwargs)


def zoo_config():
    """A model with no bias."""
    return {"model_type": "qwen3_next"}


def test_how_far_a_bias_reaches_is_by_layer():
    config = InklingTextConfig(num_hidden_layers=3, local_layer_ids=[1], rel_extent=99, sliding_window_size=16)
    assert bias_extents(config) == bias_extents(config.to_dict()) == {0: 99, 1: 16, 2: 99}
    assert bias_extents({"model_type": "llama"}) == {}
