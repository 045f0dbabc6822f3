"""Into how many pieces decode cuts sequences: by combine's table where it says so, else by a rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_suite import archs as arch
from mla_suite.core import tuning
from mla_suite.ops.combine import config as combine
from mla_suite.ops.decode.config import CdnaConfig
from mla_suite.ops.decode.hopper import HopperConfig
from mla_suite.ops.decode.prepare import SHORTEST_CUT, split_count

LONG = 1 << 20  # keys: enough for any count


def count(name: str, batch: int, rows: int, bound: int = LONG) -> int:
    record = arch.get(name)
    config: CdnaConfig | HopperConfig
    if name == "sm_90":
        config = HopperConfig(record, "bf16", 576, "tma")
    else:
        config = CdnaConfig(record, "bf16", "bf16", min(128, -(-rows // 16) * 16), 576, False)
    return split_count(config, 512, torch.bfloat16, batch, rows, bound)


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("rows", [1, 16, 128, 512])
def test_a_larger_batch_is_never_cut_into_more(name: str, rows: int) -> None:
    counts = [count(name, batch, rows) for batch in (1, 2, 3, 8, 64, 128, 500)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1


def test_a_table_decides_at_its_concurrency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ruled = count("gfx942", 8, 16)
    row = dict(head_dim_v=512, out_dtype="bf16", device_units=304, rows=16, batch=8, splits=8, rows_per_group=1, vec=4)
    row |= dict(waves=4, slices=2, num_splits=5, kind="counted", date="2026-11-21", commit="0123456")
    table = tmp_path / "combine" / "gfx942.csv"
    table.parent.mkdir()
    table.write_text(f"{','.join(combine.FORMAT.header)}\n{combine.FORMAT.line(row)}\n")
    monkeypatch.setenv("MLA_SUITE_TUNED_DIR", str(tmp_path))
    tuning.clear_cache()
    try:
        assert ruled != 5
        assert count("gfx942", 8, 16) == 5
        assert count("gfx942", 8, 16, bound=3 * SHORTEST_CUT) == 3
        assert count("gfx942", 9, 16) == 304 // 9
    finally:
        tuning.clear_cache()
