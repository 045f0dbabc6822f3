"""Models whose indexer selects each query's keys: the selection of the unpatched model, on our sparse decode."""

import copy

import pytest
import torch

pytest.importorskip(
    "transformers.models.mistral_large4", reason="transformers 5.23 is missing: pip install mla_suite[hf]"
)

from latent_models import (
    INDEXED,
    ONE_LAYER,
    PATCHED,
    PROMPT,
    SELECTING,
    STEPS,
    VOCAB,
    greedy,
    left_padded,
    make,
    one_graph,
)

from mla_suite.integrations.transformers import LatentCache, patch
from mla_suite.integrations.transformers_attention import attend
from mla_suite.integrations.transformers_store import Call


def close(got, expected):
    # fp32 sums in another order, as in test_transformers_models.py.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("folder", SELECTING)
def test_another_selection_is_another_output(folder):
    model = make(folder)
    first = greedy(model)[1]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("indexer.weights_proj.weight"):
                parameter.neg_()  # the keys that scored least are selected
    expected = greedy(model)[1]
    assert (expected - first).abs().max() > 0.1, "these prompts would not show a wrong selection"
    patch(model)
    close(greedy(model, LatentCache(model, 2, PROMPT + STEPS))[1], expected)


@pytest.mark.parametrize(("folder", "topk"), [("deepseek_v32", PROMPT), ("deepseek_v32", 64), ("glm_moe_dsa", 64)])
def test_attention_is_dense_where_all_keys_are_selected(folder, topk, decodes):
    model = make(folder, index_topk=topk)
    expected = greedy(model)[1]
    patch(model)
    close(greedy(model, LatentCache(model, 2, PROMPT + STEPS, page_size=7))[1], expected)
    # The first step after the prompt may select among max_len keys, of which all but those cached are hidden.
    assert decodes == ["sparse_decode" if topk == PROMPT else "decode"] * 3 * (STEPS - 1)


def test_sinks_count_where_all_keys_are_selected(decodes):
    model = make("hy_v4", index_topk=64)
    expected = greedy(model)[1]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.add_(3)
    assert (greedy(model)[1] - expected).abs().max() > 0.1
    expected = greedy(model)[1]
    patch(model)
    close(greedy(model, LatentCache(model, 2, PROMPT + STEPS))[1], expected)
    assert set(decodes) == {"sparse_decode"}


def test_a_sink_without_a_selection_is_refused():
    layer = make("hy_v4").model.layers[0].self_attn
    q = torch.zeros(1, layer.config.num_attention_heads, 2, layer.qk_head_dim)
    kv_c, k_pe = torch.zeros(1, 1, 2, layer.kv_lora_rank), torch.zeros(1, 1, 2, layer.qk_rope_head_dim)
    dense = Call(None, None, None, False)
    attend(layer, q, kv_c, k_pe, dense, scaling=0.1)
    with pytest.raises(TypeError, match="called with a sink and without an indexer's choice"):
        attend(layer, q, kv_c, k_pe, dense, scaling=0.1, s_aux=layer.sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("folder", SELECTING)
def test_rounded_logits_differ_from_the_models_own_by_its_rounding(folder, dtype):
    """In one layer both see the same inputs and select the same keys, so only attention rounds differently.

    How far a rounded model of such a layer is from fp32 is measured where it selects all keys: a flipped choice, which
    is no rounding error, is then impossible. The bound of 1.5 is that of test_transformers.py. No token is padding,
    whose embedding is zero and scores all keys alike.
    """
    own = {name: value for name, value in ONE_LAYER.items() if name in PATCHED[folder][1]}
    fed = torch.randint(3, VOCAB, (2, STEPS), generator=torch.Generator().manual_seed(2))
    dense, model = make(folder, **own, index_topk=64), make(folder, **own).to(dtype)
    exact, rounded = (greedy(each, fed=fed)[1] for each in (dense, copy.deepcopy(dense).to(dtype)))
    plain = greedy(model, fed=fed)[1]
    patch(model)

    def rms(a, b):
        return (a.float() - b.float()).square().mean().sqrt()

    for cache in (None, LatentCache(model, 2, PROMPT + STEPS)):
        assert rms(greedy(model, cache, fed)[1], plain) <= 1.5 * rms(rounded, exact)


def test_keys_are_kept_as_the_indexer_gives_them():
    """dots3_note rotates in fp32; a step compiled before any eager call cannot widen the cache, so it says so."""
    model = make("dots3_note").bfloat16()
    patch(model)
    cache = LatentCache(model, 2, PROMPT + STEPS)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="make one eager call first, as of the prompt"):
        torch.compile(model, fullgraph=True, backend="eager")(left_padded()[0], past_key_values=cache)
    greedy(model, cache)
    assert {keys.dtype for keys in cache.store.index_keys.values()} == {torch.float32}


@pytest.mark.parametrize("folder", ["deepseek_v3", "mistral4", "deepseek_v32"])
def test_a_cache_of_another_dtype_is_refused(folder):
    model = make(folder)
    patch(model)
    cache = LatentCache(model, 2, 16)
    model.bfloat16()
    with pytest.raises(TypeError, match=r"holds latents in fp32 for a model in bf16; make the cache after model\.to"):
        model(left_padded()[0], past_key_values=cache)


def test_layers_that_share_a_selection_keep_no_keys_of_an_indexer():
    model = make("glm_moe_dsa")
    cache = LatentCache(model, 2, 16)
    assert {layer_idx: tuple(keys.shape) for layer_idx, keys in cache.store.index_keys.items()} == {
        0: (2, 65, INDEXED["index_head_dim"]),
        2: (2, 65, INDEXED["index_head_dim"]),
    }
    assert len(cache.store.latents) == 3


@torch.no_grad()
def test_one_graph_serves_all_lengths_up_to_the_caches_end():
    """The graph that torch.compile traces, without Inductor, which `full` adds for every model."""
    model = make("deepseek_v32", num_hidden_layers=1)
    expected, _ = greedy(model)
    patch(model)
    cache = LatentCache(model, 2, PROMPT + STEPS - 1, page_size=1)
    compiled = one_graph(model, cache, expected)
    before = cache.store.latents[0].clone()
    with pytest.raises(ValueError, match="slot_mapping holds slot"):
        compiled(input_ids=expected[:, :1], past_key_values=cache)
    assert torch.equal(cache.store.latents[0], before)
