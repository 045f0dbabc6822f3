"""sparse_decode's machine code for gfx950, executed in the emulator with every check on, against fp64."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mla_suite
from mla_suite.core import arch as archs
from mla_suite.core import dispatch
from mla_suite.core.dispatch import Refusal
from mla_suite.core.layouts import cache as caches
from mla_suite.core.layouts import layout
from mla_suite.ops.sparse_decode import SPARSE_DECODE, native
from mla_suite.ops.sparse_decode.config import RECORDS, ROWS, SparseConfig, record_of, tile_rows
from mla_suite.runtime import emulator, has_kernel
from mla_suite.testing import Exact, attention, ulp
from mla_suite.toolchain import compilers, manifest

GFX950 = archs.get("gfx950")
ABSURD = (-1, 2**31 - 1, -(2**31), -7)


@pytest.fixture(autouse=True)
def gfx950():
    config = SparseConfig(GFX950, "dsv4", 16)
    if not has_kernel("gfx950", config.instance):
        pytest.skip(f"{config.instance} is not built for gfx950; run `python -m mla_suite build --arch gfx950`")
    with mla_suite.emulate("gfx950") as record:
        yield record


def kind_of(name, width):
    kind = layout(name)
    return kind.sized(width, 0) if kind.dense else kind


def poisoned(name, pages, page, used, seed, width, padded=True, spread=2):
    """Random rows, scaled by up to 2^+-spread, at the slots `used`; every other byte is 0xff: NaN in every layout."""
    kind = kind_of(name, width)
    cache = caches.empty(kind, pages, page, padded=padded)
    torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).fill_(0xFF)
    slots = torch.tensor(sorted(used), dtype=torch.int64)
    rows = torch.randn(len(slots), kind.head_dim, generator=torch.Generator().manual_seed(seed))
    caches.scatter(kind, cache, slots, rows * 2.0 ** torch.randint(-spread, spread + 1, (len(slots), 1)))
    return cache


def problem(pools, tokens, heads, seed=0, invalid=0.2, padded=True, spread=2):
    """Queries, poisoned caches and dense indices, some repeated, some absurd. pools: (layout, pages, page, topk)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    width = 512 if any(name == "dsv4" for name, *_ in pools) or len(pools) > 2 else 576
    q = torch.randn(tokens, heads, width, generator=generator).bfloat16()
    kv_caches, indices = [], []
    for i, (name, pages, page, topk) in enumerate(pools):
        slots = pages * page
        index = torch.randint(0, max(slots, 1), (tokens, topk), generator=generator)
        absurd = torch.tensor([*ABSURD, slots])[torch.randint(0, 5, (tokens, topk), generator=generator)]
        index = torch.where(torch.rand(tokens, topk, generator=generator) < invalid, absurd, index).int()
        used = {slot for slot in index.flatten().tolist() if 0 <= slot < slots}
        kv_caches.append(poisoned(name, pages, page, used, seed + i, width, padded, spread))
        indices.append(index)
    names = [name for name, *_ in pools]
    args = [q, kv_caches, indices, [None] * len(pools), [None] * len(pools), None, None]
    return args, {"layouts": names, "softmax_scale": width**-0.5}


def exact(q, kv_caches, indices, indptrs, lengths, sink, plan=None, *, layouts, softmax_scale, rounded=True, **choices):
    """fp64, each query token over its keys; `rounded`: those of arbitrary scales as the bf16 that they become."""
    q_len = q.shape[1] if q.dim() == 4 else 1
    heads = q.shape[-2]
    sinks = torch.full((heads,), -torch.inf) if sink is None else sink
    found = []
    for t, query in enumerate(q.flatten(0, -3)):
        keys = []
        for name, cache, index, indptr, length in zip(layouts, kv_caches, indices, indptrs, lengths, strict=True):
            chosen = index[indptr[t] : indptr[t + 1]] if indptr is not None else index.flatten(0, -2)[t]
            if length is not None:
                chosen = chosen[
                    : int(length[t // q_len]) if q.dim() == 4 and length.dim() == 1 else length.flatten()[t]
                ]
            valid = chosen[(chosen >= 0) & (chosen < cache.shape[0] * cache.shape[1])].long()
            rows = caches.gather(kind_of(name, q.shape[-1]), cache, valid)
            keys.append(rows.bfloat16().float() if rounded else rows)
        every = torch.cat(keys)
        found.append(attention(query, every, torch.full((heads,), len(every)), softmax_scale, 512, sinks))
    joined = Exact(*(torch.stack(parts) for parts in zip(*found, strict=True)))
    return Exact(
        joined.out.view(*q.shape[:-1], 512), joined.lse.view(q.shape[:-1]), joined.magnitude.view(*q.shape[:-1], 512)
    )


def attend(args, kwargs):
    """Runs the native kernels and nothing else."""
    facts = SPARSE_DECODE.problem(*args, **kwargs)
    choice = dispatch.choose("sparse_decode", SPARSE_DECODE.backends, facts, GFX950, "cpu")
    assert choice.backend.name == "native", str(choice)
    return torch.ops.mla_suite.sparse_decode(*args, **kwargs)


def assert_within_bound(out, lse, expected):
    """|out - exact| <= 2^-8 sum(p |v|) + 1 ulp of out: P is rounded to bf16. lse within 1e-4."""
    error, allowed = (out.double() - expected.out).abs(), 2.0**-8 * expected.magnitude + ulp(expected.out, out.dtype)
    worst = float((error / allowed).max()) if error.numel() else 0.0
    assert bool((error <= allowed).all()), f"out is {worst:.3g} times as far from the exact result as it may be"
    empty = expected.lse.isinf()
    assert torch.equal(lse[empty].double(), expected.lse[empty])
    assert not bool(out[empty].any()), "a row that sees nothing must be 0"
    off = (lse.double() - expected.lse)[~empty].abs()
    assert bool((off <= 1e-4 * expected.lse[~empty].abs().clamp(min=1.0)).all()), (
        f"lse is off by {float(off.max()):.3g}"
    )


def check(args, kwargs):
    out, lse = attend(args, kwargs)
    assert_within_bound(out, lse, exact(*args, **kwargs))
    return out, lse


def cosine_distance(out, expected):
    a, b = out.double().flatten(), expected.flatten()
    return float(1 - a @ b / (a.norm() * b.norm()))


HEADS = (1, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128)
POOLS = {
    "v4": [("dsv4", 2, 64, 70), ("dsv4", 40, 2, 45)],
    "v32": [("v32", 3, 64, 130)],
    "v32 pow2": [("v32_pow2", 5, 16, 97), ("v32_pow2", 2, 64, 1)],
    "both scales": [("v32", 2, 64, 33), ("v32_pow2", 3, 16, 40)],
    "bf16": [("bf16", 3, 61, 100)],
    "three pools": [("dsv4", 1, 256, 40), ("dsv4", 9, 1, 7), ("dsv4", 3, 16, 65)],
    "four pools": [("bf16", 3, 16, 20), ("bf16", 3, 1, 3), ("bf16", 2, 64, 50), ("bf16", 1, 7, 9)],
}
MODES = ("one split", "splits and sink", "planned", "invariant", "ragged", "lengths and sink", "mtp")


def in_mode(mode, args, kwargs, seed):
    """The problem's six tokens as the mode gives them."""
    q, _, indices, indptrs, lengths = args[:5]
    generator = torch.Generator().manual_seed(seed)
    if "sink" in mode:
        args[5] = torch.randn(q.shape[1], generator=generator)
    if mode in ("one split", "mtp"):
        kwargs["num_splits"] = 1
    elif mode == "splits and sink":
        kwargs["num_splits"] = 3
    elif mode == "invariant":
        kwargs["split_size"] = 64
    elif mode == "ragged":
        keep = [torch.randint(0, index.shape[1] + 1, (len(q),), generator=generator) for index in indices]
        indptrs[:] = [torch.cat([torch.zeros(1), n.cumsum(0)]).int() + 3 for n in keep]
        for i, (index, n) in enumerate(zip(indices, keep, strict=True)):
            indices[i] = torch.cat([torch.full((3,), 1).int(), *[row[:k] for row, k in zip(index, n, strict=True)]])
    elif mode == "lengths and sink":
        lengths[:] = [torch.randint(0, index.shape[1] + 1, (len(q),), generator=generator).int() for index in indices]
    if mode == "planned":
        keys = torch.full((len(q),), sum(index.shape[1] for index in indices), dtype=torch.int32)
        args[6] = mla_suite.plan(keys, rows=q.shape[1], workers=7, max_kv_len=0)
    if mode == "mtp":
        args[0] = q.view(-1, 2, *q.shape[1:])
        indices[:] = [index.view(-1, 2, index.shape[-1]) for index in indices]
        lengths[0] = torch.randint(0, indices[0].shape[-1] + 1, (len(q) // 2,), generator=generator).int()


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


class Recorded(TorchDispatchMode):
    """Names of the aten operators called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


VIEWS = {"view", "_unsafe_view", "select", "slice", "as_strided", "alias", "detach", "reshape", "unsqueeze"}


@pytest.mark.parametrize("mode", MODES)
def test_the_host_reads_and_allocates_nothing(mode):
    """A second call launches, and beside that only takes views: no length is read, no scratch made, no variable set."""
    args, kwargs = problem(POOLS["v4"], 2, 16)
    in_mode(mode, args, kwargs, seed=1)
    out, lse = attend(args, kwargs)
    environment = dict(os.environ)
    offered = native.offer(SPARSE_DECODE.problem(*args, **kwargs), GFX950)
    with Recorded() as recorded:
        native.run(offered.config, (out, lse), *args, **kwargs)
    assert set(recorded.names) <= VIEWS, recorded.names
    added = set(os.environ) - set(environment)
    assert all(name.startswith("TORCHINDUCTOR") for name in added), "torch sets its own when a dispatch mode is entered"
    assert all(os.environ[name] == value for name, value in environment.items())


def test_partials_are_fp32():
    args, kwargs = problem(POOLS["v4"], 1, 16)
    with emulator.configured(collect=True) as reports:
        attend(args, kwargs | {"num_splits": 2})
    sparse, _ = reports
    assert sparse.stored["partial_out"] == 2 * 16 * 512 * 4
    assert sparse.stored["partial_lse"] == 2 * 16 * 4


@pytest.mark.parametrize("arch", ["gfx942", "sm_90", None])
def test_other_archs_never_get_these_kernels(arch):
    args, kwargs = problem(POOLS["v4"], 2, 16)
    answer = native.offer(SPARSE_DECODE.problem(*args, **kwargs), archs.get(arch) if arch else None)
    assert isinstance(answer, Refusal)
    assert "gfx950" in answer.reason


def test_gfx942_falls_back_to_equal_numbers():
    args, kwargs = problem(POOLS["v4"], 2, 16)
    out, lse = attend(args, kwargs)
    with mla_suite.emulate("gfx942"):
        other, other_lse = torch.ops.mla_suite.sparse_decode(*args, **kwargs)
    expected = exact(*args, **kwargs)
    assert_within_bound(out, lse, expected)
    assert_within_bound(other, other_lse, expected)
    for key in manifest.installed().kernels:
        assert key[0] == "gfx950" or not key[1].startswith("sparse_decode")


REFUSED = {
    "five pools": (lambda: problem([("dsv4", 1, 16, 3)] * 5, 1, 8), "5 pools; it takes 1 to 4"),
    "mixed records": (lambda: problem([("dsv4", 1, 16, 3), ("bf16", 1, 16, 3)], 1, 8), "pools in dsv4, bf16"),
    "odd pages": (lambda: problem([("dsv4", 2, 3, 3)], 1, 8, padded=False), "aligned to 8 bytes"),
    "fp16": (lambda: _with_q(lambda q: q.half()), "q is torch.float16; it takes bfloat16"),
}


def _with_q(change):
    args, kwargs = problem(POOLS["v4"], 1, 8)
    return [change(args[0]), *args[1:]], kwargs


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_is_computed_elsewhere(why):
    make, sentence = REFUSED[why]
    args, kwargs = make()
    answer = native.offer(SPARSE_DECODE.problem(*args, **kwargs), GFX950)
    assert isinstance(answer, Refusal)
    assert sentence in answer.reason
    out, lse = torch.ops.mla_suite.sparse_decode(*args, **kwargs)
    assert_within_bound(out, lse, exact(*args, **kwargs))


def counted(name, heads, keys):
    """The report of one workgroup that attends to `keys` keys, all valid, most of them more than once."""
    if manifest.installed().find("gfx950", SparseConfig(GFX950, "dsv4", 16).instance).compiler != (
        compilers.packaged().version
    ):
        pytest.skip(f"the counts are those of {compilers.packaged().version}")
    args, kwargs = problem([(name, 8, 64, keys)], 1, heads, invalid=0, spread=0)
    with emulator.configured(collect=True) as reports:
        attend(args, kwargs | {"num_splits": 1})
    (report,) = reports
    assert not report.findings
    return report


COUNTS = [
    ("dsv4", 16, 584, 27, 29),
    ("dsv4", 64, 584, 49, 42),
    ("dsv4", 128, 584, 75, 62),
    ("v32", 128, 672, 84, 67),
]


@pytest.mark.parametrize(("name", "heads", "bytes_per_key", "instructions", "lds"), COUNTS)
def test_counters(name, heads, bytes_per_key, instructions, lds):
    """Per key and workgroup: bytes read once, matrix FLOP exact, dequantised once, bound by memory or matrix."""
    keys = 2048
    report = counted(name, heads, keys)
    mix = report.mix()
    kind = layout(name)
    assert report.loaded["cache_0"] == keys * bytes_per_key
    assert report.loaded["indices_0"] == keys * 4
    rescored = 1.05  # a tile whose scores exceed the reference is scored twice
    exact_matrix = keys * heads * 2 * (kind.head_dim + 512) // (2 * 16 * 16 * 32)
    assert exact_matrix <= mix["v_mfma_f32_16x16x32_bf16"] <= exact_matrix * rescored
    converted = sum(times for op, times in mix.items() if "fp8" in op)
    # A load of 16 bytes per lane covers 128 bytes of eight tokens, so 448 values convert as 512.
    assert converted == keys * 512 // 2 // 64
    assert report.instructions() <= instructions * keys
    assert report.lds_clocks() <= lds * keys
    bound = report.bound(GFX950)
    assert bound.limiter in ("memory", "matrix")
    budget = getattr(bound, bound.limiter)
    dequantising = converted * (1 if name == "dsv4" else 3) + keys * 5 // 8 * 2
    assert dequantising * 4 / GFX950.simds <= 0.25 * budget


def test_rows_of_a_workgroup_hold_all_heads():
    for heads in range(1, 400):
        rows = tile_rows(heads)
        tiles = -(-heads // 128)
        assert rows * tiles >= heads
        assert rows * tiles - heads < 32 * tiles


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"rows": 24}, "rows are one of"),
        ({"record": "dsv5"}, "records are"),
        ({"arch": archs.get("gfx942")}, "gfx942 has no such kernels"),
    ],
)
def test_an_illegal_config_says_why(changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        SparseConfig(**({"arch": GFX950, "record": "dsv4", "rows": 16} | changed))


def test_a_config_prints_its_point_alone():
    assert str(SparseConfig(GFX950, "dsv4", 16)) == "SparseConfig(record='dsv4', rows=16)"


def test_every_declared_kernel_is_one_of_the_rules():
    names = {key[1] for key in manifest.installed().kernels if key[1].startswith("sparse_decode_")}
    assert names == {SparseConfig(GFX950, record, rows).instance for record in RECORDS.values() for rows in ROWS}


def test_records_of_mixed_layouts():
    assert record_of(["v32", "v32_pow2"], 576) == "v32"
    assert record_of(["dsv4", "bf16"], 512) is None
    assert record_of(["dsv4_fnuz"], 512) is None
