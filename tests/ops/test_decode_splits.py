"""Split counts of decode: never more for a larger batch, and one where there is nothing to merge."""

from __future__ import annotations

import csv
from pathlib import Path

import count_crossovers
import pytest
import torch
from bench_reduce import KEYS_PER_SPLIT
from built import require_built

from mla_suite import archs
from mla_suite.archs import gfx942, gfx950
from mla_suite.archs.attention import decode_shape
from mla_suite.archs.cdna import splits as cdna_splits
from mla_suite.archs.cdna.splits import default_splits
from mla_suite.archs.sm_90.decode import Sm90Config
from mla_suite.archs.sm_90.decode_splits import split_count
from mla_suite.emulator import timing
from mla_suite.ops.decode import DecodeArgs
from mla_suite.ops.plan.scheduler import SPLIT_ALIGNMENT

LONG = 1 << 20  # keys: enough for any count
BF16 = ("16bit", "16bit")
CONFIGS = {"gfx942": gfx942.Gfx942Config, "gfx950": gfx950.Gfx950Config}
REDUCTIONS = Path(__file__).parents[2] / "benchmarks" / "results" / "reduce" / "h200.csv"


def count(name: str, batch: int, rows: int, bound: int = LONG) -> int:
    record, meta = archs.get(name), torch.device("meta")
    q = torch.empty(batch, 1, rows, 576, dtype=torch.bfloat16, device=meta)
    cache = torch.empty(4, 64, 576, dtype=torch.bfloat16, device=meta)
    lens, table = (torch.empty(*shape, dtype=torch.int32, device=meta) for shape in ((batch,), (batch, 4)))
    args = DecodeArgs(q, cache, lens, table, softmax_scale=1.0, max_seqlen_kv=bound)
    shape = decode_shape(args, torch.empty(batch, 1, rows, 512, dtype=torch.bfloat16, device=meta))
    if name == "sm_90":
        return split_count(Sm90Config(record, "bf16", 576, "tma"), shape)
    config = CONFIGS[name](record, "bf16", "bf16", min(128, -(-rows // 16) * 16), 576, False)
    return config.default_splits(shape.rows, shape.batch, shape.keys)


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("rows", [1, 16, 128, 512])
def test_a_larger_batch_is_never_split_more(name, rows):
    counts = [count(name, batch, rows) for batch in (1, 2, 3, 8, 64, 128, 500)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_splits_fill_the_device_once_with_64_keys_at_least(name, rows):
    arch, costs, found = archs.get(name), CONFIGS[name].costs, set[int]()
    for batch in (1, 2, 3, 8, 50, 128, 400):
        for keys in (1, 64, 100, 256, 1000, 4096, 100_000):
            splits = default_splits(costs, arch, BF16, rows, 1, batch, keys)
            found.add(splits)
            assert splits == 1 or (splits * batch <= arch.compute_units and (splits - 1) * SPLIT_ALIGNMENT < keys)
            # Twice the tiles of a sequence are as many workgroups as twice the sequences, and share their keys.
            shared = default_splits(costs, arch, BF16, rows, 2, batch, keys)
            assert shared >= default_splits(costs, arch, BF16, rows, 1, 2 * batch, keys)
    assert 1 in found
    assert max(found) > 64


@pytest.mark.parametrize(
    ("name", "rows", "batch", "keys", "splits"),
    [
        ("gfx942", 128, 1, 1024, 16),  # of 64 keys: a loop of 266 clocks a key is shortened at once
        ("gfx942", 128, 16, 1024, 8),  # partials of 128 rows cost as much as 20 keys each
        ("gfx942", 16, 1, 1024, 16),
        ("gfx942", 16, 16, 1024, 4),  # 64 workgroups saturate memory
        ("gfx942", 16, 1, 256, 1),  # a combine costs more than 192 keys of 16 rows
        ("gfx942", 128, 1, 256, 4),
        ("gfx950", 128, 1, 256, 4),
        ("gfx942", 128, 8, 1 << 15, 37),  # 38 would fill the device, with as many keys in the longest
        ("gfx950", 16, 8, 1200, 10),  # a multiple of 64 keys: 11 to 18 would have the same 128 in the longest
        ("gfx950", 16, 64, 512, 1),
        ("gfx942", 128, 1, 1200, 19),  # 18 of 64 keys and one of 48: 18 in all would have 128 in the longest
    ],
)
def test_the_cheapest_splits_of_the_model(name, rows, batch, keys, splits):
    assert default_splits(CONFIGS[name].costs, archs.get(name), BF16, rows, 1, batch, keys) == splits


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_costs_are_those_of_the_model_of_time(name):
    """A fit that moves them asks for splits and tiles that are chosen again."""
    arch, cost = archs.get(name), CONFIGS[name].costs
    assert cost.unit_bytes == timing.UNITS[name].memory_rate
    sustained = arch.memory_bytes_per_clock * arch.compute_units * timing.CHIP.memory_share
    assert cost.chip_bytes == pytest.approx(sustained, rel=1e-3)
    assert cdna_splits.REREAD == timing.REREAD
    assert timing.CHIP.matrix_clock == cdna_splits.LOWEST_CLOCK


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kind", [("16bit", "16bit"), ("fp8", "fp8")], ids="-".join)
def test_clocks_of_a_key_are_those_of_a_played_workgroup(name, kind):
    """With memory for itself: what the emulator's waves take longer for 512 keys more, at 16, 64 and 128 rows."""
    cost = CONFIGS[name].costs
    require_built(name, "decode_fp8_query-fp8_weight-bf16_rows-16")
    for rows in (16, 64, 128):
        played, _ = count_crossovers.workgroup(name, kind, rows)
        key = (played[-1] - played[-2]) / (count_crossovers.LENGTHS[-1] - count_crossovers.LENGTHS[-2])
        size = cdna_splits.LOOP_ROWS.index(rows)
        alone = max(cost.loop[kind][size], 576 * cdna_splits.value_bytes(kind[1]) / cost.unit_bytes)
        assert key == pytest.approx(alone, rel=0.05)


def test_a_key_takes_longer_on_a_busy_chip():
    """Of 128 rows the clock falls with the load of all matrix units; 16 rows wait for memory, a third of it where eight
    row tiles read the same keys."""
    arch, cost = archs.get("gfx942"), gfx942.Gfx942Config.costs
    few, many = (cost.key_clocks(arch, BF16, 128, 1, workgroups) for workgroups in (1, 304))
    assert many / few == pytest.approx(1 / (1 - 0.4 * 136 / 187.4), rel=0.05)
    alone, shared = (cost.key_clocks(arch, BF16, 16, tiles, 304) for tiles in (1, 8))
    assert alone == pytest.approx(1152 / (2122 / 304), rel=0.05)
    assert shared == pytest.approx(alone * (1 + 7 * 5.3 / 17.2) / 8, rel=0.05)


@pytest.mark.parametrize(("name", "config"), [("gfx942", gfx942.SparseConfig), ("gfx950", gfx950.SparseConfig)])
def test_selected_keys_of_few_workgroups_are_split_finer(name, config):
    """64 keys in a split of up to four workgroups, else 128, and the device once at most."""
    arch = archs.get(name)
    kernel = config(arch, "v32", 16)
    assert [kernel.default_splits(groups, 2048) for groups in (1, 4, 5, 16)] == [32, 32, 16, 16]
    assert kernel.default_splits(40, 2048) == arch.compute_units // 40
    assert [kernel.default_splits(1, keys) for keys in (0, 63, 130)] == [1, 1, 2]


def test_shapes_that_the_planner_leaves_whole_are_not_split():
    """Where the stock reduction of the saved run has nothing to merge, decode has nothing to merge either."""
    with REDUCTIONS.open(newline="") as file:
        planned = [row for row in csv.DictReader(file) if row["runner"] == "stock"]
    whole = [
        [int(row[name]) for name in ("tokens", "heads", "splits")] for row in planned if row["partial_tiles"] == "0"
    ]
    assert len(whole) == 10
    assert {count("sm_90", tokens, heads, splits * KEYS_PER_SPLIT) for tokens, heads, splits in whole} == {1}
