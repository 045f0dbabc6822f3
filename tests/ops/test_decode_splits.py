"""Split counts of decode: never more for a larger batch, and those of a tuned table where it has the shape."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from bench_reduce import KEYS_PER_SPLIT

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import decode_table
from mla_suite.archs.attention import MIN_SPLIT, decode_shape, default_splits
from mla_suite.archs.cdna.decode import CdnaConfig
from mla_suite.archs.sm_90.decode import Sm90Config, split_count
from mla_suite.build import manifest
from mla_suite.core import dispatch, tuning
from mla_suite.ops.decode import DecodeArgs
from mla_suite.ops.decode.samples import decode_sample

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
        return split_count(Sm90Config(record, "bf16", 576, "tma"), args, shape)
    config = CdnaConfig(record, "bf16", "bf16", min(128, -(-rows // 16) * 16), 576, False)
    return default_splits(record, config.tiles(rows), args, shape)


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


def write_row(name: str, num_splits: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's table with one row, for 16 query rows and up to 8 sequences; the caller clears the cache of tables."""
    row = dict(policy="default", shape="any", query="16bit", cache="16bit", rows=16, batch=8, context=LONG, use="any")
    row |= dict(num_splits=num_splits, kind="counted", date="2026-11-21", commit="0123456")
    table = folder / "decode" / f"{name}.csv"
    table.parent.mkdir()
    table.write_text(f"{','.join(decode_table.FORMAT.header)}\n{decode_table.FORMAT.line(row)}\n")
    monkeypatch.setenv("MLA_SUITE_TUNED_DIR", str(folder))
    tuning.clear_cache()


@pytest.mark.parametrize("name", ["gfx942", "sm_90"])
def test_a_table_decides_up_to_its_limits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ruled, beyond = count(name, 8, 16), count(name, 9, 16)
    write_row(name, 5, tmp_path, monkeypatch)
    try:
        assert ruled != 5
        assert count(name, 8, 16) == 5
        assert count(name, 8, 16, bound=3 * MIN_SPLIT) == 3
        assert count(name, 9, 16) == beyond
    finally:
        tuning.clear_cache()


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_a_row_changes_the_partials_that_a_call_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through dispatch, in the emulator: decode stores as many partial results as the row says, and combine merges
    them to the same result."""
    if not manifest.is_built(name, CdnaConfig(archs.get(name), "bf16", "bf16", 16, 576, False).instance):
        pytest.skip(f"decode is not built for {name}; run `python -m mla_suite build`")
    args, kwargs = decode_sample((1024,), heads=16).make(torch.device("cpu"))

    def stored() -> tuple[int, torch.Tensor]:
        with mla_suite.emulate(name), emulator.configured(collect=True) as reports:
            out, _ = torch.ops.mla_suite.decode(*args, **kwargs)
        assert not any(report.findings for report in reports)
        return reports[0].stored["partial_out"] // (16 * 512 * 4), out

    ruled, expected = stored()
    write_row(name, 3, tmp_path, monkeypatch)
    dispatch.clear_caches()
    try:
        splits, out = stored()
    finally:
        tuning.clear_cache()
        dispatch.clear_caches()
    assert (ruled, splits) == (4, 3)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
