"""AITER's published results for 32 heads and 4 query tokens: the pairs of times, and the accuracy required of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import bench_aiter_3003
import pytest
import torch
from built import require_objects

from mla_suite.bench import sets, timer
from mla_suite.bench.measure import Measured

LONG = [pytest.param(4, ctx, marks=pytest.mark.full) for ctx in (8192, 16384)]


def test_every_published_shape_is_a_case_of_the_set_and_has_a_source():
    cases = {(case.facts["batch"], case.facts["kv_len"]) for case in sets.named("aiter-3003")}
    assert set(bench_aiter_3003.pairs()) == cases
    assert len(cases) == 64
    assert {pair.source for pair in bench_aiter_3003.pairs().values()} == {"https://github.com/ROCm/aiter/pull/3003"}
    assert bench_aiter_3003.pairs()[1, 21][:2] == (61.441, 31.520)
    assert bench_aiter_3003.pairs()[256, 8192][:2] == (383.963, 1981.220)


def measured(case: sets.Case, us: float) -> Measured:
    return Measured(case, "native", rounds=(us,) * 4)


def test_the_table_has_ours_beside_the_published_times(monkeypatch, tmp_path):
    def one(case: sets.Case, *rest: object, **options: object) -> Iterator[Measured]:
        yield measured(case, 30.0)

    monkeypatch.setattr(bench_aiter_3003, "measure", one)
    table = tmp_path / "table.csv"
    assert bench_aiter_3003.main(["--csv", str(table)]) == 0
    lines = table.read_text().splitlines()
    assert lines[0] == ",".join(bench_aiter_3003.HEADER)
    assert len(lines) == 65
    assert lines[1] == "1,21,b1-h32-q4-kv21-p1-fp8-plan,native,61.441,31.52,30,51.173"


def test_other_problems_have_no_published_times():
    for case in (sets.decode(1, 32, 21, 4), *sets.named("aiter-3003", batches=(1,), contexts=(21,), heads=16)):
        row = bench_aiter_3003.row_of(measured(case, 1.0))
        assert (row["asm_us"], row["hk_us"], row["gain_percent"]) == ("", "", "")
        assert row["ours_us"] == 1.0


def test_the_seeds_options_are_honoured(tmp_path, capsys, monkeypatch):
    """The command of the pull request's own benchmark, at one shape; every call of the operator is counted."""
    honest, calls = timer.cpu_rounds, []

    def counted(call: Callable[[], object], effort: timer.Effort) -> list[float]:
        return honest(lambda: calls.append(call()), effort)

    monkeypatch.setattr(timer, "cpu_rounds", counted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    grid = ["--batch-sizes", "1", "--ctx-lens", "8", "--nhead", "32", "--decode-qlen", "4", "--page-sizes", "1"]
    table = tmp_path / "table.csv"
    repeats = ["--warmup", "20", "--iters", "100", "--rounds", "1", "--csv", str(table)]
    assert bench_aiter_3003.main([*grid, *repeats]) == 0
    assert len(calls) == 1 + 20 + 100
    assert table.read_text().splitlines()[1].startswith("1,8,b1-h32-q4-kv8-p1-fp8-plan,reference,,,")
    assert "b1-h32-q4-kv8-p1-fp8-plan" in capsys.readouterr().out


def test_sizes_of_the_grid_can_be_chosen():
    cases = sets.named("aiter-3003", batches=(2,), contexts=(8, 9), heads=16, q_len=2, pages=(1, 64))
    assert [case.shape for case in cases] == [f"b2-h16-q2-kv{kv}-p{page}-fp8-plan" for page in (1, 64) for kv in (8, 9)]
    with pytest.raises(ValueError, match="set 'v4' has fixed shapes, of which --shapes picks"):
        sets.named("v4", batches=(1,))


@pytest.mark.parametrize(("batch", "ctx"), [(1, 512), (2, 2048), *LONG])
def test_accuracy_is_as_published(batch, ctx):
    require_objects()
    found = list(bench_aiter_3003.accuracy(batch, ctx, torch.device("cpu")))
    assert [row.plan for row in found] == [False, True]
    for row in found:
        assert row.published < 2e-4
        assert row.holds, row


@pytest.mark.parametrize(("batch", "ctx"), [(1, 512), pytest.param(2, 2048, marks=pytest.mark.full), *LONG])
def test_accuracy_at_the_smaller_softmax_scale_is_as_published(batch, ctx):
    """At 1/sqrt(576) scores are closer together and rounding matters more; short work tiles keep bf16 weights."""
    require_objects()
    for row in bench_aiter_3003.accuracy(batch, ctx, torch.device("cpu"), 576**-0.5):
        assert row.holds, row
        if row.plan or ctx <= 2048:
            assert row.distance < 1e-5


def test_a_result_that_is_not_finite_never_holds():
    for published in (1e-4, math.inf):
        for distance in (math.nan, math.inf):
            assert not bench_aiter_3003.Accuracy(1, 512, False, distance, published).holds


def test_shapes_of_the_accuracy_can_be_chosen(tmp_path):
    require_objects()
    table = tmp_path / "lines.csv"
    assert bench_aiter_3003.main(["--accuracy", "--batch-sizes", "1", "--ctx-lens", "8,9", "--csv", str(table)]) == 0
    rows = [line.split(",") for line in table.read_text().splitlines()[1:]]
    assert [(row[:3], *row[-2:]) for row in rows] == [
        (["1", ctx, plan], "inf", "True") for ctx in ("8", "9") for plan in ("False", "True")
    ]


def test_a_distance_that_is_larger_than_published_is_the_exit_status(monkeypatch):
    found = bench_aiter_3003.Accuracy(1, 512, False, 2e-4, 1.35e-4)
    monkeypatch.setattr(bench_aiter_3003, "accuracy", lambda *problem: iter([found]))
    assert bench_aiter_3003.main(["--accuracy"]) == 1
