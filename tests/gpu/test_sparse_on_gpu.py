"""sparse_decode's own kernels on a real GPU against fp64: numbers, hostile memory, every code, bits, graphs."""

from __future__ import annotations

import random

import decode_grid
import pytest
import sparse_runs
import torch
from gpu_problems import Recorded, moved
from sparse_calls import CUDA, ON_GPU, attend, check, exact, native, skip_without_kernels
from sparse_problems import FP8_POOLS, MODES, POOLS, V41_POOLS, in_mode, problem

import mla_suite
from mla_suite.archs.sm_90.sparse_decode import FEW_HEADS, SLOTS, SWAP_AB, WIDTHS
from mla_suite.archs.sm_90.sparse_splits import FAST_MEMORY, INVARIANT_KEYS, LEAST_KEYS, NEVER
from mla_suite.core import dispatch
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.launch import current_arch
from mla_suite.testing import poison

HEADS = (1, 7, 16, 64, 100, 128)
RECORDS = {"v32": 576, "dsv4": 512, "bf16": 576}


@pytest.fixture(autouse=True)
def gpu():
    skip_without_kernels()


@pytest.fixture(params=["as chosen", "keys first"])
def few_heads(request, monkeypatch):
    """Few heads of v32 records by the kernel that a call gets, and by the one with keys as the first operand."""
    if request.param == "keys first":
        for q_rows in LEAST_KEYS:
            monkeypatch.setitem(LEAST_KEYS, q_rows, (0, 0))
    dispatch.clear_caches()
    yield
    dispatch.clear_caches()


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("heads", [5, 20, 70])
@pytest.mark.parametrize("name", ["v32", "v32_pow2", "dsv4", "bf16"])
def test_one_key_is_returned_as_it_is(name, heads):
    """Every code at every place with many scales, through queries of zeros: the row itself, to the last bit."""
    kind = get_kv_format(name)
    kind = kind.sized(576, 0) if kind.dense else kind
    rows = torch.randn(8, 64, kind.head_dim, generator=torch.Generator().manual_seed(1))
    rows *= 2.0 ** torch.randint(-60, 20, (8, 64, 1), generator=torch.Generator().manual_seed(2))
    cache = caches.pack(kind, rows)
    if name != "bf16":
        stored = torch.as_strided(cache, (8, 64, kind.latent), (cache.stride(0), 576 if name == "dsv4" else 656, 1))
        codes = (torch.arange(512)[:, None] * 37 + torch.arange(kind.latent)) % 256
        stored.copy_(torch.where(codes % 128 == 127, 0, codes).view(8, 64, -1).to(torch.uint8))
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(3)).int()
    q = torch.zeros(512, heads, kind.head_dim, dtype=torch.bfloat16)
    args = [q, [cache], [slots[:, None]], [None], [None], None, None]
    out, lse = attend(args, {"kv_formats": [name], "softmax_scale": 0.1, "num_splits": 1})
    expected = caches.gather(kind, cache, slots.long())[:, :512].bfloat16()
    wrong = (out != expected[:, None]).any(dim=1)
    assert not bool(wrong.any()), f"{int(wrong.sum())} values, columns {wrong.any(0).nonzero().flatten().tolist()[:20]}"
    assert torch.equal(lse, torch.zeros_like(lse))


@pytest.mark.parametrize("name", ["v41", "v41_interleaved", "v41_fp4", "v41_fp4_interleaved"])
def test_any_bytes_of_a_v41_record(name):
    """One key each of random bytes, values and scales: its row to the last bit, NaN where it has one."""
    cache = caches.empty(get_kv_format(name), 9, 64)
    whole = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    random_bytes = torch.randint(0, 256, whole.shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    whole.copy_(torch.where((random_bytes & 127 == 127) & (torch.arange(len(whole)) % 9 != 0), 0, random_bytes))
    slots = torch.arange(576, dtype=torch.int32)
    args = [torch.zeros(576, 16, 512, dtype=torch.bfloat16), [cache], [slots[:, None]], [None], [None], None, None]
    out, _ = attend(args, {"kv_formats": [name], "softmax_scale": 0.1, "num_splits": 1})
    expected = caches.gather(get_kv_format(name), cache, slots.long()).bfloat16()
    nan = expected.isnan().any(-1)
    assert 0 < int(nan.sum()) < 576
    assert bool(out[nan].isnan().all())
    finite = expected.isfinite().all(-1)
    assert torch.equal(out[finite], expected[finite][:, None].expand(-1, 16, -1))


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("heads", HEADS)
def test_within_the_rounding_bound(heads):
    """Any two of heads, pools and mode meet at least once."""
    sparse_runs.pools_in_modes(ON_GPU, POOLS | V41_POOLS | FP8_POOLS, heads, HEADS.index(heads))


def test_random_problems(few_heads, request):
    """150 draws over everything that the kernels take; every instance is reached, but for clusters that add splits."""
    draw = random.Random(7)
    met: dict[str, int] = {}
    names_of = {
        "mixed": ("v32", "v32_pow2"),
        "v41": ("v41", "v41_interleaved", "v41_vllm"),
        "v41 of both sizes": ("v41", "v41_interleaved", "v41_fp4", "v41_fp4_interleaved"),
        "narrow": ("bf16",),
    }
    kinds = (
        "v32",
        "v32",
        "mixed",
        "dsv4",
        "dsv4",
        "dsv4",
        "bf16",
        "v41",
        "v41 of both sizes",
        "v32_nope",
        "fp8",
        "fp8",
        "narrow",
    )
    for number in range(150):
        kind = draw.choice(kinds)
        names = names_of.get(kind, (kind,))
        mode = draw.choice(MODES)
        fewest = 1 if mode == "mtp" else 0  # a view of no elements has no size to infer
        count = draw.choice((1, 1, 2, 3, 4)) if kind not in ("v32", "mixed") else draw.choice((1, 1, 2))
        pools = [
            (
                draw.choice(names),
                draw.randint(1, 20),
                draw.choice((1, 2, 7, 16, 64)),
                draw.choice((fewest, 1, 31, 64, 200, 900)),
            )
            for _ in range(count)
        ]
        if not any(topk for *_, topk in pools):
            pools[0] = (*pools[0][:3], 5)
        # Without padding, blocks of an odd number of dsv4's 584 bytes are not on 16 bytes: Triton's.
        padded = draw.random() < 0.7 or any(page % 2 for _, _, page, _ in pools)
        heads = draw.choice((1, 2, 5, 7, 8, 16, 32, 48, 63, 64, 65, 100, 127, 128, 200))
        tokens = draw.choice((2, 4, 6))
        width = 160 if kind == "narrow" else 0
        args, kwargs = problem(pools, tokens, heads, number, draw.choice((0.0, 0.2, 0.9)), padded, width=width)
        in_mode(mode, args, kwargs, number)
        if draw.random() < 0.3 and "num_splits" not in kwargs and "split_size" not in kwargs:
            kwargs |= draw.choice((dict(num_splits=draw.randint(1, 9)), dict(split_size=draw.choice((32, 100, 256)))))
        if draw.random() < 0.3:
            args[5] = torch.randn(heads)
        there = moved(args, CUDA)
        instance = native(there, kwargs)
        met[instance] = met.get(instance, 0) + 1
        try:
            check(args, kwargs)
        except AssertionError as error:
            raise AssertionError(f"problem {number}: {pools=} {tokens=} {heads=} {mode=} {kwargs=}: {error}") from error
    usual = len(WIDTHS) + len(SLOTS) + len(FEW_HEADS)
    met = {name: count for name, count in met.items() if "reduce" not in name}
    assert len([name for name in met if not name.startswith("swap_ab")]) == usual, met
    if "keys first" in request.node.name:
        assert len(met) == usual + len(SWAP_AB), met


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mode", MODES)
def test_narrow_rows(mode, heads):
    """128 + 32 values, in one pool and in three."""
    for pools in ([("bf16", 9, 64, 1500)], [("bf16", 3, 61, 100), ("bf16", 9, 1, 7), ("bf16", 3, 16, 65)]):
        args, kwargs = problem(pools, 6, heads, seed=heads, width=160)
        in_mode(mode, args, kwargs, seed=heads)
        check(args, kwargs)


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["dsv4", "v32", "bf16"])
def test_every_length(name, heads, splits):
    """Around the sizes of pairs, stages and batches of indices."""
    sizes = [0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513]
    sparse_runs.every_length(ON_GPU, name, heads, sizes, splits)


@pytest.mark.parametrize("kind", sparse_runs.KINDS)
@pytest.mark.parametrize("heads", [16, 128])
def test_hard_scores(heads, kind):
    sparse_runs.hard_scores(ON_GPU, heads, kind)


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("selection", sparse_runs.SELECTIONS)
@pytest.mark.parametrize("heads", [12, 40, 100])
@pytest.mark.parametrize("name", RECORDS)
def test_selections(name, heads, selection):
    sparse_runs.selections(ON_GPU, name, heads, selection)


@pytest.mark.parametrize("sink", sparse_runs.SINKS)
@pytest.mark.parametrize("splits", [1, 2])
def test_sinks(sink, splits):
    sparse_runs.sinks(ON_GPU, sink, splits)


@pytest.mark.parametrize("heads", [16, 128])
def test_extreme_scales(heads):
    sparse_runs.extreme_scales(ON_GPU, heads)


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("column", [0, 17, 63, 64, 200, 383, 447, 511])
@pytest.mark.parametrize("heads", [16, 128])
def test_one_nan_among_the_values_is_seen(heads, column, code):
    """In token 0 only, whichever lane, piece and byte it falls to."""
    for name in ("v32", "dsv4"):
        if name == "dsv4" and column >= 448:
            continue
        args, kwargs = problem([(name, 4, 64, 130)], 2, heads, invalid=0)
        cache, index = args[1][0], args[2][0]
        used = set(index.flatten().tolist())
        spare = next(slot for slot in range(256) if slot not in used)
        caches.scatter(get_kv_format(name), cache, torch.tensor([spare]), torch.randn(1, RECORDS[name]))
        stride = {"dsv4": 576, "v32": 656}[name]
        codes = torch.as_strided(cache, (4, 64, 512), (cache.stride(0), stride, 1))
        codes[spare // 64, spare % 64, column] = code
        index[0, 77] = spare
        out, lse = attend(args, kwargs)
        assert bool(out[0].isnan().all() and lse[0].isnan().all()), name
        assert bool(out[1].isfinite().all() and lse[1].isfinite().all()), name


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("name", [*RECORDS, "v41", "v41_fp4", "v41_fp4_interleaved", "v32_nope"])
@pytest.mark.parametrize("splits", [1, 2])
def test_nan_that_is_selected_is_seen(name, splits):
    sparse_runs.selected_nan(ON_GPU, name, splits)


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("scale", [0.0, -(192**-0.5)])
def test_scales_that_are_not_positive(scale):
    args, kwargs = problem(POOLS["v32"], 2, 16)
    check(args, kwargs | {"softmax_scale": scale})


def test_strided_queries_and_outputs():
    args, kwargs, (out, lse) = sparse_runs.strided(CUDA)
    there = moved(args, CUDA)
    native(there, kwargs)
    torch.ops.mla_suite.sparse_decode.out(*there, **kwargs, out=out, lse=lse)
    decode_grid.assert_within_bound(out.cpu(), lse.cpu(), exact(args, kwargs))


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("pools", ["v4", "both scales", "bf16"])
@pytest.mark.parametrize("heads", [16, 128])
def test_same_bits_every_time(pools, heads):
    args, kwargs = problem([(name, pages, page, topk * 9) for name, pages, page, topk in POOLS[pools]], 3, heads)
    there = moved(args, CUDA)
    for splits in (1, 4):
        native(there, kwargs | {"num_splits": splits})
        first = torch.ops.mla_suite.sparse_decode(*there, **kwargs, num_splits=splits)
        for _ in range(20):
            again = torch.ops.mla_suite.sparse_decode(*there, **kwargs, num_splits=splits)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("pools", "split_size"), [("v4", 64), ("both scales", 64), ("both scales", 2048)])
@pytest.mark.parametrize("heads", [16, 48, 128])
def test_batch_invariant_bits(heads, pools, split_size):
    """With splits of 2,048 keys 16 heads have keys as the first operand."""
    sparse_runs.batch_invariant(ON_GPU, heads, pools, split_size)


@pytest.mark.parametrize(("heads", "at_most"), [(1, 16), (16, 16), (17, 32), (33, None)])
@pytest.mark.parametrize("shorter", [0, 64])
@pytest.mark.parametrize("by", ["num_splits", "split_size"])
def test_long_splits_of_few_heads_have_keys_as_the_first_operand(heads, at_most, shorter, by):
    """From a length that depends on the heads and, but in batch-invariant mode, on the memory of this GPU."""
    arch = current_arch(torch.empty(1, device=CUDA))
    if arch.name != "sm_90":
        pytest.skip("only sm_90 has kernels with keys as the first operand")
    of_gpu = LEAST_KEYS[at_most or 32][arch.memory_bytes_per_s < FAST_MEMORY]
    never = by == "num_splits" and of_gpu == NEVER
    length = 2048 if never else (of_gpu if by == "num_splits" else INVARIANT_KEYS[at_most or 32]) - shorter
    topk, options = (2 * length, {by: 2}) if by == "num_splits" else (40, {by: length})
    args, kwargs = problem([("v32", 3, 64, topk)], 2, heads)
    first = at_most is not None and not shorter and not never
    assert native(moved(args, CUDA), kwargs | options).startswith("swap_ab") == first
    check(args, kwargs | options)


@pytest.mark.parametrize("mode", ["one split", "splits and sink", "lengths and sink"])
def test_captured_and_replayed_with_other_indices(mode):
    """Another draw of queries, caches, indices and lengths in the same tensors, at each replay."""
    first, kwargs = problem(POOLS["v4"], 6, 100)
    in_mode(mode, first, kwargs, 0)
    there = moved(first, CUDA)
    native(there, kwargs)
    out = torch.empty(6, 100, 512, dtype=torch.bfloat16, device=CUDA)
    lse = torch.empty(6, 100, device=CUDA)
    call = torch.ops.mla_suite.sparse_decode.out
    recorded = Recorded(lambda: call(*there, **kwargs, out=out, lse=lse), CUDA)
    for seed in (1, 2, 3):
        args, _ = problem(POOLS["v4"], 6, 100, seed)
        in_mode(mode, args, dict(kwargs), seed)
        there[0].copy_(args[0])
        for i in range(2):
            there[1][i].copy_(args[1][i])
            there[2][i].copy_(args[2][i])
            if args[4][i] is not None:
                there[4][i].copy_(args[4][i])
        if args[5] is not None:
            there[5].copy_(args[5])
        poison(out)
        poison(lse)
        recorded.replay()
        decode_grid.assert_within_bound(out.cpu(), lse.cpu(), exact(args, kwargs))


def test_a_pool_beyond_four_gigabytes():
    args, kwargs = problem([("v32", 1, 64, 3)], 1, 16)
    pages = 103_000  # 4.3 GB
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("the GPU has no room for a pool beyond four gigabytes")
    last = pages * 64 - 1
    small = caches.empty("v32", 2, 64)
    poison(small)
    caches.scatter(get_kv_format("v32"), small, torch.tensor([0, 127]), torch.randn(2, 576))
    args[1], args[2] = [small], [torch.tensor([[0, 127, 128]], dtype=torch.int32)]
    cache = caches.empty("v32", pages, 64, device=CUDA)
    cache[0], cache[-1] = small[0].cuda(), small[1].cuda()
    there = [args[0].cuda(), [cache], [torch.tensor([[0, last, last + 1]], dtype=torch.int32).cuda()], *args[3:]]
    native(there, kwargs)
    out, lse = torch.ops.mla_suite.sparse_decode(*there, **kwargs)
    decode_grid.assert_within_bound(out.cpu(), lse.cpu(), exact(args, kwargs))


@pytest.mark.parametrize(
    ("tokens", "heads", "pools"),
    [
        (128, 128, [("v32", 4096, 64, 2048)]),
        (128, 64, [("v32", 4096, 64, 2048)]),
        (128, 128, [("dsv4", 256, 256, 128), ("dsv4", 8192, 64, 1024)]),
        (1, 16, [("dsv4", 16, 256, 128), ("dsv4", 256, 64, 512)]),
    ],
)
def test_production_shapes(tokens, heads, pools):
    """Three query tokens of the batch against fp64, with plan and without."""
    draw = torch.Generator(CUDA).manual_seed(0)
    width = get_kv_format(pools[0][0]).head_dim
    q = torch.randn(tokens, heads, width, generator=draw, device=CUDA).bfloat16()
    kv_caches, indices = [], []
    for name, pages, page, topk in pools:
        rows = torch.randn(pages, page, width, generator=draw, device=CUDA)
        kv_caches.append(caches.pack(name, rows))
        indices.append(torch.randint(-1, pages * page, (tokens, topk), generator=draw, device=CUDA).int())
    args = [q, kv_caches, indices, [None] * len(pools), [None] * len(pools), None, None]
    kwargs = {"kv_formats": [name for name, *_ in pools], "softmax_scale": width**-0.5}
    some = sorted({0, tokens // 2, tokens - 1})
    chosen = moved([q[some], kv_caches, [index[some] for index in indices], *args[3:]], torch.device("cpu"))
    right = exact(chosen, kwargs)
    lengths = torch.full((tokens,), sum(topk for *_, topk in pools), dtype=torch.int32, device=CUDA)
    planned = mla_suite.plan(lengths, num_heads=heads)
    for plan in (None, planned):
        given = [*args[:6], plan]
        native(given, kwargs)
        out, lse = torch.ops.mla_suite.sparse_decode(*given, **kwargs)
        decode_grid.assert_within_bound(out[some].cpu(), lse[some].cpu(), right)
