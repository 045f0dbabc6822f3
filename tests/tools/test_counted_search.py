"""combine's configurations compared by the emulator's bounds: rows for the tables, and beside the stock reduction."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import bench_reduce
import counted_search
import pytest
from built import require_built

from mla_suite import archs
from mla_suite.archs import combine as combine_config
from mla_suite.archs import combine_search
from mla_suite.bench import sets
from mla_suite.build import manifest
from mla_suite.core import dispatch, tuning

ARCH = "gfx942"


@pytest.fixture(autouse=True)
def _built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a package ships takes part: nothing is compiled."""
    require_built(ARCH, combine_config.rule(archs.get(ARCH), 512, 16, 8).instance)
    monkeypatch.setattr(combine_search, "SPACE", replace(combine_search.SPACE, build=lambda arch, progress: 0))


def test_a_bound_grows_with_the_busiest_unit() -> None:
    arch = archs.get(ARCH)
    point = combine_config.CombineConfig(arch, 512, rows=4, vec=4, waves=4, slices=1)
    one, same, two = (counted_search.bound(point, rows, 4) for rows in (4, 4 * 304, 4 * 305))
    assert one["issue"] == same["issue"] == two["issue"], "a unit has room for two such workgroups"
    assert (same["vector"], same["LDS"]) == (one["vector"], one["LDS"])
    assert two["vector"] == 2 * one["vector"]
    assert same["memory"] == pytest.approx(304 * one["memory"])
    partials_and_results = 4 * (4 * 513 * 4 + 512 * 2 + 4)
    moved = one["memory"] * arch.memory_bytes_per_s / (arch.clock_mhz * 1e6)
    assert partials_and_results <= moved <= partials_and_results + 4 * 256, "and the parameters, once for each wave"


def test_the_command_writes_the_same_counted_rows_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLA_SUITE_TUNED_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # kernels that are compiled on demand go there
    arguments = [ARCH, "--shapes", "b1-r16-s2-", "b256-r8-s2-", "--user", "--write"]
    texts = []
    try:
        for _ in range(2):
            counted_search.group_counts.cache_clear()
            assert counted_search.main([*arguments, "--commit", "0123456", "--date", "2026-11-22"]) == 0
            texts.append((tmp_path / "combine" / f"{ARCH}.csv").read_text())
        rows = tuning.load(combine_config.FORMAT, ARCH, tmp_path / "combine" / f"{ARCH}.csv")
    finally:
        manifest.forget()
        tuning.clear_cache()
        dispatch.clear_caches()
    assert texts[0] == texts[1]
    assert [(row.values["rows"], row.values["batch"], row.values["splits"]) for row in rows] == [
        (8, 256, 2),
        (16, 1, 2),
    ]
    assert {(row.provenance["kind"], row.provenance["microseconds"]) for row in rows} == {("counted", "")}
    assert "clocks" in capsys.readouterr().out


def test_a_search_that_is_interrupted_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLA_SUITE_TUNED_DIR", str(tmp_path))
    honest, left = counted_search.search, [1]

    def search(case: sets.Case, arch: archs.ArchSpec) -> counted_search.CountedOutcome:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return honest(case, arch)

    monkeypatch.setattr(counted_search, "search", search)
    assert counted_search.main([f"{ARCH},gfx950", "--shapes", "b1-r16-s2-", "b256-r8-s2-", "--user", "--write"]) == 130
    assert capsys.readouterr().err == f"stopped before the end, on {ARCH}; what was found is above\n"
    assert len(tuning.load(combine_config.FORMAT, ARCH, tmp_path / "combine" / f"{ARCH}.csv")) == 1
    assert not (tmp_path / "combine" / "gfx950.csv").exists()


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_every_published_shape_has_a_row(name: str) -> None:
    """And its kernel ships, so that the row decides."""
    arch = archs.get(name)
    for case in sets.named("aiter-3468"):
        problem = counted_search.problem_of(case)
        facts = combine_config.table_key(problem, arch)
        match = tuning.find(combine_config.FORMAT, name, facts)
        assert match is not None
        assert match.differing == (), case.id
        assert match.row.provenance["kind"] == "counted"
        named = combine_config.config_of_row(arch, match.row.values)
        assert named.instance in manifest.built(name), f"{named.instance}: run `python -m mla_suite build`"


def test_beside_the_stock_reduction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU: clocks of bytes and no time; ours loads the bytes that it must, and little beside them."""
    table = tmp_path / "reduce.csv"
    bench_reduce.main(["--shapes", "b1-r16-s16-", "--arch", "gfx950", "--csv", str(table)])
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["runner"] for row in rows] == [f"gfx950 {name} bytes" for name in ("stock", "stock_uniform", "ours")]
    assert {row["unit"] for row in rows} == {"clocks"}
    assert {row["gb_per_s"] for row in rows} == {""}
    assert [int(row["partial_tiles"]) for row in rows[1:]] == [16, 16]
    assert 1 <= int(rows[0]["partial_tiles"]) <= 256
    _, least, ours = (float(row["latency"]) for row in rows)
    assert 0 < least <= ours < 1.1 * least
    assert "which is faster needs a GPU" in capsys.readouterr().out
