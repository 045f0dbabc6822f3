"""decode's machine code for gfx950 over an fp8 cache (OCP e4m3), in the emulator with every check on, against fp64."""

from __future__ import annotations

import pytest
import torch
from backend_calls import BackendCalls
from decode_grid import (
    COARSE,
    CPU,
    HEADS,
    LENS,
    assert_pairwise,
    assert_within_bound,
    check,
    counted,
    counted_by_packaged_compiler,
    cover,
    decode,
    lengths,
)

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs.gfx950 import Gfx950Config
from mla_suite.build import manifest
from mla_suite.launch import has_kernel
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

NATIVE = BackendCalls(DECODE, "native")

ARCH = "gfx950"
E4M3 = torch.float8_e4m3fn
SMALLEST = "decode_fp8_query-fp8_weight-bf16_rows-16"
QUERIES = {"fp8": {"kv_format": "fp8", "dtype": E4M3}, "bf16": {"kv_format": "fp8"}}


@pytest.fixture(autouse=True)
def gfx950():
    if not has_kernel(ARCH, SMALLEST):
        pytest.skip(f"{SMALLEST} is not built for gfx950; run `python -m mla_suite build --arch gfx950`")
    with mla_suite.emulate(ARCH) as record:
        yield record


MODES = tuple(
    {**query, **options}
    for query in QUERIES.values()
    for options in (
        {"num_splits": 1},
        {"num_splits": 3, "sink": True},
        {"planned": True},
        {"split_size": 128},
        {"varlen": True, "planned": True, "sink": True},
        {"ragged_pages": True, "num_splits": 1, "causal": False},
    )
)


def test_the_cover_is_pairwise():
    assert_pairwise(MODES)


@pytest.mark.parametrize("heads", HEADS)
def test_within_the_rounding_bound(heads):
    for h, q_len, page, start, mode in cover(MODES):
        if h == heads:
            check(ARCH, decode_sample(lengths(start, h, q_len), heads=h, q_len=q_len, page=page, seed=start, **mode))


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_every_length(heads, query):
    for length in LENS:
        check(ARCH, decode_sample((length,), heads=heads, page=61, num_splits=1, **QUERIES[query]))


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("heads", [16, 128])
def test_descales(heads, query):
    args, kwargs = decode_sample((100, 7), heads=heads, num_splits=1, **QUERIES[query]).make(CPU)
    args = [*args[:7], torch.tensor([0.75]), torch.tensor(0.3), *args[9:]]
    rounding = COARSE if (query, heads) == ("fp8", 128) else 2.0**-8
    assert_within_bound(*decode(ARCH, args, kwargs), exact_decode(*args, **kwargs), rounding)


@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize("kind", ["large", "equal", "dominating", "rising", "falling"])
def test_hard_scores(heads, kind):
    """Logits to +-200, rows that are all equal, one key above all others, and references that rise or never do."""
    args, kwargs = decode_sample((300,), heads=heads, page=300, pages=1, num_splits=1, **QUERIES["fp8"]).make(CPU)
    direction, logits = torch.randn(576), torch.linspace(-200, 200, 300)
    slopes = {"large": logits[torch.randperm(300)], "rising": logits, "falling": logits.flip(0)}
    rows = torch.randn(300, 576) / 4
    if kind == "equal":
        rows[:] = rows[0]
    elif kind == "dominating":
        rows[266] = direction * 4
    else:
        rows += slopes[kind][:, None] * 24 / direction.square().sum() * direction
        reached = rows.to(E4M3).double() @ direction.to(E4M3).double() * kwargs["softmax_scale"]
        assert float(reached.min()) < -195
        assert float(reached.max()) > 195
    q = direction.expand(1, 1, heads, 576).to(E4M3).contiguous()
    cache = rows.to(E4M3).view(torch.uint8)[None].contiguous()
    args = [q, cache, *args[2:8], torch.tensor(1.0), *args[9:]]
    rounding = COARSE if heads == 128 else 2.0**-8
    assert_within_bound(*decode(ARCH, args, kwargs), exact_decode(*args, **kwargs), rounding)


@pytest.mark.parametrize("heads", [16, 128])
def test_same_bits_again_and_in_any_order(heads):
    args, kwargs = decode_sample((300, 65, 130), heads=heads, planned=True, **QUERIES["fp8"]).make(CPU)
    first = decode(ARCH, args, kwargs)
    for order in ("reverse", "shuffle:3"):
        with emulator.configured(order=order):
            again = decode(ARCH, args, kwargs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def with_weights(rows, fp8_weights, args, kwargs):
    """Runs the instance with these weights, whatever would be chosen."""
    config = Gfx950Config(archs.get(ARCH), "fp8", "fp8", rows, 576, False, fp8_weights)
    out = torch.empty(*args[0].shape[:-1], 512, dtype=torch.bfloat16)
    lse = torch.empty(args[0].shape[:-1])
    NATIVE.run(config, (out, lse), *args, **kwargs)
    return out, lse


def normal(batch, length, scale):
    """q (32 heads, 4 query tokens) and keys ~ N(0, 1), quantised to e4m3."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(batch, 4, 32, 576, generator=generator).to(E4M3)
    cache = torch.randn(batch, length, 576, generator=generator).to(E4M3).view(torch.uint8)
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    lens, one = torch.full((batch,), length, dtype=torch.int32), torch.tensor(1.0)
    args = (q, cache, lens, table, None, None, None, one, one)
    return args, dict(softmax_scale=scale**-0.5, kv_format="fp8", num_splits=1)


def cosine_distance(a, b):
    a, b = a.double(), b.double()
    return float(1 - (a * b).sum() / (a.norm() * b.norm()))


@pytest.mark.parametrize(
    ("length", "scale", "most"), [(512, 192, 1.4e-4), (2048, 192, 1.0e-4), (512, 576, 2.6e-4), (2048, 576, 1.6e-4)]
)
def test_fp8_weights_are_as_near_as_their_rounding_allows(length, scale, most):
    args, kwargs = normal(4, length, scale)
    exact = exact_decode(*args, **kwargs)
    out, lse = decode(ARCH, args, kwargs)
    assert cosine_distance(out, exact.out) <= most
    assert_within_bound(out, lse, exact, COARSE)
    assert torch.equal(out, with_weights(128, True, args, kwargs)[0]), "fp8 weights are the default at 128 rows"


@pytest.mark.parametrize("length", [512, 2048])
def test_bf16_weights(length):
    args, kwargs = normal(1, length, 192)
    exact = exact_decode(*args, **kwargs)
    out, lse = with_weights(128, False, args, kwargs)
    assert cosine_distance(out, exact.out) <= 1e-5
    assert_within_bound(out, lse, exact)


@pytest.mark.parametrize(
    ("batch", "context", "fp8_weights"),
    [(4, 8192, False), (4, 16384, False), (32, 16384, False), (32, 16640, True), (256, 2048, False), (256, 2112, True)],
)
def test_a_plans_long_work_tiles_have_fp8_weights(batch, context, fp8_weights):
    """Up to 2,048 keys of a work tile memory takes longer than bf16 weights do, however long the sequence is."""
    args, kwargs = decode_sample((64, 64), heads=32, q_len=4, planned=True, **QUERIES["fp8"]).make(CPU)
    problem = DECODE.problem(*args, **kwargs)._replace(batch=batch, context=context)
    assert archs.kernels(archs.get(ARCH)).decode_config(problem, 128).fp8_weights is fp8_weights


KV = 1024
COLUMNS = {"fp8": 640, "bf16": 576}  # fp8 queries: five products of 128 columns, half of the last one zeros
MATRIX = {
    "v_mfma_f32_16x16x128_f8f6f4": 128,
    "v_mfma_f32_16x16x32_fp8_fp8": 32,
    "v_mfma_f32_16x16x32_bf16": 32,
}


def assert_counts(report, rows, columns, kv=KV):
    """Matrix FLOP exact, with `columns` in a key's score, and every cached byte read once."""
    mix = {name: times for name, times in report.mix().items() if "mfma" in name}
    assert set(mix) <= set(MATRIX)
    assert sum(times * 2 * 16 * 16 * MATRIX[name] for name, times in mix.items()) == kv * rows * 2 * (columns + 512)
    assert report.loaded["kv_cache"] == kv * 576
    assert report.loaded["kv_cache"] + report.loaded["block_table"] <= kv * 600


@pytest.mark.parametrize(
    ("query", "rows", "instructions", "valu", "matrix", "limiter"),
    [
        ("fp8", 16, 16, 10, 7, "memory"),
        ("fp8", 32, 30, 17, 13, "memory"),
        ("fp8", 48, 37, 21, 20, "memory"),
        ("fp8", 64, 43, 25, 26, "memory"),
        ("fp8", 80, 54, 33, 33, "memory"),
        ("fp8", 96, 58, 35, 39, "memory"),
        ("fp8", 112, 50, 32, 32, "memory"),
        ("fp8", 128, 53, 35, 40, "memory"),
        ("bf16", 16, 23, 16, 9, "memory"),
        ("bf16", 32, 41, 27, 17, "memory"),
        ("bf16", 48, 49, 31, 26, "memory"),
        ("bf16", 64, 57, 36, 34, "memory"),
        ("bf16", 80, 77, 51, 43, "memory"),
        ("bf16", 96, 82, 53, 51, "memory"),
        ("bf16", 112, 86, 55, 60, "memory"),
        ("bf16", 128, 91, 57, 68, "matrix"),
    ],
)
def test_counters(query, rows, instructions, valu, matrix, limiter):
    """Per KV token and workgroup at kv 1024."""
    counted_by_packaged_compiler(ARCH, SMALLEST)
    report = counted(ARCH, *decode_sample((KV,), heads=rows, num_splits=1, **QUERIES[query]).make(CPU))
    bound = report.bound(archs.get(ARCH))
    assert_counts(report, rows, COLUMNS[query])
    assert report.instructions() <= instructions * KV
    assert sum(n for name, n in report.mix().items() if name.startswith("v_") and "mfma" not in name) <= valu * KV
    assert bound.matrix <= matrix * KV
    assert bound.lds_128 <= 40 * KV
    assert bound.limiter == limiter


@pytest.mark.parametrize(
    ("query", "rows", "matrix"),
    [("fp8", 16, 7), ("fp8", 64, 26), ("fp8", 96, 39), ("fp8", 128, 40), ("bf16", 16, 9), ("bf16", 64, 34)],
)
def test_a_token_costs_its_bytes(query, rows, matrix):
    """One more token adds 576 bytes and 4 or 16 of page numbers at 13 bytes a clock."""
    counted_by_packaged_compiler(ARCH, SMALLEST)
    short, long = (
        counted(ARCH, *decode_sample((kv,), heads=rows, num_splits=1, **QUERIES[query]).make(CPU)).bound(
            archs.get(ARCH)
        )
        for kv in (512, 1024)
    )
    memory = (long.memory - short.memory) / 512
    assert memory <= 46
    assert (long.matrix - short.matrix) / 512 <= matrix
    assert max(long.valu - short.valu, long.lds_128 - short.lds_128) / 512 <= memory


def test_bf16_weights_cost_half_as_many_clocks_again():
    counted_by_packaged_compiler(ARCH, SMALLEST)
    args, kwargs = decode_sample((KV,), heads=128, num_splits=1, **QUERIES["fp8"]).make(CPU)
    with emulator.configured(collect=True) as reports:
        with_weights(128, False, args, kwargs)
    (report,) = reports
    assert_counts(report, 128, COLUMNS["fp8"])
    assert report.bound(archs.get(ARCH)).matrix == 52 * KV


def test_resources_are_as_declared():
    """No instance spills or uses scratch, and each has the LDS that its config promises."""
    entries = [e for e in manifest.installed().kernels.values() if e.arch == ARCH and e.kernel.startswith("decode_fp8")]
    for entry in entries:
        query, rows, fp8_weights = entry.constants["QUERY"], entry.constants["ROWS"], entry.constants["WEIGHT"] == "fp8"
        config = Gfx950Config(archs.get(ARCH), query, "fp8", rows, 576, False, fp8_weights)
        assert entry.id == config.instance
        assert (entry.lds, entry.spills, entry.scratch, entry.threads) == (config.lds, 0, 0, config.threads)
    assert len(entries) == 24


def test_fp8_weights_need_fp8_queries():
    with pytest.raises(ValueError, match="fp8 weights come with fp8 queries"):
        Gfx950Config(archs.get(ARCH), "bf16", "fp8", 128, 576, False, True)
