"""sparse_decode's machine code for gfx950, executed in the emulator with every check on, against fp64."""

from __future__ import annotations

import pytest
import torch
from decode_grid import assert_within_bound
from sparse_problems import ABSURD, GFX950, MODES, POOLS, attend, check, exact, in_mode, poisoned, problem

import mla_suite
from mla_suite.core.layouts import cache as caches
from mla_suite.core.layouts import layout
from mla_suite.ops.sparse_decode.config import SparseConfig
from mla_suite.runtime import emulator, has_kernel


@pytest.fixture(autouse=True)
def gfx950():
    config = SparseConfig(GFX950, "dsv4", 16)
    if not has_kernel("gfx950", config.instance):
        pytest.skip(f"{config.instance} is not built for gfx950; run `python -m mla_suite build --arch gfx950`")
    with mla_suite.emulate("gfx950") as record:
        yield record


def cosine_distance(out, expected):
    a, b = out.double().flatten(), expected.flatten()
    return float(1 - a @ b / (a.norm() * b.norm()))


HEADS = (1, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128)


@pytest.mark.parametrize("heads", HEADS)
def test_within_the_rounding_bound(heads):
    """Any two of heads, pools and mode meet at least once."""
    for j, pools in enumerate(POOLS.values()):
        mode = MODES[(HEADS.index(heads) + j) % len(MODES)]
        args, kwargs = problem(pools, 2 if mode != "planned" else 5, heads, seed=heads + j)
        in_mode(mode, args, kwargs, seed=heads)
        check(args, kwargs)


V4 = [
    (heads, topk, window, extra) for heads, topk in ((64, 512), (128, 1024)) for window, extra in ((256, 64), (64, 2))
]


@pytest.mark.parametrize(("heads", "topk", "window_page", "extra_page"), V4)
def test_deepseek_v4(heads, topk, window_page, extra_page):
    """Its heads, window of 128 keys, compressed selection and pages, with sink, split and not, MTP of 2 for Flash."""
    tokens = 2 if heads == 64 else 1
    pools = [("dsv4", 1024 // window_page, window_page, 128), ("dsv4", 4096 // extra_page, extra_page, topk)]
    for splits in (0, 1):
        args, kwargs = problem(pools, tokens, heads, seed=heads, padded=splits == 0)
        args[5] = torch.randn(heads)
        if tokens == 2:
            args[0] = args[0][None]
            args[2] = [index[None] for index in args[2]]
        out, _ = check(args, kwargs | {"num_splits": splits})
        assert cosine_distance(out, exact(*args, **kwargs, rounded=False).out) <= 1e-5


def test_deepseek_v32():
    args, kwargs = problem([("v32", 64, 64, 2048)], 2, 128)
    args[0], args[2] = args[0][None], [args[2][0][None]]
    out, _ = check(args, kwargs)
    assert cosine_distance(out, exact(*args, **kwargs, rounded=False).out) <= 1e-5


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("name", ["dsv4", "v32"])
def test_every_length(name, heads):
    """Around the sizes of tiles and of blocks of indices, in one ragged call."""
    sizes = [0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257]
    args, kwargs = problem([(name, 8, 64, sum(sizes))], 1, heads)
    args[0] = args[0].expand(len(sizes), heads, -1).contiguous()
    args[2], args[3] = [args[2][0].flatten()], [torch.tensor([0, *sizes]).cumsum(0).int()]
    check(args, kwargs | {"num_splits": 1})


@pytest.mark.parametrize("kind", ["large", "equal", "dominating", "rising", "falling"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_hard_scores(heads, kind):
    """Logits to +-200, rows all equal, one key above all others, and references that rise at every tile or never."""
    (q, (cache,), (index,), *rest), kwargs = problem([("bf16", 5, 64, 300)], 1, heads, invalid=0)
    index[0] = torch.arange(300)
    direction = torch.randn(576)
    keys = torch.randn(320, 576)
    if kind == "equal":
        keys[:] = keys[0]
    elif kind == "dominating":
        keys[200] = q[0, 0].float() * 4
    else:
        logits = torch.linspace(-200, 200, 300)
        logits = {"large": logits[torch.randperm(300)], "rising": logits, "falling": logits.flip(0)}[kind]
        q[:] = direction.bfloat16()
        keys[:300] = logits[:, None] * 24 / direction.square().sum() * direction + keys[:300] / 4
        reached = keys[:300].bfloat16().double() @ direction.bfloat16().double() * kwargs["softmax_scale"]
        assert float(reached.min()) < -195
        assert float(reached.max()) > 195
    cache.copy_(keys.view(5, 64, 576))
    check([q, [cache], [index], *rest], kwargs | {"num_splits": 1})


SELECTIONS = {
    "duplicates": lambda slots, n: [5] * n,
    "all invalid": lambda slots, n: [ABSURD[i % 4] for i in range(n)],
    "one valid": lambda slots, n: [-1] * (n // 2) + [slots - 1] + [slots] * (n - n // 2 - 1),
    "last token": lambda slots, n: [slots - 1, slots] * (n // 2),
    "first token": lambda slots, n: [0, -1] * (n // 2),
}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", ["dsv4", "v32", "bf16"])
@pytest.mark.parametrize("heads", [16, 128])
def test_selections(heads, name, selection):
    args, kwargs = problem([(name, 3, 16, 1), (name, 2, 64, 1)], 2, heads)
    for i, cache in enumerate(args[1]):
        slots = cache.shape[0] * cache.shape[1]
        chosen = SELECTIONS[selection](slots, 40)
        args[2][i] = torch.tensor([chosen, [-1] * 40], dtype=torch.int32)
        args[1][i] = poisoned(
            name, cache.shape[0], cache.shape[1], {s for s in chosen if 0 <= s < slots}, 3, args[0].shape[-1]
        )
    out, lse = check(args, kwargs)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert bool((lse[1] == -torch.inf).all())


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf, 0.0, 60.0])
@pytest.mark.parametrize("splits", [1, 2])
def test_sinks(sink, splits):
    """Query token 1 has no key; a pool may have no pages and another no indices."""
    args, kwargs = problem([("dsv4", 2, 16, 9), ("dsv4", 0, 16, 5), ("dsv4", 2, 16, 0)], 2, 12)
    args[2][0][1] = -1
    kwargs["num_splits"] = splits
    plain, plain_lse = attend(args, kwargs)
    args[5] = torch.full((12,), sink)
    out, lse = check(args, kwargs)
    assert torch.equal(lse, plain_lse)
    assert sink != torch.inf or not bool(out.any())
    assert sink != -torch.inf or torch.equal(out, plain)


def test_extreme_scales():
    """Scale bytes 0 and 254 (2^-127 and 2^127), and NaN codes and scales in all slots that nobody selects."""
    args, kwargs = problem([("dsv4", 2, 64, 100)], 1, 16, invalid=0)
    (cache,), (index,) = args[1], args[2]
    scales = torch.as_strided(cache, (2, 64, 8), (cache.stride(0), 8, 1), 64 * 576)
    codes = torch.as_strided(cache, (2, 64, 576), (cache.stride(0), 576, 1))
    small, large = divmod(int(index[0, 3]), 64), divmod(int(index[0, 40]), 64)
    scales[small] = 0
    scales[large] = 254
    codes[large][:448] = 1  # 2^-9: rows of 2^118
    q = args[0]
    q[..., :448] = q[..., :448].abs() * -1  # so that this key's weight is 0 and its row stays out of every sum
    check(args, kwargs)


@pytest.mark.parametrize("name", ["dsv4", "v32", "bf16"])
@pytest.mark.parametrize("splits", [1, 2])
def test_nan_that_is_selected_is_seen(name, splits):
    args, kwargs = problem([(name, 4, 64, 130)], 2, 16, invalid=0)
    args[1][0] = args[1][0].clone()
    args[2][0][0, 77] = next(s for s in range(256) if s not in args[2][0].flatten().tolist())
    out, lse = attend(args, kwargs | {"num_splits": splits})
    assert bool(out[0].isnan().all())
    assert bool(lse[0].isnan().all())
    assert bool(out[1].isfinite().all() and lse[1].isfinite().all())


@pytest.mark.parametrize("scale", [0.0, -(192**-0.5)])
def test_scales_that_are_not_positive(scale):
    args, kwargs = problem(POOLS["v32"], 2, 16)
    check(args, kwargs | {"softmax_scale": scale})


def test_strided_queries_and_outputs():
    args, kwargs = problem(POOLS["v4"], 4, 16)
    q = torch.zeros(2, 2, 16, 516, dtype=torch.bfloat16)[..., 2:514]
    q.copy_(args[0].view(2, 2, 16, 512))
    args[0], args[2] = q, [index.view(2, 2, -1)[..., ::1] for index in args[2]]
    out = torch.zeros(2, 3, 32, 520, dtype=torch.bfloat16)[:, :2, ::2, :512]
    lse = torch.zeros(2, 3, 32)[:, :2, :16]
    torch.ops.mla_suite.sparse_decode.out(*args, **kwargs, out=out, lse=lse)
    assert_within_bound(out, lse, exact(*args, **kwargs))


def test_selections_that_lie_apart():
    """Indices and lengths of a room with more tokens for each sequence than are used."""
    args, kwargs = problem(POOLS["v4"], 4, 16)
    args[0] = args[0].view(2, 2, 16, 512)
    for i, index in enumerate(args[2]):
        room = torch.full((2, 3, index.shape[1]), -1, dtype=torch.int32)
        room[:, :2] = index.view(2, 2, -1)
        args[2][i] = room[:, :2]
    lengths = torch.tensor([[9, 40, 99], [0, 70, 99]], dtype=torch.int32)[:, :2]
    args[4] = [lengths, None]
    assert not args[2][0].is_contiguous()
    assert not lengths.is_contiguous()
    check(args, kwargs)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_same_bits_again_and_in_any_order(heads):
    args, kwargs = problem(POOLS["three pools"], 3, heads)
    kwargs["num_splits"] = 2
    first = attend(args, kwargs)
    for order in ("reverse", "shuffle:3"):
        with emulator.configured(order=order):
            again = attend(args, kwargs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("heads", [16, 48])
def test_batch_invariant_bits(heads):
    args, kwargs = problem(POOLS["v4"], 9, heads)
    whole = attend(args, kwargs | {"split_size": 64})
    for t in (0, 8):
        single = [args[0][t : t + 1], args[1], [index[t : t + 1] for index in args[2]], *args[3:]]
        alone = attend(single, kwargs | {"split_size": 64})
        assert all(torch.equal(a[t], b[0]) for a, b in zip(whole, alone, strict=True))


def test_a_pool_beyond_four_gigabytes():
    args, kwargs = problem([("v32", 1, 64, 3)], 1, 16)
    pages = 103_000  # 4.3 GB of address space, of which two pages are touched
    cache, last = caches.empty(layout("v32"), pages, 64), pages * 64 - 1
    caches.scatter(layout("v32"), cache, torch.tensor([0, last]), torch.randn(2, 576))
    args[1], args[2] = [cache], [torch.tensor([[0, last, last + 1]], dtype=torch.int32)]
    check(args, kwargs)
