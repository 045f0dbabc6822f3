"""Hugging Face DeepSeek models with random weights: patched against unpatched."""

import copy
import functools

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install mla_suite[hf]")

from latent_models import (  # noqa: E402 - after importorskip
    MISTRAL4_ROPE,
    PROMPT,
    TINY,
    compiled_behind_a_prompt,
    greedy,
    left_padded,
    make,
)

from mla_suite.integrations.transformers import LatentCache, config_of, patch, unpatch  # noqa: E402 - after importorskip
from mla_suite.models.mla import MLA  # noqa: E402 - after importorskip
from mla_suite.models.rope import cos_sin_table  # noqa: E402 - after importorskip

STEPS = 32
YARN = {name: MISTRAL4_ROPE[name] for name in list(MISTRAL4_ROPE)[:8]}
YARN |= {"factor": 4.0, "original_max_position_embeddings": 4096}  # of the 32 pairs 10 are kept and 9 stretched
NO_INTERLEAVE = {"rope_interleave": False, "q_lora_rank": None, "attention_bias": True}
KINDS = [
    pytest.param("deepseek_v3", {"rope_parameters": YARN}, id="v3"),
    pytest.param("deepseek_v3", NO_INTERLEAVE, id="v3 half rope, direct q, bias"),
    pytest.param("deepseek_v2", {}, id="v2"),
    pytest.param("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}, id="v2 yarn"),
]


@pytest.mark.parametrize(("folder", "changes"), KINDS)
def test_fp32_tokens_are_equal_and_logits_agree(folder, changes):
    model = make(folder, **changes)
    tokens, expected = greedy(model, steps=STEPS)
    with patch(model):
        got, logits = greedy(model, steps=STEPS)
    assert torch.equal(got, tokens)
    assert tokens.unique().numel() > 8, "a model that repeats itself would show nothing"
    # fp32 sums in another order: absorbed products run over 512 elements where the model's run over 32.
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("folder", ["deepseek_v3", "deepseek_v2"])
def test_bf16_logits_are_as_close_to_fp32_as_the_models_own(folder):
    """Both bf16 models round each product differently, so neither is the truth; the same weights in fp32 are.

    The patched model may be at most 1.5 times as far from them as the unpatched one, in root mean square over all
    logits of prompt and steps: it rounds q's latent where the model rounds k and v, so about as much.
    """
    model = make(folder).bfloat16()
    tokens, expected = greedy(copy.deepcopy(model).float(), steps=STEPS)
    _, plain = greedy(model, fed=tokens, steps=STEPS)
    with patch(model):
        _, logits = greedy(model, fed=tokens, steps=STEPS)
    far, plain_far = ((found - expected).square().mean().sqrt() for found in (logits, plain))
    assert far <= 1.5 * plain_far
    assert far < 0.05 * expected.std()


@torch.no_grad()
def test_every_argument_may_be_given_by_position():
    model = make("deepseek_v3")
    ids, _ = left_padded()
    embeddings = model.model.embed_tokens(ids)
    expected = model.model(ids, use_cache=False).last_hidden_state
    with patch(model):
        for given in ((ids, None, None, None, None, False), (None, None, None, None, embeddings)):
            found = model.model(*given)
            torch.testing.assert_close(found.last_hidden_state, expected, rtol=1e-4, atol=1e-4)
            assert (found.past_key_values is None) == (given[-1] is False)
        for inputs in ({}, {"input_ids": ids, "inputs_embeds": embeddings}):
            with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
                model(**inputs)


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)],
)
@pytest.mark.parametrize("folder", ["deepseek_v3", "deepseek_v2", "mistral4"])
def test_autocast_generates_the_models_own_tokens(folder, dtype, autocast):
    model = make(folder).to(dtype)
    ids, mask = left_padded()
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.autocast("cpu", autocast):
        expected = model.generate(ids, **options)
        with patch(model):
            assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("max_len", [None, 32])
def test_a_cache_serves_inside_and_outside_of_inference_mode(max_len):
    model = make("deepseek_v3")
    ids, _ = left_padded()
    with patch(model), torch.no_grad():
        expected = model(input_ids=ids).logits
        with torch.inference_mode():
            cache = LatentCache(model, 2, max_len, page_size=4)
            model(input_ids=ids[:, :3], past_key_values=cache)
        parts = [model(input_ids=part, past_key_values=cache).logits for part in ids[:, 3:].split(4, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected[:, 3:], rtol=1e-4, atol=1e-4)
        cache.crop(-2)
        cache.reset()
        torch.testing.assert_close(model(input_ids=ids, past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.filterwarnings("error:Both .* are set:FutureWarning")
def test_a_decoder_gets_its_cache_by_one_name():
    """transformers 5.24 takes the older name with a warning, and warns once more where it gets both."""
    model = make("deepseek_v3")
    ids, _ = left_padded()
    with patch(model):
        cache = LatentCache(model, 2, 32)
        model.model(ids, past_key_values=cache)
        assert cache.seq_lens.tolist() == [PROMPT] * 2


@torch.no_grad()
def test_a_call_that_is_refused_leaves_the_cache_as_it_was():
    model, other = make("deepseek_v3"), make("deepseek_v3", num_hidden_layers=1)
    ids, mask = left_padded()
    with patch(model):
        cache = LatentCache(model, 2, 32)
        model(input_ids=ids, past_key_values=cache)
        for wrong in (mask[:1], mask[:, :0], torch.cat((mask, mask))):
            with pytest.raises(
                ValueError, match=r"attention_mask has shape .* for 2 sequences; give \[batch, tokens\]"
            ):
                model(input_ids=ids, attention_mask=wrong, past_key_values=cache)
        assert (cache.seq_lens.tolist(), int(cache.get_seq_length())) == ([PROMPT] * 2, PROMPT)
        with pytest.raises(TypeError, match="no tokens of layer 1.*another model"):
            model(input_ids=ids, past_key_values=LatentCache(other, 2, 32))


@torch.no_grad()
def test_a_cache_with_hidden_tokens_takes_a_step_without_a_mask_if_the_caller_made_it():
    """Another cache may be that of a caller who forgot the mask."""
    model = make("deepseek_v3")
    ids, mask = left_padded()
    step = dict(input_ids=ids[:, :1], position_ids=mask.sum(1, keepdim=True))
    with patch(model):
        caches = [LatentCache(model, 2, 32), LatentCache(model, 2, 32), transformers.DynamicCache()]
        for cache in caches:
            model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        longer = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
        expected = model(**step, attention_mask=longer, past_key_values=caches[0]).logits
        assert torch.equal(model(**step, past_key_values=caches[1]).logits, expected)
        with pytest.raises(ValueError, match="attention_mask is None for a cache in which it has hidden tokens"):
            model(**step, past_key_values=caches[2])


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("folder", ["deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.full)])
@torch.no_grad()
def test_the_whole_decode_step_compiles_once_for_all_lengths(folder, backend):
    """Traced in every run; Inductor, which the demo has compile layers, takes the model in `full`.

    A mask that grows, as in generate, costs a graph of its own and one more, where its length becomes dynamic.
    """
    model = make(folder, num_hidden_layers=1)
    ids, mask = left_padded()
    tokens, expected = greedy(model, steps=STEPS + 1)
    patch(model)
    cache = LatentCache(model, 2, PROMPT + STEPS, page_size=8)
    compiled, counters = compiled_behind_a_prompt(model, ids, mask, cache, backend)
    lens = mask.sum(1, keepdim=True)
    for i in range(STEPS):
        masked = {} if i < 16 else dict(attention_mask=torch.cat((mask, mask.new_ones(2, i + 1)), dim=1))
        out = compiled(input_ids=tokens[:, i : i + 1], position_ids=lens + i, past_key_values=cache, **masked)
        torch.testing.assert_close(out.logits[:, -1], expected[:, PROMPT + i], rtol=1e-4, atol=1e-4)
        assert counters["stats"]["unique_graphs"] <= (1 if i < 16 else 3)
    assert not counters["graph_break"]
    assert cache.seq_lens.tolist() == (lens.flatten() + STEPS).tolist()


@pytest.mark.parametrize("made", [lambda: None, transformers.DynamicCache])
@torch.no_grad()
def test_a_compiled_step_over_another_cache_says_which_it_needs(made):
    model = make("deepseek_v3", num_hidden_layers=1)
    ids, _ = left_padded()
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="a compiled step needs a LatentCache"):  # as Dynamo words it
        compiled(input_ids=ids, past_key_values=made(), use_cache=True)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(("folder", "changes"), KINDS)
@torch.no_grad()
def test_our_layer_loads_the_weights_of_an_attention(folder, changes, tp_size):
    model = make(folder, **changes)
    attention = model.model.layers[1].self_attn
    config = config_of(model.config)
    x = torch.randn(1, PROMPT, TINY["hidden_size"])
    positions = torch.arange(PROMPT)[None]
    causal = torch.full((PROMPT, PROMPT), -torch.inf).triu(1)[None, None]
    embeddings = model.model.rotary_emb(x, positions)
    expected, _ = attention(x, position_embeddings=embeddings, attention_mask=causal)
    total = torch.zeros_like(expected)
    for rank in range(tp_size):
        layer = MLA(config.for_rank(tp_size), kv_format="fp32")
        layer.load_weights(attention.state_dict(), tp_rank=rank, tp_size=tp_size)
        total += layer.prefill(x, cos_sin_table(config, PROMPT), positions=positions)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_a_patched_model_may_change_its_dtype():
    model, fresh = make("deepseek_v3").bfloat16(), make("deepseek_v3").bfloat16().float()
    patch(model)
    model.float()
    ids, mask = left_padded()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), fresh.generate(ids, **options))


@pytest.mark.parametrize("keeps_its_methods", [False, True], ids=["whole layer", "attention"])
def test_parameters_keep_their_names_and_unpatch_restores_the_model(keeps_its_methods):
    model = make("longcat_flash" if keeps_its_methods else "deepseek_v3")
    names = dict(model.named_parameters())
    attention, implementation = model.model.layers[0].self_attn, model.config._attn_implementation
    with patch(model):
        patched = dict(model.named_parameters())
        assert names.keys() == patched.keys()
        assert all(patched[name] is parameter for name, parameter in names.items())
        with pytest.raises(ValueError, match="patched already"):
            patch(model.model)
    assert model.model.layers[0].self_attn is attention
    assert not any("expand_kv" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == implementation
    assert not model.model._forward_pre_hooks
    with pytest.raises(ValueError, match="unpatch: this model is not patched"):
        unpatch(model)


def halved(module, args, output):
    return (0.5 * output[0], *output[1:])


@torch.no_grad()
@pytest.mark.parametrize("folder", ["deepseek_v3", "deepseek_v2", "mistral4"])
def test_hooks_of_an_attention_layer_run_whenever_they_are_added(folder):
    model = make(folder)
    ids, attention = left_padded()[0], model.model.layers[1].self_attn
    plain = model(ids).logits
    added = attention.register_forward_hook(halved)
    expected = model(ids).logits
    assert (expected - plain).abs().max() > 0.1
    with patch(model):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        added.remove()
        torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-4)
        model.model.layers[1].self_attn.register_forward_hook(halved)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("first", [None, "output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("folder", ["deepseek_v3", "mistral4"])
def test_attention_weights_are_captured_after_unpatch(folder, first):
    """transformers installs the hooks for all outputs when the first is asked for, on the layers that it then finds."""
    model = make(folder, attn_implementation="eager")
    ids, asked = left_padded()[0], dict(output_attentions=True, output_hidden_states=True)
    expected = make(folder, attn_implementation="eager")(ids, **asked)
    if first is not None:
        model(ids, **{first: True})
    with patch(model):
        assert len(model(ids, output_hidden_states=True).hidden_states) == len(expected.hidden_states)
    found = model(ids, **asked)
    for name in ("attentions", "hidden_states"):
        assert len(found[name]) == len(expected[name])
        assert all(map(torch.equal, found[name], expected[name]))


def test_a_layer_keeps_its_mode_and_an_adapter_that_it_got_while_it_was_patched():
    model, adapter = make("deepseek_v3"), torch.nn.Identity()
    with patch(model):
        model.model.layers[1].self_attn.o_proj = adapter
        model.train()
    assert model.model.layers[1].self_attn.o_proj is adapter
    assert all(module.training for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("on_class", [False, True], ids=["of one layer", "of the class"])
@pytest.mark.parametrize("folder", ["deepseek_v3", "deepseek_v2", "mistral4"])
def test_a_wrapped_forward_of_an_attention_layer_is_called(folder, on_class, monkeypatch):
    model = make(folder)
    ids, attention = left_padded()[0], model.model.layers[1].self_attn
    wrapped = type(attention) if on_class else attention
    own = wrapped.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        return halved(attention, args, own(*args, **kwargs))

    monkeypatch.setattr(wrapped, "forward", forward)
    expected = model(ids).logits
    with patch(model):
        assert model.model.layers[1].self_attn is attention
        tokens = LatentCache(model, 2, 16)
        parts = [model(part, past_key_values=tokens).logits for part in ids.split([5, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


def test_unpatch_is_refused_while_a_layer_of_ours_is_wrapped():
    model = make("deepseek_v3")
    patch(model)
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward
    with pytest.raises(TypeError, match="unpatch: the attention of layer 1 got a forward of its own while .* patched"):
        unpatch(model)
    assert model.model.layers[1].self_attn is attention
    del attention.forward
    unpatch(model)
    assert type(model.model.layers[1].self_attn).__name__ == "DeepseekV3Attention"


@pytest.mark.parametrize(
    "changes",
    [{"kv_lora_rank": 128}, {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}],
    ids=["narrow latents", "linear rope"],
)
def test_layers_that_mla_cannot_replace_keep_all_but_their_attention(changes):
    model = make("deepseek_v3", **changes)
    tokens, expected = greedy(model, steps=STEPS)
    with patch(model):
        assert type(model.model.layers[0].self_attn).__name__ == "DeepseekV3Attention"
        _, logits = greedy(model, fed=tokens, steps=STEPS)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_models_we_do_not_know_are_refused_in_a_sentence():
    with pytest.raises(TypeError, match="Linear has no layers of multi-head latent attention"):
        patch(torch.nn.Linear(1, 1))
    model = make("deepseek_v3", kv_lora_rank=1088)
    with pytest.raises(ValueError, match="kv_lora_rank 1088 and qk_rope_head_dim 64; a cached token is 1024"):
        patch(model)
    assert type(model.model.layers[0].self_attn).__name__ == "DeepseekV3Attention"
    with pytest.raises(TypeError, match=r"a model in torch\.float64"):
        patch(make("deepseek_v3").double())
    model = make("deepseek_v3")
    kv_b_proj = model.model.layers[1].self_attn.kv_b_proj
    kv_b_proj.bias = torch.nn.Parameter(torch.zeros(kv_b_proj.out_features))
    with pytest.raises(TypeError, match="kv_b_proj of DeepseekV3Attention is Linear.*; absorption needs a plain"):
        patch(model)
    model, filled = make("deepseek_v3"), transformers.DynamicCache()
    ids, _ = left_padded()
    model(input_ids=ids, past_key_values=filled)
    patch(model)
    for cache in (filled, transformers.DynamicCache(offloading=True)):
        with pytest.raises(TypeError, match="DynamicCache with keys and values of its own; pass LatentCache"):
            model(input_ids=ids, past_key_values=cache)
    with pytest.raises(ValueError, match="output_attentions=True; attention weights are never stored"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 9, 9\)"):
        model(input_ids=ids, attention_mask=torch.ones(2, 1, 9, 9))
    with pytest.raises(ValueError, match="a batch of 2 for a cache of 3 sequences"):
        model(input_ids=ids, past_key_values=LatentCache(model, 3, 16))
