"""decode's machine code for gfx942, executed in the emulator with every check on, against fp64.

On a machine with such a GPU the calls run there instead; what counts instructions stays in the emulator.
"""

from __future__ import annotations

import itertools

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
    counted,
    counted_by_packaged_compiler,
    cover,
    hard_scores,
    lengths,
)

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import combine as combine_configs
from mla_suite.archs.cdna.decode import CdnaConfig, tile_rows
from mla_suite.build import manifest
from mla_suite.core import tuning
from mla_suite.launch import current_arch, has_kernel
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

ARCH = "gfx942"


def machine():
    """The device whose gfx942 kernels are called."""
    if torch.cuda.is_available():
        arch = current_arch(torch.empty(0, device="cuda"))
        if arch is not None and arch.name == ARCH:
            return torch.device("cuda")
    return CPU


DEVICE = machine()


@pytest.fixture(autouse=True)
def gfx942():
    config = CdnaConfig(archs.get(ARCH), "bf16", "bf16", 16, 576, False)
    if not has_kernel(ARCH, config.instance):
        pytest.skip(f"{config.instance} is not built for gfx942; run `python -m mla_suite build --arch gfx942`")
    with mla_suite.emulate(ARCH) as record:
        yield record


def decode(args, kwargs, device=DEVICE):
    return grid.decode(ARCH, args, kwargs, device)


def check(sample):
    grid.check(ARCH, sample, DEVICE)


MODES = (
    *grid.MODES,
    {"rotate": True, "num_splits": 1},
    {"rope": 0, "num_splits": 1},
    {"kv_format": "fp16", "dtype": torch.float16, "num_splits": 1},
    {"kv_format": "fp16", "dtype": torch.float16, "rope": 0, "planned": True},
    {"kv_format": "fp8_fnuz", "num_splits": 1},
    {"kv_format": "fp8_fnuz", "dtype": torch.float8_e4m3fnuz, "planned": True, "sink": True},
)


@pytest.mark.parametrize("heads", HEADS)
def test_within_the_rounding_bound(heads):
    for h, q_len, page, start, mode in cover(MODES):
        if h == heads:
            check(decode_sample(lengths(start, h, q_len), heads=h, q_len=q_len, page=page, seed=start, **mode))


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_whole_product(heads, q_len, page):
    """Every length in one batch, poisoned, split and unsplit, for each cache type."""
    for options in ({"num_splits": 1}, {"planned": True, "sink": True}):
        for cache in ({}, {"kv_format": "fp16", "dtype": torch.float16}, {"kv_format": "fp8_fnuz"}):
            check(decode_sample(LENS, heads=heads, q_len=q_len, page=page, **options, **cache))


@pytest.mark.parametrize("heads", HEADS)
def test_all_lengths_in_one_batch(heads):
    """Every length beside every other, whatever the number of heads."""
    at = HEADS.index(heads)
    check(decode_sample(LENS, heads=heads, page=PAGES[at % len(PAGES)], sink=at % 2 == 0, num_splits=1))


@pytest.mark.parametrize("heads", [144, 300])
def test_more_heads_than_a_tile_has_rows(heads):
    check(decode_sample((70, 200), heads=heads, sink=True, num_splits=1))


def test_the_cover_is_pairwise():
    """With heads and lengths, whose pairs meet above in one batch, any two of the five."""
    assert_pairwise(MODES)


@pytest.mark.parametrize("length", LENS)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_every_length(heads, length):
    check(decode_sample((length,), heads=heads, page=61, num_splits=1))


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("kind", ["large", "equal", "dominating", "rising", "falling"])
def test_hard_scores(heads, kind):
    """Logits to +-200, rows that are all equal, one key above all others, and references that rise or never do."""
    sample = decode_sample((300,), heads=heads, q_len=2, num_splits=1)
    args, kwargs = sample.make(CPU)
    hard_scores(kind, args)
    out, lse = decode(args, kwargs)
    assert_within_bound(out, lse, exact_decode(*args, **kwargs))


@pytest.mark.parametrize("splits", range(1, 65))
def test_splits_agree(splits):
    heads = (16, 32, 12)[splits % 3]
    check(decode_sample((1000, 65, 0), heads=heads, sink=splits % 2 == 0, num_splits=splits))


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize(
    ("dtype", "kv_format", "descales"),
    [
        (torch.bfloat16, "fp8_fnuz", (0.75, 1.5)),
        (torch.float8_e4m3fnuz, "fp8_fnuz", (0.75, 1.5)),
        (torch.bfloat16, "bf16", (0.3,)),
        (torch.float16, "fp16", (0.3,)),
    ],
)
def test_descales(heads, dtype, kv_format, descales):
    args, kwargs = decode_sample((100, 7), heads=heads, kv_format=kv_format, dtype=dtype, num_splits=1).make(CPU)
    args = [*args[:7], *map(torch.tensor, descales), *args[7 + len(descales) :]]
    out, lse = decode(args, kwargs)
    assert_within_bound(out, lse, exact_decode(*args, **kwargs))


@pytest.mark.parametrize("scale", [0.0, -(192**-0.5)])
def test_scales_that_are_not_positive(scale):
    args, kwargs = decode_sample((100, 7), heads=16, num_splits=1).make(CPU)
    kwargs["softmax_scale"] = scale
    out, lse = decode(args, kwargs)
    assert_within_bound(out, lse, exact_decode(*args, **kwargs))


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
def test_infinite_sinks(sink):
    args, kwargs = decode_sample((100, 0), heads=16, sink=True, num_splits=1).make(CPU)
    args[9].fill_(sink)
    out, lse = decode(args, kwargs)
    assert_within_bound(out, lse, exact_decode(*args, **kwargs))


def test_strided_queries_and_outputs():
    args, kwargs = decode_sample((100, 7), heads=16, num_splits=1).make(CPU)
    wide = torch.zeros(2, 1, 16, 580, dtype=torch.bfloat16)
    wide[..., 1:577] = args[0]
    padded = torch.zeros(2, 3, 32, 520, dtype=torch.bfloat16)[:, :1, ::2, :512]
    lse = torch.zeros(2, 3, 32)[:, :1, :16]
    torch.ops.mla_suite.decode.out(wide[..., 1:577], *args[1:], **kwargs, out=padded, lse=lse)
    assert_within_bound(padded, lse, exact_decode(*args, **kwargs))


@pytest.mark.parametrize("heads", [16, 64])
def test_same_bits_again_and_in_any_order(heads):
    args, kwargs = decode_sample((300, 65, 130), heads=heads, planned=True).make(CPU)
    first = decode(args, kwargs)
    for order in ("forward", "reverse", "shuffle:3"):
        with emulator.configured(order=order):
            again = decode(args, kwargs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("heads", "kv_format"), [(16, "bf16"), (48, "bf16"), (16, "fp8_fnuz"), (48, "fp8_fnuz")])
def test_batch_invariant_bits(heads, kv_format):
    """A sequence's bits in batches of 1, 5 and 64, at another place in each, with other lengths beside it."""
    lens_all = (200, *[5, 17, 33] * 21)
    args, kwargs = decode_sample(lens_all, heads=heads, split_size=64, kv_format=kv_format).make(CPU)
    q, cache, lens, table = args[:4]
    kwargs["max_seqlen_kv"] = 256
    alone = decode((q[:1], cache, lens[:1], table[:1], *args[4:]), kwargs)
    for batch, place in ((5, 3), (64, 40)):
        order = [*range(1, place + 1), 0, *range(place + 1, batch)]
        found = decode((q[order], cache, lens[order], table[order], *args[4:]), kwargs)
        assert all(torch.equal(a[0], b[place]) for a, b in zip(alone, found, strict=True))


def test_batch_invariant_bits_with_a_plan():
    """A plan has the work tiles that lengths need, in any number of SM parts; bits are those of a call without one."""
    args, kwargs = decode_sample((200, 5, 64, 130, 33), heads=16, split_size=64).make(CPU)
    q, cache, lens, table = args[:4]
    wanted = decode(args, kwargs)
    for chosen, parts in (([0], 7), ([3, 0], 2), ([4, 1, 0, 2, 3], 3)):
        plan = mla_suite.plan(lens[chosen], num_heads=16, num_sm_parts=parts, max_seqlen_kv=4096, split_size=64)
        rest, of_context_parallel = args[4:11], args[12:]
        found = decode((q[chosen], cache, lens[chosen], table[chosen], *rest, plan, *of_context_parallel), kwargs)
        assert all(torch.equal(w[chosen], f) for w, f in zip(wanted, found, strict=True))


@pytest.mark.parametrize("heads", [16, 48])
def test_batch_invariant_bits_of_one_split(heads):
    """A sequence that fits one split: alone its result needs no combine, beside a longer one it passes through it."""
    args, kwargs = decode_sample((50, 200), heads=heads, split_size=64).make(CPU)
    q, cache, lens, table = args[:4]
    together = decode(args, kwargs)
    alone = decode((q[:1], cache, lens[:1], table[:1], *args[4:]), kwargs | {"max_seqlen_kv": 64})
    assert all(torch.equal(a[0], t[0]) for a, t in zip(alone, together, strict=True))


def test_batch_invariant_bits_of_packed_queries():
    """For one max_seqlen_q, whatever number of query tokens a sequence and its neighbours have."""
    args, kwargs = decode_sample((130, 5, 200), heads=16, q_len=3, varlen=True, split_size=64).make(CPU)
    q, cache, lens, table, _, _, bounds, *rest = args
    kwargs["max_seqlen_kv"] = 256
    together = decode(args, kwargs)
    for b, (first, end) in enumerate(itertools.pairwise(bounds.tolist())):
        own = torch.tensor([0, end - first], dtype=torch.int32)
        sequence = slice(b, b + 1)
        alone = decode((q[first:end], cache, lens[sequence], table[sequence], None, None, own, *rest), kwargs)
        assert all(torch.equal(a, t[first:end]) for a, t in zip(alone, together, strict=True))


@pytest.mark.parametrize("heads", [16, 48])
def test_batch_invariant_across_a_boundary_of_the_table(heads, tmp_path, monkeypatch):
    """Batches of 1, 5 and 64 for which a tuned table names other merges; a batch-invariant call does not ask it."""
    points = {1: (1, 4, 16, 4), 5: (1, 4, 8, 4), 64: (4, 4, 4, 1)}
    form = combine_configs.FORMAT
    lines = [",".join(form.header)]
    for batch, point in points.items():
        problem = {
            "head_dim_v": 512,
            "out_dtype": "bf16",
            "device_units": 304,
            "rows": heads,
            "batch": batch,
            "splits": 4,
        }
        config = dict(
            zip(("rows_per_group", "vec", "waves", "slices"), point, strict=True), num_splits=4, fixed_splits=0
        )
        lines.append(form.line({**problem, **config, "kind": "counted", "date": "2026-01-01", "commit": "0123456"}))
    table = tmp_path / "combine" / "gfx942.csv"
    table.parent.mkdir()
    table.write_text("\n".join(lines) + "\n")
    with monkeypatch.context() as patched:
        patched.setenv("MLA_SUITE_TUNED_DIR", str(tmp_path))
        tuning.clear_cache()
        arch = archs.get(ARCH)
        chosen = {combine_configs.choose(arch, 512, "bf16", heads, batch, 4) for batch in points}
        assert len(chosen) == len(points), "the table has a boundary between any two of the batches"
        assert all("tuned" in reason or "row" in reason for _, reason in chosen), chosen
        test_batch_invariant_bits(heads, "bf16")
    tuning.clear_cache()


COUNTED = "decode_dtype-bf16_rows-16_width-576_rotate-0"


@pytest.mark.parametrize(
    ("rows", "instructions", "lds", "valu"),
    [(16, 28, 33, 28), (32, 80, 139, 80), (64, 80, 139, 80), (80, 100, 136, 75), (128, 120, 136, 75)],
)
def test_counters(rows, instructions, lds, valu):
    """Per KV token and workgroup at kv 1024; matrix FLOP exact, every cached byte read once, bound by memory."""
    kv = 1024
    counted_by_packaged_compiler(ARCH, COUNTED)
    args, kwargs = decode_sample((kv,), heads=rows, num_splits=1).make(CPU)
    report = counted(ARCH, args, kwargs)
    mix = report.mix()
    matrix = sum(times for name, times in mix.items() if "mfma" in name)
    assert matrix * 2 * 16**3 == kv * rows * 2 * (576 + 512)
    assert report.loaded["kv_cache"] == kv * 1152
    assert report.loaded["kv_cache"] + report.loaded["block_table"] <= kv * 1175
    assert report.instructions() <= instructions * kv
    assert report.lds_clocks() <= lds * kv
    assert sum(times for name, times in mix.items() if name.startswith("v_") and "mfma" not in name) <= valu * kv
    assert report.bound(archs.get(ARCH)).limiter == "memory"


@pytest.mark.parametrize(
    ("rows", "instructions", "valu", "limiter"),
    [(16, 36, 30, "memory"), (64, 80, 45, "memory"), (128, 135, 75, "matrix")],
)
def test_counters_of_an_fp8_cache(rows, instructions, valu, limiter):
    """As above at 576 bytes per token; 128 rows are bound by the bf16 products."""
    kv = 1024
    counted_by_packaged_compiler(ARCH, COUNTED)
    args, kwargs = decode_sample((kv,), heads=rows, kv_format="fp8_fnuz", num_splits=1).make(CPU)
    report = counted(ARCH, args, kwargs)
    mix = report.mix()
    assert report.loaded["kv_cache"] == kv * 576
    assert sum(times for name, times in mix.items() if "mfma" in name) * 2 * 16**3 == kv * rows * 2 * (576 + 512)
    assert report.instructions() <= instructions * kv
    assert sum(times for name, times in mix.items() if name.startswith("v_") and "mfma" not in name) <= valu * kv
    assert report.lds_clocks() <= 88 * kv
    assert report.bound(archs.get(ARCH)).limiter == limiter


CACHES = {
    "decode_dtype-bf16_rows-{}_width-576_rotate-0": {},
    "decode_dtype-bf16_rows-{}_width-512_rotate-0": {"rope": 0},
    "decode_dtype-fp16_rows-{}_width-576_rotate-0": {"kv_format": "fp16", "dtype": torch.float16},
    "decode_dtype-fp16_rows-{}_width-512_rotate-0": {"kv_format": "fp16", "dtype": torch.float16, "rope": 0},
    "decode_rotated_dtype-bf16_rows-{}_width-576_rotate-1": {"rotate": True},
    "decode_fp8_query-bf16_rows-{}": {"kv_format": "fp8_fnuz"},
    "decode_fp8_query-fp8_rows-{}": {"kv_format": "fp8_fnuz", "dtype": torch.float8_e4m3fnuz},
}
TILES = range(16, 129, 16)


def test_every_instance_is_listed():
    built = {name for arch, name in manifest.installed().kernels if arch == ARCH}
    expected = {name.format(rows) for name in CACHES for rows in TILES}
    assert {name for name in built if name.startswith("decode_")} == expected


@pytest.mark.parametrize("rows", TILES)
@pytest.mark.parametrize("instance", CACHES)
def test_every_instance_is_bound_by_memory_or_matrix(instance, rows):
    """Exact FLOP and bytes, and a bound of memory or matrix that holds on longer sequences as well."""
    kv, options = 1024, CACHES[instance]
    counted_by_packaged_compiler(ARCH, COUNTED)
    arch = archs.get(ARCH)
    args, kwargs = decode_sample((kv,), heads=rows, num_splits=1, **options).make(CPU)
    report = counted(ARCH, args, kwargs)
    entry = manifest.installed().find(ARCH, instance.format(rows))
    assert report.kernel == entry.symbol
    assert (entry.spills, entry.scratch) == (0, 0)
    width = 512 + options.get("rope", 64)
    rests = 64 if options.get("rotate") else 0  # what rounding a turned key leaves is multiplied too
    matrix = sum(times for name, times in report.mix().items() if "mfma" in name)
    assert matrix * 2 * 16**3 == kv * rows * 2 * (width + rests + 512)
    stored = width * args[1].element_size()
    assert report.loaded["kv_cache"] == kv * stored
    assert report.loaded["kv_cache"] + report.loaded["block_table"] <= kv * (stored + 23)
    bound = report.bound(arch)
    assert bound.limiter in ("memory", "matrix")
    # The prologue's and the stores' memory clocks fade on longer sequences: without them too.
    memory = kv * stored / (arch.memory_bytes_per_s / (arch.clock_mhz * 1e6) / arch.compute_units)
    assert max(memory, bound.matrix) > max(bound.valu, bound.lds_128)


def test_explain_names_the_instance_alone():
    args, kwargs = decode_sample((64,), heads=16).make(CPU)
    lines = str(mla_suite.explain("decode", *args, **kwargs)).splitlines()
    assert "  config: CdnaConfig(query='bf16', cache='bf16', rows=16, width=576, rotate=False)" in lines
    assert max(map(len, lines)) < 160


def test_tiles_are_near_equal():
    for heads, q_len in itertools.product(range(1, 129), range(1, 9)):
        rows = heads * q_len
        tile = tile_rows(rows)
        tiles = -(-rows // tile)
        assert tiles == -(-rows // 128)
        assert tile * tiles - rows < 16 * tiles


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"query": "fp32"}, "query and cache are one of"),
        ({"query": "fp16", "cache": "fp8"}, "query and cache are one of"),
        ({"query": "fp8", "cache": "fp8", "width": 512}, "fp8 rows have 576"),
        ({"rows": 24}, "rows are 16 to 128"),
        ({"rows": 144}, "rows are 16 to 128"),
        ({"width": 640}, "width is one of"),
        ({"rotate": True, "width": 512}, "un-rotated"),
        ({"arch": archs.get("sm_90")}, "not an AMD arch"),
    ],
)
def test_an_illegal_config_says_why(changed, sentence):
    point = {
        "arch": archs.get(ARCH),
        "query": "bf16",
        "cache": "bf16",
        "rows": 16,
        "width": 576,
        "rotate": False,
    } | changed
    with pytest.raises(ValueError, match=sentence):
        CdnaConfig(**point)
