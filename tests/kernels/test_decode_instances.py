"""decode's instances on AMD: which are built, their resources, and what the emulator counts of each at 1,024 keys."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from built import PLAIN_DECODE, require_built
from decode_grid import CPU, FNUZ_QUERY, FP16, OCP_QUERY, counted, counted_by_packaged_compiler

import mla_suite
from mla_suite import archs
from mla_suite.archs.cdna.decode import MAX_BF16_P_ROWS, MAX_ROWS, tile_rows
from mla_suite.archs.gfx942 import Gfx942Config
from mla_suite.archs.gfx950 import MAX_ONE_TILE_KEYS, Gfx950Config
from mla_suite.build import manifest
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample

KV = 1024
TILES = range(16, 129, 16)
SMALLEST = "decode_fp8_query-fp8_weight-bf16_rows-16"
DENSE = {
    "decode_dtype-bf16_rows-{}_width-576_rotate-0": {},
    "decode_dtype-bf16_rows-{}_width-512_rotate-0": {"rope": 0},
    "decode_dtype-fp16_rows-{}_width-576_rotate-0": FP16,
    "decode_dtype-fp16_rows-{}_width-512_rotate-0": {**FP16, "rope": 0},
    "decode_rotated_dtype-bf16_rows-{}_width-576_rotate-1": {"rotate": True},
}
INSTANCES: dict[str, dict[str, dict[str, Any]]] = {
    "gfx942": {
        **DENSE,
        "decode_fp8_query-bf16_weight-bf16_rows-{}": {"kv_format": "fp8_fnuz"},
        "decode_fp8_query-fp8_weight-bf16_rows-{}": FNUZ_QUERY,
        "decode_fp8_weights_query-fp8_weight-fp8_rows-{}": FNUZ_QUERY,
    },
    "gfx950": {
        **DENSE,
        "decode_fp8_query-bf16_weight-bf16_rows-{}": {"kv_format": "fp8"},
        "decode_fp8_query-fp8_weight-bf16_rows-{}": OCP_QUERY,
        "decode_fp8_weights_query-fp8_weight-fp8_rows-{}": OCP_QUERY,
    },
}
"""Instances of an arch, by rows -> what their calls store. Of the two for fp8 queries the rows decide which runs."""


NARROW = ((256, 64), (256, 32), (128, 32))  # latents and rope parts


def called(arch):
    """The instances that calls get, of every kind and with every number of rows, in short contexts and in long ones."""
    kernels = archs.kernels(archs.get(arch))
    narrow = [dict(latent=latent, rope=rope) for latent, rope in NARROW]
    for options in (*INSTANCES[arch].values(), *narrow):
        args, kwargs = decode_sample((KV,), heads=1, **options).make(CPU)
        problem = DECODE.problem(*args, **kwargs)
        for rows, context in itertools.product(TILES, (MAX_ONE_TILE_KEYS, KV)):
            yield kernels.decode_config(problem._replace(heads=rows, context=context), MAX_ROWS).instance


def config_of(arch, constants):
    record, query = archs.get(arch), constants.get("QUERY", constants.get("DTYPE"))
    cache = "fp8" if "QUERY" in constants else query
    point = query, cache, constants["ROWS"], constants.get("WIDTH", 576), bool(constants.get("ROTATE", 0))
    return {"gfx942": Gfx942Config, "gfx950": Gfx950Config}[arch](record, *point, constants.get("WEIGHT") == "fp8")


@pytest.mark.parametrize("arch", INSTANCES)
def test_every_instance_is_built_as_its_config_says(arch):
    """There is one for each call and none besides; none spills or uses scratch, and each has the LDS of its config."""
    require_built(arch)
    entries = [
        entry
        for (name, _), entry in manifest.installed().kernels.items()
        if name == arch and entry.kernel.startswith("decode")
    ]
    assert {entry.id for entry in entries} == set(called(arch))
    for entry in entries:
        config = config_of(arch, entry.constants)
        assert entry.id == config.instance
        assert (entry.lds, entry.spills, entry.scratch, entry.threads) == (config.lds, 0, 0, config.threads)


# Counts


def report_of(arch, rows, kv=KV, **options):
    require_built(arch)
    counted_by_packaged_compiler(arch, SMALLEST)
    args, kwargs = decode_sample((kv,), heads=rows, num_splits=1, **options).make(CPU)
    with mla_suite.emulate(arch):
        report = counted(arch, args, kwargs)
    assert_exact(arch, report, rows, kv, options, args[1].element_size())
    return report, report.bound(archs.get(arch))


def assert_exact(arch, report, rows, kv, options, value_bytes):
    """Matrix FLOP exact, by instructions none of which is one of half rate, and every cached byte read once."""
    products = {name: times for name, times in report.mix().items() if "mfma" in name}
    depths = {name: re.fullmatch(r"v_mfma_f32_16x16x(16|32|128)_\w+", name) for name in products}
    assert all(depths.values()), products
    if arch == "gfx950":
        assert all("x16_" not in name for name in products), products
    flop = sum(times * 2 * 16 * 16 * int(depths[name][1]) for name, times in products.items())
    latent = options.get("latent", 512)
    width = latent + options.get("rope", 64)
    more = 64 if options == OCP_QUERY else 0  # five products of 128 columns, half of the last one zeros
    assert flop == kv * rows * 2 * (width + more + latent)
    stored = width * value_bytes
    assert report.loaded["kv_cache"] == kv * stored
    assert report.loaded["kv_cache"] + report.loaded["block_table"] <= kv * (stored + 24)


@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize("arch", INSTANCES)
def test_narrow_rows_cost_their_own_bytes_and_instructions(arch, rows):
    """Bytes and products per key are exactly the row's own (`assert_exact`); all other work falls with the latent."""
    wide, _ = report_of(arch, rows)
    before = sum(wide.mix().values())
    for latent, share in ((256, 0.7), (128, 0.8)):
        totals = [
            sum(report_of(arch, rows, latent=latent, rope=rope)[0].mix().values())
            for own, rope in NARROW
            if own == latent
        ]
        assert max(totals) < share * before
        before = min(totals)


def vector(report):
    return sum(times for name, times in report.mix().items() if name.startswith("v_") and "mfma" not in name)


BUDGETS = {
    ("gfx942", "bf16", "memory"): [
        (16, 28, 28, 33, 40),
        (32, 80, 80, 139, 40),
        (64, 80, 80, 139, 70),
        (80, 100, 75, 136, 90),
        (128, 120, 75, 136, 140),
    ],
    # A wave converts each key and value that it multiplies, beside products: more instructions than one conversion for
    # all waves, in fewer modelled clocks.
    ("gfx942", "fp8_fnuz", "memory"): [(16, 36, 30, 12, 40), (64, 88, 55, 26, 70)],
    ("gfx942", "fp8_fnuz", "matrix"): [(128, 153, 95, 42, 140)],
    ("gfx942", "fnuz query", "memory"): [
        (16, 24, 15, 12, 13),
        (32, 48, 27, 25, 25),
        (64, 62, 34, 26, 50),
        (96, 85, 46, 33, 75),
        (112, 100, 66, 42, 60),
        (128, 111, 74, 42, 68),
    ],
    ("gfx950", "bf16", "memory"): [
        (16, 15, 6, 78, 8.75),
        (32, 33, 11, 78, 17.5),
        (48, 41, 12, 78, 26.25),
        (64, 49, 14, 78, 35),
        (80, 54, 17, 78, 43.75),
        (96, 59, 19, 78, 52.5),
        (112, 64, 21, 78, 61.25),
        (128, 67, 23, 78, 70),
    ],
    ("gfx950", "fp8 query", "memory"): [
        (16, 16, 10, 40, 7),
        (32, 30, 17, 40, 13),
        (48, 37, 21, 40, 20),
        (64, 43, 25, 40, 26),
        (80, 54, 33, 40, 33),
        (96, 58, 35, 40, 39),
        (112, 50, 32, 40, 32),
        (128, 53, 35, 40, 40),
    ],
    ("gfx950", "fp8", "memory"): [
        (16, 23, 16, 40, 9),
        (32, 41, 27, 40, 17),
        (48, 49, 31, 40, 26),
        (64, 57, 36, 40, 34),
        (80, 77, 51, 40, 43),
        (96, 82, 53, 40, 51),
        (112, 86, 55, 40, 60),
    ],
    ("gfx950", "fp8", "matrix"): [(128, 91, 57, 40, 68)],
}
STORED = {
    "bf16": {},
    "fp8_fnuz": {"kv_format": "fp8_fnuz"},
    "fnuz query": FNUZ_QUERY,
    "fp8": {"kv_format": "fp8"},
    "fp8 query": OCP_QUERY,
}


@pytest.mark.parametrize(
    ("arch", "stored", "limiter", "row"), [(*key, row) for key, rows in BUDGETS.items() for row in rows], ids=str
)
def test_counters(arch, stored, limiter, row):
    """Per KV token and workgroup; row: rows, instructions, vector instructions, LDS and matrix clocks at most."""
    rows, instructions, valu, lds, matrix = row
    report, bound = report_of(arch, rows, **STORED[stored])
    assert report.instructions() <= instructions * KV
    assert vector(report) <= valu * KV
    assert bound.lds_128 <= lds * KV
    assert bound.matrix <= matrix * KV
    assert bound.limiter == limiter


@pytest.mark.parametrize(
    ("stored", "rows", "memory", "matrix"),
    [
        *(("bf16", rows, 90, 70) for rows in (16, 128)),
        *(("fp8 query", rows, 46, matrix) for rows, matrix in ((16, 7), (64, 26), (96, 39), (128, 40))),
        *(("fp8", rows, 46, matrix) for rows, matrix in ((16, 9), (64, 34))),
    ],
)
def test_a_token_costs_its_bytes(stored, rows, memory, matrix):
    """On gfx950 one more token adds its bytes, and 4 or 16 of page numbers, at 13 bytes a clock."""
    (_, short), (_, long) = (report_of("gfx950", rows, kv, **STORED[stored]) for kv in (512, 1024))
    assert (long.memory - short.memory) / 512 <= memory
    assert (long.matrix - short.matrix) / 512 <= matrix
    assert max(long.valu - short.valu, long.lds_128 - short.lds_128) <= long.memory - short.memory


def chosen(arch, instance, rows):
    """Whether it is the instance that a call of these rows gets. Those of gfx950 over fp8 caches have budgets above."""
    fewer_bits = "query-fp8" in instance and rows > MAX_BF16_P_ROWS
    return "weight-" not in instance or (arch == "gfx942" and ("weight-fp8" in instance) == fewer_bits)


@pytest.mark.parametrize(
    ("arch", "instance", "rows"),
    [
        pytest.param(arch, name, rows, marks=[] if rows in (16, 128) else pytest.mark.full)
        for arch, names in INSTANCES.items()
        for name in names
        for rows in TILES
        if chosen(arch, name, rows)
    ],
)
def test_every_instance_is_bound_by_memory_or_matrix(arch, instance, rows):
    """By exact FLOP and bytes, and on longer sequences as well: the prologue's and the stores' memory clocks fade.

    fp8 weights ask for a rescale whenever a score is a row's largest so far, which grows rarer with the sequence.
    """
    options, record = INSTANCES[arch][instance], archs.get(arch)
    report, bound = report_of(arch, rows, 4 * KV if "weight-fp8" in instance else KV, **options)
    assert report.kernel == manifest.installed().find(arch, instance.format(rows)).symbol
    assert bound.limiter in ("memory", "matrix")
    memory = report.loaded["kv_cache"] / record.memory_bytes_per_clock
    assert max(memory, bound.matrix) > max(bound.valu, bound.lds_128)


# Configurations


def test_explain_names_the_instance_alone():
    require_built("gfx942")
    args, kwargs = decode_sample((64,), heads=16, num_splits=1).make(CPU)  # no tuned row, whose file has a long name
    with mla_suite.emulate("gfx942"):
        lines = str(mla_suite.explain("decode", *args, **kwargs)).splitlines()
    point = "query='bf16', cache='bf16', rows=16, width=576, rotate=False, fp8_weights=False"
    assert f"  config: Gfx942Config({point})" in lines
    assert f"  kernels: {PLAIN_DECODE}" in lines
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
        ({"width": 320, "rows": 48}, "narrow rows are bf16, with 16, 32, 64, 128 query rows"),
        ({"rotate": True, "width": 512}, "un-rotated"),
        ({"arch": archs.get("sm_90")}, "not an AMD arch"),
        ({"cache": "fp8", "rows": 128, "fp8_weights": True}, "fp8 weights come with fp8 queries"),
        ({"query": "fp8", "cache": "fp8", "rows": 96, "fp8_weights": True}, "in tiles of more than 96 rows"),
    ],
)
def test_an_illegal_config_says_why(changed, sentence):
    point = dict(arch=archs.get("gfx942"), query="bf16", cache="bf16", rows=16, width=576, rotate=False) | changed
    with pytest.raises(ValueError, match=sentence):
        Gfx942Config(**point)
