"""The layer against itself in fp64 without a cache, without absorption and without our operators."""

import dataclasses
import math

import pytest
import torch
from changed_projections import adapted, hooked, hooked_before, with_another_bias, with_another_forward

import mla_suite
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, Step, cos_sin_table, slots

TINY = MLAConfig.tiny()
DIRECT = dataclasses.replace(TINY, q_lora_rank=None, projection_bias=True)
HALF = dataclasses.replace(TINY, rope_interleaved=False)
UNROTATED = dataclasses.replace(HALF, cache_rotated=False, latent_norms=False)
NARROW = {
    f"{latent} + {rope}": dataclasses.replace(TINY, kv_lora_rank=latent, qk_rope_head_dim=rope)
    for latent, rope in ((256, 64), (256, 32), (128, 32), (512, 0))
}
CONFIGS = {"interleaved": TINY, "direct q, bias": DIRECT, "half": HALF, "un-rotated cache": UNROTATED} | NARROW


def make_layer(config, dtype=torch.float32, kv_format="fp32"):
    torch.manual_seed(0)
    layer = MLA(config, kv_format=kv_format, dtype=dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
    return layer


def exact(layer, x, hidden=None):
    """fp64 outputs [tokens, hidden] of one whole sequence x [tokens, hidden], from the definition.

    `hidden` bool [tokens, tokens] takes further keys away from each query.
    """
    c = layer.config
    w = {name: p.detach().double() for name, p in layer.named_parameters()}
    x = x.double()
    tokens = x.shape[0]

    def project(inputs, name):
        return inputs @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(values, name):
        if not c.latent_norms:
            return values
        return values * (values.square().mean(-1, keepdim=True) + c.norm_eps).rsqrt() * w[f"{name}.weight"]

    if c.q_lora_rank is None:
        q = project(x, "q_proj")
    else:
        q = project(norm(project(x, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
    q = q.view(tokens, c.num_heads, -1)
    down = project(x, "kv_a_proj_with_mqa")
    latent, half = c.kv_lora_rank, c.qk_rope_head_dim // 2
    up = project(norm(down[:, :latent], "kv_a_layernorm"), "kv_b_proj").view(tokens, c.num_heads, -1)
    k_nope, v = up[..., : c.qk_nope_head_dim], up[..., c.qk_nope_head_dim :]

    table = cos_sin_table(c, tokens).double()
    turn = torch.complex(table[:, :half], table[:, half:])[:, None]

    def turned(pe):
        if c.rope_interleaved:
            return torch.view_as_complex(pe.reshape(*pe.shape[:-1], half, 2)) * turn
        return torch.complex(pe[..., :half], pe[..., half:]) * turn

    q_pe, k_pe = turned(q[..., c.qk_nope_head_dim :].contiguous()), turned(down[:, None, latent:].contiguous())
    scores = torch.einsum("ihd,jhd->hij", q[..., : c.qk_nope_head_dim], k_nope)
    scores = scores + torch.einsum("ihd,jgd->hij", q_pe, k_pe.conj()).real
    scores = scores * c.softmax_scale
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return project(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1), "o_proj")


def close(got, expected):
    """fp32 sums of at most a few hundred products of order one."""
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


def trapped(config):
    """A cache whose unwritten rows are NaN."""
    cache = PagedLatentCache(1, num_pages=24, page_size=8, kv_format="fp32", head_dim=config.cached_dim)
    cache.layers[0].fill_(torch.nan)
    return cache


def prefilled(layer, cache, xs, count, **given):
    """Prefills `count` tokens of each of xs [batch, tokens, hidden]; the table of angles, and the step of the rest."""
    table, lens = cos_sin_table(layer.config, 64), [count] * len(xs)
    sequences = [cache.allocate() for _ in lens]
    step = cache.append(sequences, lens)
    layer.prefill(xs[:, :count].flatten(0, 1), table, cache.layers[0], step, q_lens=lens, **given)
    return table, cache.append(sequences, [xs.shape[1] - count] * len(xs))


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_ragged_prefill_then_decode_is_the_whole_sequence(name):
    layer = make_layer(CONFIGS[name])
    table = cos_sin_table(layer.config, 64)
    cache = trapped(layer.config)
    lens, new = [13, 1, 30], [4, 4, 4]
    xs = [torch.randn(n + m, TINY.hidden_size) for n, m in zip(lens, new, strict=True)]
    sequences = [cache.allocate() for _ in lens]
    packed = torch.cat([x[:n] for x, n in zip(xs, lens, strict=True)])
    out = layer.prefill(packed, table, cache.layers[0], cache.append(sequences, lens), q_lens=lens)
    expected = [exact(layer, x) for x in xs]
    close(out, torch.cat([e[:n] for e, n in zip(expected, lens, strict=True)]))

    one = torch.stack([x[n : n + 1] for x, n in zip(xs, lens, strict=True)])
    close(
        layer(one, cache.layers[0], cache.append(sequences, [1] * 3), table),
        torch.stack([e[n : n + 1] for e, n in zip(expected, lens, strict=True)]),
    )
    three = torch.stack([x[n + 1 : n + 4] for x, n in zip(xs, lens, strict=True)])
    close(
        layer.decode(three, cache.layers[0], cache.append(sequences, [3] * 3), table),
        torch.stack([e[n + 1 : n + 4] for e, n in zip(expected, lens, strict=True)]),
    )


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_chunked_prefill_merges_with_the_cached_prefix(name):
    layer = make_layer(CONFIGS[name])
    table = cos_sin_table(layer.config, 64)
    cache = trapped(layer.config)
    totals = [40, 9, 17]
    xs = [torch.randn(n, TINY.hidden_size) for n in totals]
    sequences = [cache.allocate() for _ in totals]
    # The second sequence has no prefix when the second chunk arrives, the third has no chunk then.
    chunks = [[16, 0, 17], [10, 9, 0], [14, 0, 0]]
    done = [0, 0, 0]
    outs = [[], [], []]
    for number, lens in enumerate(chunks):
        named = [b for b, n in enumerate(lens) if n]
        packed = torch.cat([xs[b][done[b] : done[b] + lens[b]] for b in named])
        q_lens = [lens[b] for b in named]
        step = cache.append([sequences[b] for b in named], q_lens)
        out = layer.prefill(packed, table, cache.layers[0], step, q_lens=q_lens, prefix=number > 0)
        for b, part in zip(named, out.split(q_lens), strict=True):
            outs[b].append(part)
            done[b] += lens[b]
    for b, x in enumerate(xs):
        close(torch.cat(outs[b]), exact(layer, x))


@pytest.mark.parametrize("prefix", [False, True])
@torch.no_grad()
def test_left_padded_batches(prefix):
    layer = make_layer(TINY)
    table = cos_sin_table(layer.config, 64)
    cache = trapped(layer.config)
    lens, past, width = [6, 2, 5], [9 * prefix, 0, 3 * prefix], 6
    xs = [torch.randn(p + n, TINY.hidden_size) for p, n in zip(past, lens, strict=True)]
    sequences = [cache.allocate() for _ in lens]
    if prefix:
        named = [0, 2]
        step = cache.append([sequences[b] for b in named], [past[b] for b in named])
        layer.prefill(
            torch.cat([xs[b][: past[b]] for b in named]), table, cache.layers[0], step, q_lens=[past[b] for b in named]
        )
    ragged = cache.append(sequences, lens)
    valid = torch.arange(width) >= width - torch.tensor(lens)[:, None]
    slot_mapping, positions = torch.full((3, width), -1), torch.zeros(3, width, dtype=torch.int64)
    slot_mapping[valid], positions[valid] = ragged.slot_mapping, ragged.positions
    step = Step(ragged.block_table, ragged.seq_lens, slot_mapping.flatten(), positions.flatten())
    x = torch.full((3, width, TINY.hidden_size), 7.0)
    x[valid] = torch.cat([own[p:] for own, p in zip(xs, past, strict=True)])
    out = layer.prefill(x, table, cache.layers[0], step, valid=valid, prefix=prefix)
    close(out[valid], torch.cat([exact(layer, own)[p:] for own, p in zip(xs, past, strict=True)]))
    assert out.isfinite().all()


@torch.no_grad()
def test_prefill_without_a_cache():
    layer = make_layer(TINY)
    x = torch.randn(2, 11, TINY.hidden_size)
    out = layer.prefill(x, cos_sin_table(TINY, 11), positions=torch.arange(11).expand(2, 11))
    close(out, torch.stack([exact(layer, own) for own in x]))


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("config", [TINY, DIRECT], ids=["low-rank q", "direct q, bias"])
@torch.no_grad()
def test_the_ranks_sum_to_the_whole_layer(config, tp_size):
    whole = make_layer(config)
    weights = whole.state_dict()
    if config.projection_bias:
        assert "o_proj.bias" in weights
    x = torch.randn(14, TINY.hidden_size)
    total = torch.zeros(1, 14, TINY.hidden_size)
    table = cos_sin_table(config, 14)
    for rank in range(tp_size):
        share = MLA(config.for_rank(tp_size), kv_format="fp32")
        share.load_weights(weights, tp_rank=rank, tp_size=tp_size)
        cache, sequences = PagedLatentCache.contiguous(1, 1, 14, kv_format="fp32")
        share.prefill(x[:10], table, cache.layers[0], cache.append(sequences, [10]), q_lens=[10])
        total[:, 10:] += share(x[None, 10:], cache.layers[0], cache.append(sequences, [4]), table)
    close(total[0, 10:], exact(whole, x)[10:])


def test_weights_that_do_not_fit_are_refused_before_any_is_copied():
    layer = make_layer(TINY)
    weights = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    extra = dict(weights, **{"q_b_proj.weight_scale_inv": torch.ones(1)})
    with pytest.raises(ValueError, match=r"not part of this layer \['q_b_proj\.weight_scale_inv'\]"):
        layer.load_weights(extra)
    weights = {name: tensor + 1 for name, tensor in weights.items()}
    with pytest.raises(ValueError, match=r"rank 0 of 2 has shape .* build it with the full config's for_rank\(2\)"):
        layer.load_weights(weights, tp_size=2)
    with pytest.raises(ValueError, match="tp_rank 2 of 2; ranks are 0 to 1"):
        layer.load_weights(weights, tp_rank=2, tp_size=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_contradicting_prefill_arguments_are_refused_before_anything_is_written():
    layer, table, cache = make_layer(TINY), cos_sin_table(TINY, 8), trapped(TINY)
    step = cache.append([cache.allocate()], [4])
    two = cache.append([cache.allocate(), cache.allocate()], [3, 1])
    x, kv_cache, positions = torch.randn(4, TINY.hidden_size), cache.layers[0], torch.arange(4)
    cached = kv_cache, step
    for tokens, place, options, sentence in (
        (x, cached, dict(q_lens=[3]), "q_lens sum to 3 for 4 packed tokens"),
        (x, cached, {}, "x has 2 dimensions and q_lens is None"),
        (x, (kv_cache,), dict(q_lens=[4]), "kv_cache and step come together"),
        (x, (), dict(positions=positions, q_lens=[4], prefix=True), "prefix=True without kv_cache"),
        (x, cached, dict(positions=positions, q_lens=[4]), "positions are in the step"),
        (x, cached, dict(q_lens=torch.tensor([4])), "q_lens is a tensor; it takes the host's list"),
        (x, cached, dict(q_lens=[5, -1]), r"q_lens are \[5, -1\]; a sequence has 0 tokens or more"),
        (x, cached, dict(q_lens=[2, 2], prefix=True), "tokens of 2 sequences, the step of 1"),
        (x[:3], cached, dict(q_lens=[3]), "4 positions for 3 tokens"),
        (x, (kv_cache, two), dict(q_lens=[1, 3]), r"by q_lens \[1, 3\] token 1 of x is of .* its slot is in page 1,"),
        (x[None], cached, dict(valid=torch.ones(1, 4).long()), r"torch.int64 \(1, 4\); .* = \(1, 4\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            layer.prefill(tokens, table, *place, **options)
    with pytest.raises(ValueError, match=r"MLA.decode: x has shape \(4, 128\) for a step of 1 sequences"):
        layer.decode(x, kv_cache, step, table)
    assert kv_cache.isnan().all()


OWN = "has a hook or a forward of its own"
MORE = {adapted: "is Adapter", with_another_bias: "has a bias"}
MORE |= dict.fromkeys((hooked, hooked_before, with_another_forward), OWN)


@pytest.mark.parametrize("change", MORE, ids=lambda change: change.__name__)
@torch.no_grad()
def test_a_kv_b_proj_that_is_more_than_its_weight_is_refused_before_anything_is_written(change):
    """Prefill calls the module, decode reads its weight. Without a cache the module is all there is."""
    layer = make_layer(TINY)
    change(layer, "kv_b_proj")
    table, cache, x = cos_sin_table(TINY, 8), trapped(TINY), torch.randn(1, 4, TINY.hidden_size)
    step = cache.append([cache.allocate()], [4])
    refusal = f"MLA: kv_b_proj {MORE[change]}; absorption needs a plain Linear without bias: merge the adapter into it"
    with pytest.raises(TypeError, match=refusal):
        layer.decode(x, cache.layers[0], step, table)
    for prefix in (False, True):
        with pytest.raises(TypeError, match=refusal):
            layer.prefill(x, table, cache.layers[0], step, prefix=prefix)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=refusal):
        compiled(x, cache.layers[0], step, table)
    assert cache.layers[0].isnan().all()
    assert layer.prefill(x, table, positions=step.positions).isfinite().all()


@pytest.mark.parametrize(
    ("kv_format", "message"), [("dsv4", "caches rows of 576 values"), ("bf17", "'bf17' is unknown")]
)
def test_a_kv_format_that_it_cannot_write_is_refused(kv_format, message):
    with pytest.raises(ValueError, match=message):
        MLA(TINY, kv_format=kv_format)


def test_prefill_of_sequences_without_new_tokens():
    cache = PagedLatentCache(1, 4, 8, kv_format="fp32")
    sequences = [cache.allocate(), cache.allocate()]
    cache.append(sequences, [3, 0])
    layer, x, table = make_layer(TINY), torch.empty(0, TINY.hidden_size), cos_sin_table(TINY, 8)
    for prefix in (False, True):
        step = cache.append(sequences, [0, 0])
        out = layer.prefill(x, table, cache.layers[0], step, q_lens=[0, 0], prefix=prefix)
        assert out.shape == x.shape


@pytest.mark.parametrize(
    ("kv_format", "dtype", "limit"),
    [
        ("bf16", torch.bfloat16, 2**-6),
        ("fp16", torch.float16, 2**-9),
        ("fp8", torch.bfloat16, 2**-4),
        ("fp8_fnuz", torch.bfloat16, 2**-4),
        ("v32", torch.bfloat16, 2**-4),
    ],
)
@torch.no_grad()
def test_every_kv_format_of_latents_decodes(kv_format, dtype, limit):
    """Norm of the error against that of the output: some eight roundings of half an ulp, at most 2^-9 of a value for
    bf16 and 2^-12 for fp16, and one of an e4m3 cache, 2^-4, of which random signs leave about half."""
    layer = make_layer(TINY, dtype, kv_format)
    kv_descale = torch.tensor([0.02]) if kv_format.startswith("fp8") else None
    cache = PagedLatentCache(1, 8, 8, kv_format=kv_format)
    xs = torch.randn(2, 21, TINY.hidden_size).to(dtype)
    table, step = prefilled(layer, cache, xs, 20, kv_descale=kv_descale)
    out = layer.decode(xs[:, 20:], cache.layers[0], step, table, kv_descale=kv_descale)[:, 0].double()
    expected = torch.stack([exact(layer, x)[20] for x in xs])
    assert (out - expected).norm() <= limit * expected.norm()


@torch.no_grad()
def test_an_indexers_choice_of_keys():
    layer, cache = make_layer(TINY), trapped(TINY)
    xs = torch.randn(2, 42, TINY.hidden_size)
    table, step = prefilled(layer, cache, xs, 40)
    topk = torch.full((2, 2, 12), -1, dtype=torch.int32)
    hidden = torch.zeros(2, 42, 42, dtype=torch.bool)
    for b in range(2):
        for i in range(2):
            chosen = torch.randperm(41 + i)[: 12 - 3 * b]
            topk[b, i, : len(chosen)] = slots(step.block_table[b : b + 1], chosen[None], cache.page_size)[0]
            hidden[b, 40 + i] = True
            hidden[b, 40 + i, chosen] = False
    out = layer.decode(xs[:, 40:], cache.layers[0], step, table, topk_indices=topk)
    close(out, torch.stack([exact(layer, x, mask)[40:] for x, mask in zip(xs, hidden, strict=True)]))
    before = cache.layers[0].clone()
    with pytest.raises(ValueError, match="topk_indices with kv_descale or an un-rotated cache"):
        layer.decode(xs[:, 40:], cache.layers[0], step, table, topk_indices=topk, kv_descale=torch.ones(1))
    assert torch.equal(cache.layers[0].view(torch.int32), before.view(torch.int32))


@torch.no_grad()
def test_a_plan_and_split_sizes_change_nothing_beyond_rounding():
    layer, cache = make_layer(TINY), trapped(TINY)
    xs = torch.randn(2, 50, TINY.hidden_size)
    table, step = prefilled(layer, cache, xs, 49)
    expected = torch.stack([exact(layer, x)[49:] for x in xs])
    plan = mla_suite.plan(step.seq_lens, num_heads=TINY.num_heads, num_sm_parts=7, max_seqlen_kv=64)
    close(layer.decode(xs[:, 49:], cache.layers[0], step, table, plan=plan, max_seqlen_kv=64), expected)
    close(layer.decode(xs[:, 49:], cache.layers[0], step, table, split_size=16), expected)
