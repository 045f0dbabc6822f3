"""Counts put together from equal sequences and steady loops are those of the whole problem, counter by counter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import counted_bounds as bounds
import pytest
import torch
from built import require_objects
from extrapolation import COUNTERS, Tile

from mla_suite.archs import gfx950
from mla_suite.bench import sets
from mla_suite.bench.sets import Case
from mla_suite.core import dispatch
from mla_suite.emulator import Report
from mla_suite.ops.sparse_decode.samples import PoolShape

FP8 = dict(kv_format="fp8", dtype=torch.float8_e4m3fn)


def uneven(lens: Sequence[int], heads: int, parts: int, **options: object) -> Case:
    case = sets.decode(1, heads, max(lens), planned=True, **options)
    return replace(case, sample=case.of(lens), lens=tuple(lens), parts=parts, facts=case.facts | {"batch": len(lens)})


CASES = {
    "equal, split, one kind": (replace(sets.decode(4, 128, 3300, planned=True), parts=4), "gfx942"),
    "equal, across parts": (replace(sets.decode(5, 16, 3200, 1, page=1, planned=True), parts=3), "gfx950"),
    "uneven, all at once": (uneven([2100, 5000, 40], 16, 2), "gfx942"),
    "two row tiles": (replace(sets.decode(4, 128, 2111, 2, planned=True), parts=2), "gfx950"),
    "indices": (replace(sets.decode(4, 16, 2600, ragged_pages=True, page=1, planned=True), parts=3), "gfx942"),
    "fp8 weights": (replace(sets.decode(4, 32, 2700, 4, page=1, planned=True, **FP8), parts=3), "gfx950"),
    "fp8 cache": (replace(sets.decode(4, 16, 2700, kv_format="fp8", planned=True), parts=3), "gfx950"),
    "v32": (sets.sparse(3, 16, 2, [PoolShape("v32", 12, 64, 700)]), "gfx942"),
    "two pools": (sets.sparse(2, 64, 1, [PoolShape("dsv4", 4, 64, n) for n in (100, 130)], sink=True), "gfx950"),
}
"""And the arch whose kernels are counted."""


@pytest.fixture(autouse=True)
def _fp8_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans have fp8 weights at any length: work tiles that are long enough for them take long to emulate whole."""
    monkeypatch.setattr(gfx950, "MAX_BF16_P_KEYS", 0)
    dispatch.clear_caches()
    yield
    dispatch.clear_caches()


@pytest.mark.parametrize("name", CASES)
def test_every_counter_is_that_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_objects()
    case, arch = CASES[name]
    seen: list[list[Report]] = []
    honest = bounds.clocks

    def clocks(reports: list[Report], record: object) -> dict[str, float]:
        seen.append(list(reports))
        return honest(reports, record)

    monkeypatch.setattr(bounds, "clocks", clocks)
    results = []
    for limit in (10**18, 0):
        monkeypatch.setattr(bounds, "WHOLE_FLOPS", limit)
        results.append(bounds.count(case, arch))
    assert [result.failure for result in results] == ["", ""]
    whole, made = seen
    assert [report.kernel for report in made] == [report.kernel for report in whole]
    assert ("fp8_weights=True" in results[0].config) is (name == "fp8 weights")
    of_whole, of_made = ([report.instructions() for report in reports] for reports in (whole, made))
    if name == "fp8 weights":  # decode's new largest scores are left out of the periods
        assert 0.9 * of_whole[0] < of_made[0] <= of_whole[0]
        assert of_made[1:] == of_whole[1:]
        return
    if case.op == "sparse_decode":  # an index that selects nothing costs a branch, and sequences draw their own
        assert of_made[0] == pytest.approx(of_whole[0], rel=0.01)
        assert of_made[1:] == pytest.approx(of_whole[1:], rel=0.02), "a combine reads no split that weighs nothing"
        assert results[1].clocks["matrix"] == results[0].clocks["matrix"]
        return
    for mine, theirs in zip(made, whole, strict=True):
        for counter in set(COUNTERS) - {"loaded", "stored"}:
            assert (getattr(mine, counter) == getattr(theirs, counter)).all(), (mine.kernel, counter)
    assert results[0].clocks == results[1].clocks
    assert results[0].instructions == results[1].instructions


def test_long_tiles_lose_whole_periods_and_short_ones_nothing() -> None:
    for keys in (0, 1, 1023, 1535, 1536, 2047, 5000):
        tile = Tile(keys, partial=False, last=True)
        assert tile.shortened + 512 * tile.periods == keys
        assert tile.shortened == keys if keys < 1536 else 1024 <= tile.shortened < 1536
