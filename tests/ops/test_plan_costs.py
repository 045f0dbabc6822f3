"""Plans that an arch makes with its own costs, and decode's own splits on sm_90."""

import random

import pytest
import torch
from plan_checks import check, make

from mla_suite import archs as arch
from mla_suite.archs.plan import PlanConfig
from mla_suite.archs.sm_90 import PLAN_WAVES, costs, tile
from mla_suite.ops.plan import dealing, reference
from mla_suite.ops.plan.scheduler import TILE_COST, SchedulerCosts, balanced_splits, round_up, scheduler_costs

SM_90 = arch.get("sm_90")


def test_the_figures_of_an_arch():
    """One workgroup merges, unless the arch is sm_90: there a row of partials counts by the time of decode's stages; or
    tiles have more than 80 rows on CDNA, where it counts by memory's."""
    for name in ("gfx942", "gfx950"):
        for rows in (16, 48, 80):
            found = scheduler_costs(arch.get(name), rows)
            assert found == scheduler_costs(None, rows) == (TILE_COST + rows, rows, 0, 0)
    assert scheduler_costs(None, 500) == (TILE_COST + 128, 128, 0, 0)
    assert scheduler_costs(SM_90, 16) == scheduler_costs(SM_90, 24) == (TILE_COST, 0, 1, costs.MAX_DEALT)
    assert scheduler_costs(SM_90, 128) == (TILE_COST, 0, 6, costs.MAX_DEALT)
    assert scheduler_costs(SM_90, 10**12) == scheduler_costs(SM_90, 2**16)
    partial_us = 2 * costs.ROWS_PER_KEY * 2048 / 4.3e6  # bytes a us, each way
    of_cta = costs.CTA_COSTS["tma"]
    assert of_cta.stage <= partial_us * tile.BLOCK_N <= of_cta.stage + of_cta.busy_stage


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("rows", [96, 128, 200, 256, 10**12])
def test_a_partial_on_cdna_counts_as_the_keys_of_its_bytes(name, rows):
    """Of a sequence's rows among all compute units; of its tile's, beside the results it stands for, in one."""
    found = arch.get(name)
    tile, partial_rows, partial, dealt = scheduler_costs(found, rows)
    held = -(-rows // -(-rows // 128))
    key_bytes = 576 * 2
    of_all = min(rows, 2**16) * (512 * 4 * 2 + 576 * 2)  # written, read, and the queries
    assert (tile, dealt) == (TILE_COST + held, 0)
    assert abs(2 * partial_rows * key_bytes - held * 512 * (4 - 2)) <= key_bytes
    assert abs(partial * key_bytes * found.compute_units - of_all) <= key_bytes * found.compute_units / 2


CDNA_SPLITS = [
    (1, 8192, 40, 70),
    (1, 1024, 8, 8),
    (1, 256, 1, 1),
    (16, 256, 1, 1),  # halves would save 128 keys of 512 and cost about as many
    (16, 2048, 4, 8),
    (128, 2048, 2, 2),
    (300, 512, 1, 1),
]


@pytest.mark.parametrize(
    ("name", "num_sm_parts", "rows", "batch", "length", "low", "high"),
    [
        *((name, None, 128, *row) for name in ("gfx942", "gfx950") for row in CDNA_SPLITS),
        ("sm_90", 66, 128, 1, 8192, 32, 48),  # decode's own splits there are 32
        ("sm_90", 66, 128, 1, 1024, 12, 16),
        ("sm_90", 132, 16, 1, 8192, 43, 132),
        ("sm_90", 66, 128, 32, 3200, 2, 2),
        ("sm_90", 66, 128, 32, 512, 1, 1),
        ("sm_90", 66, 128, 128, 512, 1, 1),  # two whole sequences an SM part: no split is worth 128 partials
        ("sm_90", 66, 128, 128, 6144, 1, 1),
        ("sm_90", 66, 128, 64, 16384, 1, 1),
        ("sm_90", 132, 16, 128, 4096, 1, 1),
        (None, 66, 128, 128, 6144, 1, 1),  # two whole sequences an SM part; a split would win 1 of 202 and add a merge
        (None, 132, 128, 32, 512, 1, 1),  # halves would cost two prologues and a merge
        (None, 132, 16, 128, 4096, 1, 1),
        (None, 132, 128, 1, 1024, 1, 1),
        (None, 304, 128, 1, 1, 1, 1),
    ],
)
def test_splits_of_equal_sequences(monkeypatch, name, num_sm_parts, rows, batch, length, low, high):
    monkeypatch.setattr(reference, "current_arch", lambda tensor: name and arch.get(name))
    parts = num_sm_parts or arch.get(name).compute_units
    read = check(make([length] * batch, rows=rows, num_sm_parts=parts), batch, parts, most=batch + parts)
    assert all(low <= len(splits) <= high for splits in read.splits())


def test_a_thread_for_each_sequence_that_is_dealt():
    """csrc/common/plan_dealing.hpp relies on it."""
    config = PlanConfig(SM_90, PLAN_WAVES)
    for step in ("search", "balanced"):
        assert all(config.threads(step, batch) >= batch for batch in range(1, costs.MAX_DEALT + 1))


def test_a_plan_in_order_costs_no_more_than_its_bound():
    """The bound by which csrc/common/plan_dealing.hpp gives up candidates, also for other costs of a tile."""
    draw = random.Random(0)
    for _ in range(200):
        figures = SchedulerCosts(draw.choice((128, 1, 7, 64, 100, 500)), 0, draw.choice((0, 1, 6)))
        longest = draw.choice((1, 64, 130, 300, 1000, 5000, 10**6))
        lens = torch.tensor([draw.randint(0, longest) for _ in range(draw.choice((1, 2, 3, 40, 200)))])
        parts = draw.choice((16, 17, 66, 132, 200))
        total = int((round_up(lens) + figures.tile).sum())
        beyond = 2 * (figures.tile + round_up(figures.tile // 2) + 33)
        partials = parts - 1 + min(len(lens), parts - 1)
        _, cost = balanced_splits(lens, figures, parts)
        assert cost <= -(-total // parts) + beyond + figures.partial * partials


@pytest.mark.parametrize("num_sm_parts", [16, 33, 66, 132])
def test_equal_sequences_that_are_not_split_are_never_dealt(num_sm_parts):
    """csrc/common/plan_dealing.hpp does not price what it deals of these."""
    figures = scheduler_costs(SM_90, 128)
    for batch in range(num_sm_parts, 257, 7):
        lens = torch.full((batch,), 100 * batch)
        (split_indptr, *_), cost = dealing.deal(lens, figures, num_sm_parts)
        if split_indptr[-1] == 0:
            assert cost >= balanced_splits(lens, figures, num_sm_parts)[1]
