"""Plans that an arch makes with its own costs, and decode's own splits on sm_90."""

from __future__ import annotations

import pytest
from plan_checks import check, make

from mla_suite import archs as arch
from mla_suite.archs.sm_90 import costs, tile
from mla_suite.ops.plan import reference
from mla_suite.ops.plan.scheduler import TILE_COST, scheduler_costs

SM_90 = arch.get("sm_90")


@pytest.fixture
def on_sm_90(monkeypatch):
    """The definition as it plans for that arch."""
    monkeypatch.setattr(reference, "current_arch", lambda tensor: SM_90)


def test_the_figures_of_an_arch():
    """One workgroup merges, unless the arch is sm_90: there a row of partials counts by the time of decode's stages."""
    for name in ("gfx942", "gfx950"):
        assert scheduler_costs(arch.get(name), 48) == scheduler_costs(None, 48) == (TILE_COST + 48, 48, 0, 0)
    assert scheduler_costs(None, 500) == (TILE_COST + 128, 128, 0, 0)
    assert scheduler_costs(SM_90, 16) == scheduler_costs(SM_90, 24) == (TILE_COST, 0, 1, costs.MAX_DEALT)
    assert scheduler_costs(SM_90, 128) == (TILE_COST, 0, 6, costs.MAX_DEALT)
    assert scheduler_costs(SM_90, 10**12) == scheduler_costs(SM_90, 2**16)
    partial_us = 2 * costs.ROWS_PER_KEY * 2048 / 4.3e6  # bytes a us, each way
    assert costs.FITTED.stage <= partial_us * tile.BLOCK_N <= costs.FITTED.stage + costs.FITTED.busy_stage


@pytest.mark.parametrize(
    ("batch", "length", "rows", "num_sm_parts", "low", "high"),
    [
        (1, 8192, 128, 66, 32, 48),  # decode's own splits there are 32
        (1, 1024, 128, 66, 12, 16),
        (1, 8192, 16, 132, 43, 132),
        (32, 3200, 128, 66, 2, 2),
        (32, 512, 128, 66, 1, 1),
        (128, 512, 128, 66, 1, 1),  # two whole sequences an SM part: no split is worth 128 partials
        (128, 6144, 128, 66, 1, 1),
        (64, 16384, 128, 66, 1, 1),
        (128, 4096, 16, 132, 1, 1),
    ],
)
def test_splits_on_sm_90(on_sm_90, batch, length, rows, num_sm_parts, low, high):
    read = check(
        make([length] * batch, rows=rows, num_sm_parts=num_sm_parts), batch, num_sm_parts, most=batch + num_sm_parts
    )
    assert all(low <= len(splits) <= high for splits in read.splits())
