"""decode's machine code for gfx950, executed in the emulator with every check on, against fp64."""

from __future__ import annotations

import decode_grid as grid
import pytest
import torch
from decode_grid import (
    CPU,
    HEADS,
    LENS,
    PAGES,
    Q_LENS,
    assert_pairwise,
    assert_within_bound,
    check,
    counted,
    counted_by_packaged_compiler,
    cover,
    decode,
    hard_scores,
    lengths,
)

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs.gfx950 import Gfx950Config
from mla_suite.build import manifest
from mla_suite.launch import has_kernel
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

ARCH = "gfx950"
SMALLEST = "decode_dtype-bf16_rows-16_width-576_rotate-0"


@pytest.fixture(autouse=True)
def gfx950():
    if not has_kernel(ARCH, SMALLEST):
        pytest.skip(f"{SMALLEST} is not built for gfx950; run `python -m mla_suite build --arch gfx950`")
    with mla_suite.emulate(ARCH) as record:
        yield record


MODES = (
    *grid.MODES,
    {"rotate": True, "num_splits": 1},
    {"rotate": True, "planned": True},
    {"rope": 0, "num_splits": 1},
    {"kv_format": "fp16", "dtype": torch.float16, "num_splits": 1},
    {"kv_format": "fp16", "dtype": torch.float16, "rope": 0, "planned": True},
)


def test_the_cover_is_pairwise():
    assert_pairwise(MODES)


@pytest.mark.parametrize("heads", HEADS)
def test_within_the_rounding_bound(heads):
    for h, q_len, page, start, mode in cover(MODES):
        if h == heads:
            check(ARCH, decode_sample(lengths(start, h, q_len), heads=h, q_len=q_len, page=page, seed=start, **mode))


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_whole_product(heads, q_len, page):
    """Every length in one batch, poisoned, split and unsplit, for each cache type."""
    for options in ({"num_splits": 1}, {"planned": True, "sink": True}):
        for cache in ({}, {"kv_format": "fp16", "dtype": torch.float16}, {"rotate": True}):
            check(ARCH, decode_sample(LENS, heads=heads, q_len=q_len, page=page, **options, **cache))


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("length", LENS)
def test_every_length(heads, length):
    check(ARCH, decode_sample((length,), heads=heads, page=61, num_splits=1))


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("kind", ["large", "equal", "dominating", "rising", "falling"])
def test_hard_scores(heads, kind):
    args, kwargs = decode_sample((300,), heads=heads, q_len=2, num_splits=1).make(CPU)
    hard_scores(kind, args)
    assert_within_bound(*decode(ARCH, args, kwargs), exact_decode(*args, **kwargs))


@pytest.mark.parametrize("splits", [1, 2, 7, 33])
def test_splits_agree(splits):
    check(ARCH, decode_sample((1000, 65, 0), heads=16, q_len=2, sink=True, num_splits=splits))


@pytest.mark.parametrize("scale", [0.0, -(192**-0.5)])
def test_scales_that_are_not_positive(scale):
    args, kwargs = decode_sample((100, 7), heads=16, num_splits=1).make(CPU)
    kwargs["softmax_scale"] = scale
    assert_within_bound(*decode(ARCH, args, kwargs), exact_decode(*args, **kwargs))


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
def test_infinite_sinks(sink):
    args, kwargs = decode_sample((100, 0), heads=16, sink=True, num_splits=1).make(CPU)
    args[9].fill_(sink)
    assert_within_bound(*decode(ARCH, args, kwargs), exact_decode(*args, **kwargs))


@pytest.mark.parametrize("heads", [16, 64])
def test_same_bits_again_and_in_any_order(heads):
    args, kwargs = decode_sample((300, 65, 130), heads=heads, planned=True).make(CPU)
    first = decode(ARCH, args, kwargs)
    for order in ("reverse", "shuffle:3"):
        with emulator.configured(order=order):
            again = decode(ARCH, args, kwargs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("heads", [16, 48])
def test_batch_invariant_bits(heads):
    """A sequence's bits in batches of 1, 5 and 64, at another place in each, with other lengths beside it."""
    args, kwargs = decode_sample((200, *[5, 17, 33] * 21), heads=heads, split_size=64).make(CPU)
    q, cache, lens, table = args[:4]
    kwargs["max_seqlen_kv"] = 256
    alone = decode(ARCH, (q[:1], cache, lens[:1], table[:1], *args[4:]), kwargs)
    for batch, place in ((5, 3), (64, 40)):
        order = [*range(1, place + 1), 0, *range(place + 1, batch)]
        found = decode(ARCH, (q[order], cache, lens[order], table[order], *args[4:]), kwargs)
        assert all(torch.equal(a[0], b[place]) for a, b in zip(alone, found, strict=True))


def test_batch_invariant_bits_whatever_the_width_of_the_table_is():
    """A wider table, as beside a longer sequence, means more splits; what a sink divides is merged with one, too."""
    args, kwargs = decode_sample([50, 64, 7, 33, 60, 20, 41, 55], heads=48, split_size=64, sink=True).make(CPU)
    wide = torch.nn.functional.pad(args[3], (0, 3))
    alone, among = (decode(ARCH, (*args[:3], table, *args[4:]), kwargs) for table in (args[3], wide))
    assert all(torch.equal(a, b) for a, b in zip(alone, among, strict=True))


KV = 1024


def report_of(rows, kv=KV, **options):
    return counted(ARCH, *decode_sample((kv,), heads=rows, num_splits=1, **options).make(CPU))


def matrix_flop(report):
    """By the names of the instructions, none of which is one of half rate."""
    mix = {name: times for name, times in report.mix().items() if "mfma" in name}
    assert set(mix) <= {"v_mfma_f32_16x16x32_bf16", "v_mfma_f32_16x16x32_f16"}
    return sum(mix.values()) * 2 * 16 * 16 * 32


def vector(report):
    return sum(times for name, times in report.mix().items() if name.startswith("v_") and "mfma" not in name)


@pytest.mark.parametrize(
    ("rows", "instructions", "valu"),
    [(16, 15, 6), (32, 33, 11), (48, 41, 12), (64, 49, 14), (80, 54, 17), (96, 59, 19), (112, 64, 21), (128, 67, 23)],
)
def test_counters(rows, instructions, valu):
    """Per KV token and workgroup at kv 1024; matrix FLOP exact, every cached byte read once, bound by memory."""
    counted_by_packaged_compiler(ARCH, SMALLEST)
    report = report_of(rows)
    bound = report.bound(archs.get(ARCH))
    assert matrix_flop(report) == KV * rows * 2 * (576 + 512)
    assert report.loaded["kv_cache"] == KV * 1152
    assert report.loaded["kv_cache"] + report.loaded["block_table"] <= KV * 1175
    assert report.instructions() <= instructions * KV
    assert vector(report) <= valu * KV
    assert bound.matrix <= rows / 128 * 70 * KV
    assert bound.lds_128 <= 78 * KV
    assert bound.limiter == "memory"


@pytest.mark.parametrize("rows", [16, 128])
def test_a_token_costs_its_bytes(rows):
    """One more token adds 1,152 bytes and 4 or 16 of page numbers at 13 bytes a clock."""
    counted_by_packaged_compiler(ARCH, SMALLEST)
    short, long = (report_of(rows, kv).bound(archs.get(ARCH)) for kv in (1024, 2048))
    assert (long.memory - short.memory) / 1024 <= 90
    assert (long.matrix - short.matrix) / 1024 <= 70


@pytest.mark.parametrize(
    ("rows", "options", "limiter"),
    [(16, {"rotate": True}, "memory"), (128, {"rotate": True}, "memory")]
    + [(rows, {"rope": 0, "kv_format": "fp16", "dtype": torch.float16}, "memory") for rows in (16, 128)],
)
def test_bound_of_other_instances(rows, options, limiter):
    counted_by_packaged_compiler(ARCH, SMALLEST)
    report = report_of(rows, **options)
    bound = report.bound(archs.get(ARCH))
    # The remainder that rounding leaves of rotated rope parts is multiplied as well.
    assert matrix_flop(report) == KV * rows * 2 * ((576 + 64 if "rotate" in options else 512) + 512)
    assert bound.limiter == limiter


def test_resources_are_as_declared():
    """No instance spills or uses scratch, and each has the LDS that its config promises."""
    entries = [
        e for e in manifest.installed().kernels.values() if e.arch == ARCH and e.kernel in ("decode", "decode_rotated")
    ]
    for entry in entries:
        constants = entry.constants
        element = constants["DTYPE"]
        config = Gfx950Config(
            archs.get(ARCH), element, element, constants["ROWS"], constants["WIDTH"], bool(constants["ROTATE"])
        )
        assert entry.id == config.instance
        assert (entry.lds, entry.spills, entry.scratch, entry.threads) == (config.lds, 0, 0, config.threads)
    assert len(entries) == 40


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"query": "fp16", "cache": "fp8"}, "query and cache are one of"),
        ({"rows": 144}, "rows are 16 to 128"),
        ({"width": 640}, "width is one of"),
        ({"arch": archs.get("sm_90")}, "not an AMD arch"),
    ],
)
def test_an_illegal_config_says_why(changed, sentence):
    point = {
        "arch": archs.get(ARCH),
        "query": "bf16",
        "cache": "bf16",
        "rows": 64,
        "width": 576,
        "rotate": False,
    } | changed
    with pytest.raises(ValueError, match=sentence):
        Gfx950Config(**point)
