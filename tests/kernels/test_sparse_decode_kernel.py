"""sparse_decode's machine code for AMD's archs, executed in the emulator with every check on, against fp64.

The default run takes fewer heads and smaller problems of gfx942 than of gfx950; a full one (`-m full`) takes the rest.
"""

from __future__ import annotations

import pytest
import sparse_runs
import torch
from built import emulated
from decode_grid import assert_within_bound, cosine_distance
from hostile_inputs import in_turn
from sparse_problems import CONFIGS, POOLS, attend, exact, pools_of, problem, require_kernels

from mla_suite import emulator
from mla_suite.kv_formats import cache as caches

EMULATED = sparse_runs.Machine(attend)
RECORDS = ("dsv4", "dsv4_fnuz", "v32", "v32_nope", "v41", "v41_fp4", "fp8", "fp8_fnuz", "bf16")
check = EMULATED.check


arch = emulated(require_kernels, autouse=True)


def readable(*names):
    """Each arch with each of these KV formats that it has kernels for."""
    return [
        (arch, name)
        for arch, config in CONFIGS.items()
        for name in names
        if name in {kv_format for kv_format, _ in config.records}
    ]


def on_archs(cases, quick, on_gfx950=None):
    """Each case on each arch; the default run takes `quick` of gfx942, and `on_gfx950` or all of the other."""
    taken = {"gfx942": quick, "gfx950": cases if on_gfx950 is None else on_gfx950}
    return [
        pytest.param(name, *case, marks=[] if case in taken[name] else [pytest.mark.full])
        for name in CONFIGS
        for case in cases
    ]


HEADS = (1, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128)


@pytest.mark.parametrize(
    ("arch", "heads"),
    on_archs([(heads,) for heads in HEADS], [(1,), (12,), (16,), (24,), (64,), (80,)]),
    indirect=["arch"],
)
def test_within_the_rounding_bound(arch, heads):
    """Any two of heads, pools and mode meet at least once."""
    sparse_runs.pools_in_modes(EMULATED, pools_of(arch), heads, HEADS.index(heads), tokens=2, planned=5)


V4 = [
    (heads, topk, window, extra)
    for heads, topk in ((64, 512), (16, 1024), (128, 1024))
    for window, extra in ((256, 64), (64, 2))
]


@pytest.mark.parametrize(
    ("arch", "name", "heads", "topk", "window_page", "extra_page"),
    [
        case
        for name in ("dsv4", "dsv4_fnuz")
        for case in on_archs(
            [(name, *shape) for shape in V4],
            [("dsv4", *V4[0]), ("dsv4", *V4[2]), ("dsv4_fnuz", *V4[-1])],
            [("dsv4", *V4[number]) for number in (0, 3, 4)],
        )
        if case.values[:2] in readable(name)
    ],
    indirect=["arch"],
)
def test_deepseek_v4(arch, name, heads, topk, window_page, extra_page):
    """Its heads, window of 128 keys, compressed selection and pages, with sink, split and not.

    Flash has 2 query tokens; Pro has one with all its heads, and 3 with the 16 heads of one of 8 ranks.
    """
    tokens = {64: 2, 16: 3, 128: 1}[heads]
    pools = [(name, 1024 // window_page, window_page, 128), (name, 4096 // extra_page, extra_page, topk)]
    for splits in (0, 1):
        args, kwargs = problem(pools, tokens, heads, seed=heads, padded=splits == 0)
        args[5] = torch.randn(heads)
        if tokens > 1:
            args[0] = args[0][None]
            args[2] = [index[None] for index in args[2]]
        out, _ = check(args, kwargs | {"num_splits": splits})
        assert cosine_distance(out, exact(*args, **kwargs, rounded=False).out) <= 1e-5


FLASH, PRO = (64, 512), (128, 1024)


MANY = [(256, 1, 12, 40), (1, 3, *FLASH), (256, 1, *FLASH), (2, 3, *FLASH), (2, 3, *PRO)]


@pytest.mark.parametrize(
    ("arch", "batch", "q_len", "heads", "topk"),
    [
        pytest.param(*case.values, marks=[*case.marks, *([] if case.values[1:] in MANY[:2] else [pytest.mark.full])])
        for case in on_archs(MANY, [MANY[1]])
    ],
    indirect=["arch"],
)
def test_many_requests_and_several_query_tokens(arch, batch, q_len, heads, topk):
    """256 requests at once, and two drafts verified (three query tokens), with V4's window beside its selection.

    The lengths of the window are ragged, and one of several requests has none.
    """
    window = 128 if topk >= 512 else 20
    pools = [("dsv4", 4, 256, window), ("dsv4", 16, 64, topk)]
    args, kwargs = problem(pools, batch * q_len, heads, seed=batch + q_len)
    args[0] = args[0].view(batch, q_len, heads, 512)
    args[2] = [index.view(batch, q_len, -1) for index in args[2]]
    args[4][0] = torch.randint(0, window + 1, (batch,), dtype=torch.int32)
    args[4][0][1:2] = 0
    args[5] = torch.randn(heads)
    check(args, kwargs)


def test_deepseek_v32():
    args, kwargs = problem([("v32", 64, 64, 2048)], 2, 128)
    args[0], args[2] = args[0][None], [args[2][0][None]]
    out, _ = check(args, kwargs)
    assert cosine_distance(out, exact(*args, **kwargs, rounded=False).out) <= 1e-5


def test_v32_is_defined_on_keys_rounded_to_bf16():
    """A key's logit moves by up to 2^-9 of scale x sum |q k|, and lse by no more than the logit that moves most."""
    args, kwargs = problem([("v32", 8, 64, 300)], 4, 16)
    q, (cache,), *_ = args
    _, lse = attend(args, kwargs)
    exact_keys = exact(*args, **kwargs, rounded=False)
    off = (lse.double() - exact_keys.lse).abs()
    used = caches.unpack("v32", cache).flatten(0, 1).double().nan_to_num(0.0).abs()
    moved = (q.double().abs() @ used.T * kwargs["softmax_scale"]).amax(dim=-1) * 2.0**-9
    assert bool((off <= moved + 1e-4 * exact_keys.lse.abs().clamp(min=1)).all())
    assert float((off / exact_keys.lse.abs().clamp(min=1)).max()) > 1e-4, "the rounding is seen"


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("name", ["dsv4", "v32"])
def test_every_length(name, heads):
    """Around the sizes of tiles and of blocks of indices."""
    sparse_runs.every_length(EMULATED, name, heads, [0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257], splits=1)


@pytest.mark.parametrize("kind", sparse_runs.KINDS)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_hard_scores(heads, kind):
    sparse_runs.hard_scores(EMULATED, heads, kind)


@pytest.mark.parametrize("selection", sparse_runs.SELECTIONS)
@pytest.mark.parametrize(("arch", "name"), readable(*RECORDS), indirect=["arch"])
@pytest.mark.parametrize("heads", [16, 128])
def test_selections(arch, heads, name, selection):
    sparse_runs.selections(EMULATED, name, heads, selection)


@pytest.mark.parametrize("sink", sparse_runs.SINKS)
@pytest.mark.parametrize("splits", [1, 2])
def test_sinks(sink, splits):
    sparse_runs.sinks(EMULATED, sink, splits)


@pytest.mark.parametrize(("arch", "name"), readable("dsv4", "dsv4_fnuz"), indirect=["arch"])
def test_extreme_scales(arch, name):
    sparse_runs.extreme_scales(EMULATED, name=name)


@pytest.mark.parametrize(("arch", "name"), readable(*RECORDS), indirect=["arch"])
@pytest.mark.parametrize("splits", [1, 2])
def test_nan_that_is_selected_is_seen(arch, name, splits):
    sparse_runs.selected_nan(EMULATED, name, splits)


@pytest.mark.parametrize("scale", [0.0, -(192**-0.5)])
def test_scales_that_are_not_positive(scale):
    args, kwargs = problem(POOLS["v32"], 2, 16)
    check(args, kwargs | {"softmax_scale": scale})


def test_strided_queries_and_outputs():
    args, kwargs, (out, lse) = sparse_runs.strided(torch.device("cpu"))
    torch.ops.mla_suite.sparse_decode.out(*args, **kwargs, out=out, lse=lse)
    assert_within_bound(out, lse, EMULATED.exact(args, kwargs))


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


@pytest.mark.parametrize(("arch", "heads"), in_turn(CONFIGS, [16, 64, 128]), indirect=["arch"])
def test_same_bits_again_and_in_any_order(arch, heads):
    args, kwargs = problem(POOLS["three pools"], 3, heads)
    kwargs["num_splits"] = 2
    first = attend(args, kwargs)
    for order in ("reverse", "shuffle:3"):
        with emulator.configured(order=order):
            again = attend(args, kwargs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("arch", "heads"), in_turn(CONFIGS, [16, 64]), indirect=["arch"])
def test_query_tokens_of_one_sequence_or_of_many_have_the_same_bits(arch, heads):
    """Twelve query tokens as 12 sequences, as 6 with a draft each and as 4 with two drafts each; all in two splits."""
    args, kwargs = problem([("dsv4", 2, 64, 128), ("dsv4", 40, 2, 150)], 12, heads)
    args[4] = [torch.randint(0, index.shape[1] + 1, (12,), dtype=torch.int32) for index in args[2]]
    args[5] = torch.randn(heads)
    out, lse = check(args, kwargs)
    q, kv_caches, indices, indptrs, lengths, *rest = args
    for q_len in (1, 2, 3):
        drafts, selected, ends = (
            [tensor.unflatten(0, (-1, q_len)) for tensor in tensors] for tensors in ([q], indices, lengths)
        )
        again, again_lse = attend([*drafts, kv_caches, selected, indptrs, ends, *rest], kwargs)
        assert torch.equal(again.flatten(0, 1), out)
        assert torch.equal(again_lse.flatten(0, 1), lse)


@pytest.mark.parametrize("heads", [16, 48])
def test_batch_invariant_bits(heads):
    sparse_runs.batch_invariant(EMULATED, heads)


@pytest.mark.parametrize(("arch", "name"), readable(*RECORDS), indirect=["arch"])
def test_a_pool_beyond_two_and_four_gigabytes(arch, name):
    sparse_runs.far_pool(EMULATED, name)
