"""`python -m mla_suite bench` from end to end on the CPU, and what its exit code means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from saved_figures import saved

from mla_suite.__main__ import main
from mla_suite.bench import sets
from mla_suite.bench.measure import Measured
from mla_suite.cli import bench

CPU = ["bench", "--device", "cpu"]


def test_decode_is_checked_against_fp64_and_planned_as_asked(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    assert main([*CPU, "--op", "decode", "--plan", "both", "--rounds", "2", "--csv", str(path)]) == 0
    rows = saved(path)
    assert [row["shape"].endswith("-plan") for row in rows] == [True, False] * len(sets.named("quick", "decode"))
    for row in rows:
        assert (row["backend"], row["failure"]) == ("reference", "")
        assert 0 < float(row["error"]) < 5e-3
        assert float(row["gb_per_s"]) == pytest.approx(float(row["bytes"]) / float(row["us"]) / 1e3, rel=1e-3)
    assert "# arch: cpu" in path.read_text()
    printed = capsys.readouterr()
    assert "No GPU: these are times of the reference on the CPU" in printed.out
    for row in rows:
        assert f"decode-{row['shape']} reference" in printed.out
        assert f" s  decode-{row['shape']}"[:64] in printed.err, "progress, a line for each shape"


@pytest.mark.parametrize(
    ("found", "code"), [(dict(failure="takes 64 heads"), 0), (dict(failure="[off]", wrong=True), 1)]
)
@pytest.mark.parametrize("timed", [True, False])
def test_a_wrong_result_fails_the_run_and_a_refusal_does_not_beside_times(found, code, timed, monkeypatch, capsys):
    def one(case: sets.Case, *rest: object, **options: object) -> Iterator[Measured]:
        yield replace(Measured(case, "native"), **found)
        if timed:
            yield Measured(case, "reference")

    monkeypatch.setattr(bench, "measure", one)
    shapes = len(sets.named("quick", "decode"))
    assert main([*CPU, "--op", "decode"]) == (code if timed else 1)
    printed = capsys.readouterr()
    more = f"not timed, decode-b2-h16-q1-kv64-p64-bf16 and {shapes - 1} more: native: takes 64 heads"
    assert (more in printed.out) is not code
    assert printed.out.count("WRONG: [off]") == shapes * code
    assert (f"{shapes} results are wrong" in printed.err) == bool(code)
    assert ("bench: nothing was timed" in printed.err) == (not timed and not code)


def test_list_names_every_set_and_its_source(capsys):
    assert main(["bench", "--list"]) == 0
    assert "aiter-3003: 64 shapes. AITER pull request 3003" in capsys.readouterr().out
