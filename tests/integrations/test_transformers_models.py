"""Every model of transformers with latent attention, tiny and random: patched against unpatched, in fp32."""

import copy

import pytest
import torch

pytest.importorskip(
    "transformers.models.mistral_large4", reason="transformers 5.23 is missing: pip install mla_suite[hf]"
)

import latent_models
from latent_models import (
    KEEPS_CACHE,
    LOOPING_EXPERTS,
    NOT_LATENT,
    PATCHED,
    PROMPT,
    REFUSED,
    SELECTING,
    STEPS,
    TRACED_ALWAYS,
    greedy,
    left_padded,
    make,
    make_refused,
    one_graph,
)
from transformers import DynamicCache

from mla_suite.core.dispatch import Supported
from mla_suite.integrations.transformers import LatentCache, patch
from mla_suite.integrations.transformers_store import latent_attentions
from mla_suite.ops.decode import Problem, triton

# Compiling takes seconds a model, so a normal run traces some; `full` compiles them all.
COMPILED = [pytest.param(name, "eager", id=name) for name in TRACED_ALWAYS]
COMPILED += [pytest.param(name, "inductor", marks=pytest.mark.full) for name in PATCHED]


@pytest.mark.parametrize("folder", PATCHED)
def test_tokens_are_the_unpatched_models(folder, decodes):
    model = make(folder)
    expected, expected_logits = greedy(model)
    with patch(model):
        cache = LatentCache(model, 2, PROMPT + STEPS, page_size=4)
        tokens, logits = greedy(model, cache)
        windows = [getattr(layer, "sliding_window", None) for _, _, layer in latent_attentions(model)]
        for _, _, attention in latent_attentions(model):
            own = attention.kv_lora_rank + attention.qk_rope_head_dim
            assert cache.store.latents[attention.layer_idx].shape[2] == own, "a cached token has its own bytes"
    assert torch.equal(tokens, expected)
    assert tokens.unique().numel() > 2, "a model that repeats itself would show nothing"
    # The prompt of a model that selects keys is longer than index_topk, so it goes through sparse_decode as well.
    selecting = [folder in SELECTING and window is None for window in windows]
    step = ["sparse_decode" if selects else "decode" for selects in selecting]
    assert decodes == ["sparse_decode"] * sum(selecting) + step * (STEPS - 1)
    # fp32 sums in another order: absorbed products run over the latent where the model's run over a head.
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(greedy(model)[0], expected), "unpatched again"


@pytest.mark.parametrize("folder", KEEPS_CACHE)
def test_tokens_of_a_model_that_keeps_its_cache(folder, decodes):
    model = make(folder)
    ids, mask = left_padded()
    options = dict(attention_mask=mask, max_new_tokens=STEPS, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected, expected_logits = greedy(model)
    with patch(model):
        tokens, logits = greedy(model)
        assert decodes == ["sparse_decode"] * model.config.num_hidden_layers * STEPS
        assert torch.equal(model.generate(ids, **options)[:, PROMPT:], expected)
        with pytest.raises(ValueError, match="output_attentions=True; attention weights are never stored"):
            model(input_ids=ids, output_attentions=True)
        with pytest.raises(TypeError, match="has no layers of latent attention"):
            LatentCache(model, 2, PROMPT)
        with pytest.raises(TypeError, match="a cache of latents for a DeepseekV4Model; give a cache of transformers"):
            model(input_ids=ids, past_key_values=LatentCache(make("deepseek_v3"), 2, PROMPT))
    assert torch.equal(tokens, expected)
    assert tokens.unique().numel() > 2, "a model that repeats itself would show nothing"
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "eager", "unpatched again"


@torch.no_grad()
@pytest.mark.parametrize("first", [3, 5])
def test_a_window_reaches_into_the_cache_of_an_earlier_chunk(first):
    """The second sequence's first real token is the last of a first chunk of 5, so its window is not full; behind one
    of 3 it is the second of its chunk, and the padding before it is in no window."""
    model = make("dots3_note")
    ids, mask = left_padded()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    with patch(model):
        cache, found = LatentCache(model, 2, PROMPT, page_size=4), []
        for new in (slice(0, first), slice(first, PROMPT)):
            given = dict(input_ids=ids[:, new], attention_mask=mask[:, : new.stop], position_ids=positions[:, new])
            found.append(model(**given, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


def test_latents_of_a_width_that_no_kernel_reads_are_padded_to_the_next():
    model = make("minicpm3", kv_lora_rank=48, qk_rope_head_dim=8)
    expected, _ = greedy(model)
    with patch(model):
        cache = LatentCache(model, 2, PROMPT + STEPS, page_size=4)
        assert torch.equal(greedy(model, cache)[0], expected)
    for latents in cache.store.latents.values():
        width = latents.shape[2]
        assert width == 64 + 32
        shape = dict(batch=2, heads=4, q_len=1, context=16, context_from="", page_size=4, alignment=16, rope=0)
        shape |= dict(planned=False, num_splits=0, split_size=0, window=False, tree=False, precision="full")
        problem = Problem(**shape, head_dim=width, head_dim_v=64, q_dtype=torch.float32, kv_format="fp32")
        assert isinstance(triton.supports(problem, None), Supported)


def experts_as_one_operator(model):
    """Puts each loop over the experts that were chosen, whose length torch.compile cannot know, behind an operator."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            operator = f"latent_models::{name.replace('.', '_')}"
            schema = "(Tensor x, Tensor index, Tensor weights) -> Tensor"
            module.forward = torch.library.custom_op(operator, module.forward, mutates_args=(), schema=schema)
            module.forward.register_fake(lambda x, index, weights: torch.empty_like(x))


@pytest.mark.parametrize(("folder", "backend"), COMPILED)
@torch.no_grad()
def test_a_decode_step_compiles_whole_and_once(folder, backend):
    model = make(folder)
    ids, mask = left_padded()
    expected, _ = greedy(model)
    if folder in LOOPING_EXPERTS:
        with pytest.raises(torch._dynamo.exc.UserError, match="for expert_idx_tensor in expert_hit"):
            torch.compile(model, fullgraph=True)(input_ids=ids, attention_mask=mask)
        experts_as_one_operator(model)
    patch(model)
    one_graph(model, LatentCache(model, 2, PROMPT + STEPS, page_size=4), expected, backend)


@pytest.mark.parametrize("folder", ["deepseek_v3", "mistral4"])
@torch.no_grad()
def test_an_export_leaves_the_cache_as_it_was(folder):
    model = make(folder, num_hidden_layers=1)
    ids, _ = left_padded()
    expected = model(ids).logits[:, -1:]
    patch(model)
    cache = LatentCache(model, 2, 16)
    model(ids[:, :-1], past_key_values=cache)

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, past_key_values=cache).logits

    with pytest.raises(TypeError, match=r"without strict=True would advance; pass strict=True to it"):
        torch.export.export(Step(), (ids[:, -1:],), strict=False)
    exported = torch.export.export(Step(), (ids[:, -1:],), strict=True)
    assert (int(cache.get_seq_length()), cache.seq_lens.tolist()) == (PROMPT - 1, [PROMPT - 1] * 2)
    torch.testing.assert_close(model(ids[:, -1:], past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-4)
    cache.crop(-1)
    torch.testing.assert_close(exported.module()(ids[:, -1:]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("folder", REFUSED)
def test_models_that_select_keys_are_refused(folder):
    with pytest.raises(TypeError, match=r"selects (?!keys in a way).* \(\w+Indexer\); possible are the models of docs"):
        patch(make_refused(folder))


def test_an_indexer_that_nobody_looked_at_is_refused():
    class NewIndexer(torch.nn.Module):
        pass

    model = make("deepseek_v32")
    model.model.layers[1].self_attn.indexer = NewIndexer()
    with pytest.raises(TypeError, match=r"selects keys in a way that is not known here \(NewIndexer\)"):
        patch(model)


@torch.no_grad()
@pytest.mark.parametrize("folder", ["deepseek_v3", "mistral4", "deepseek_v32"])
def test_a_cache_of_ours_is_refused_by_a_model_that_is_not_patched(folder):
    """Whoever made or filled it; a patched model goes on with it where its maker's patch is undone."""
    model = make(folder)
    other, ids = copy.deepcopy(model), left_padded()[0]
    expected = model(ids).logits
    refused = pytest.raises(TypeError, match=r"this model's attention is not ours; call patch\(model\)")
    with refused:
        model(ids, past_key_values=LatentCache(model, 2, 16))
    filled = DynamicCache()
    with patch(model):
        model(ids[:, :5], past_key_values=filled)
        for cache in (LatentCache(model, 2, 16), filled):
            with refused:
                other(ids[:, 5:], past_key_values=cache)
    with patch(other):
        logits = other(ids[:, 5:], past_key_values=filled).logits
    torch.testing.assert_close(logits, expected[:, 5:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("folder", latent_models.VISION_OF)
@torch.no_grad()
def test_a_cache_is_in_the_dtype_of_the_layers_that_it_caches_for(folder):
    model = make(folder)
    for name, parameter in model.named_parameters():
        if "vision" not in name:
            parameter.data = parameter.bfloat16()
    assert model.dtype == torch.float32, "the vision model comes first"
    patch(model)
    cache = LatentCache(model, 2, 16)
    assert model(left_padded()[0], past_key_values=cache).logits.dtype == torch.bfloat16
    assert {latents.dtype for latents in cache.store.latents.values()} == {torch.bfloat16}


def test_another_attention_for_a_patched_model_is_refused_where_its_layers_would_call_it():
    ids = left_padded()[0]
    whole_layers, keeps_layers = make("deepseek_v3"), make("mistral4")
    for model in (whole_layers, keeps_layers):
        patch(model)
        model.set_attn_implementation("eager")
    whole_layers(ids)
    with pytest.raises(TypeError, match=r"attn_implementation is 'eager' since .*: call unpatch\(model\)"):
        keeps_layers(ids)


of_the_page = pytest.mark.skipif(
    latent_models.release() not in latent_models.PAGE.read_text(),
    reason="the page is of another release of transformers",
)


@of_the_page
def test_no_latent_model_of_transformers_is_forgotten():
    assert set(PATCHED) | set(KEEPS_CACHE) | set(REFUSED) | set(NOT_LATENT) == latent_models.folders()


@of_the_page
def test_the_page_of_models_is_what_patch_does():
    written = latent_models.PAGE.read_text()
    assert written == latent_models.table(), "run `python tests/integrations/latent_models.py --write`"
