"""Split counts of decode: never more for a larger batch, and one where there is nothing to merge."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from bench_reduce import KEYS_PER_SPLIT

from mla_suite import archs
from mla_suite.archs.attention import decode_shape
from mla_suite.archs.cdna.decode import CdnaConfig, default_splits
from mla_suite.archs.sm_90.decode import Sm90Config, split_count
from mla_suite.ops.decode import DecodeArgs

LONG = 1 << 20  # keys: enough for any count
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
    config = CdnaConfig(record, "bf16", "bf16", min(128, -(-rows // 16) * 16), 576, False)
    return default_splits(record, config.tiles(rows), shape)


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("rows", [1, 16, 128, 512])
def test_a_larger_batch_is_never_split_more(name: str, rows: int) -> None:
    counts = [count(name, batch, rows) for batch in (1, 2, 3, 8, 64, 128, 500)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1


def test_shapes_that_the_planner_leaves_whole_are_not_split() -> None:
    """Where the stock reduction of the saved run has nothing to merge, decode has nothing to merge either."""
    with REDUCTIONS.open(newline="") as file:
        planned = [row for row in csv.DictReader(file) if row["runner"] == "stock"]
    whole = [
        [int(row[name]) for name in ("tokens", "heads", "splits")] for row in planned if row["partial_tiles"] == "0"
    ]
    assert len(whole) == 10
    assert {count("sm_90", tokens, heads, splits * KEYS_PER_SPLIT) for tokens, heads, splits in whole} == {1}
