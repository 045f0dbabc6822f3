"""AITER's published results for 32 heads and 4 query tokens: the pairs of times, and the accuracy required of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import check_h32_q4
import pytest
import runs
import torch

from mla_suite.__main__ import main
from mla_suite.bench import clock, published, record, sets
from mla_suite.bench.record import Result
from mla_suite.build import manifest

ROOT = Path(__file__).parents[2]
LONG = [pytest.param(4, ctx, marks=pytest.mark.full) for ctx in (8192, 16384)]


def saved(path: Path, us: float) -> Path:
    report = runs.report(0)
    report.results = [
        Result(case.op, case.shape, "native", dict(case.facts), 1, 1, rounds=[us] * 4, checked="fp64")
        for case in sets.named("aiter-3003")
    ]
    report.save(path)
    return path


def test_every_published_shape_is_a_case_of_the_set_and_has_a_source() -> None:
    cases = {(case.facts["batch"], case.facts["kv_len"]) for case in sets.named("aiter-3003")}
    assert set(published.pairs()) == cases
    assert len(cases) == 64
    assert {pair.source for pair in published.pairs().values()} == {"https://github.com/ROCm/aiter/pull/3003"}
    assert published.pairs()[1, 21][:2] == (61.441, 31.520)
    assert published.pairs()[256, 8192][:2] == (383.963, 1981.220)


def test_the_table_has_ours_beside_the_published_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, table = saved(tmp_path / "run.json", 30.0), tmp_path / "table.csv"
    assert main(["bench", "--load", str(run), "--csv", str(table)]) == 0
    lines = table.read_text().splitlines()
    assert lines[0] == "batch,ctx,asm_us,hk_us,ours_us,gain_percent"
    assert len(lines) == 65
    assert lines[1] == "1,21,61.441,31.520,30.000,51.17"
    printed = " ".join(capsys.readouterr().out.split())
    assert "As published for AITER on an MI355X" in printed


def test_other_problems_have_no_published_times() -> None:
    found = record.Report(dict(runs.GPU), "", [], [Result("decode", sets.decode(1, 32, 21, 4).shape, "native",
                          dict(batch=1, heads=32, q_len=4, kv_len=21), 1, 1, rounds=[1.0])])  # fmt: skip
    assert list(published.rows(found)) == []


def test_the_seeds_options_are_honoured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of the pull request's own benchmark, at one shape; every call of the operator is counted."""
    honest, calls = clock.cpu_rounds, []

    def counted(call: Callable[[], object], effort: clock.Effort) -> list[float]:
        return honest(lambda: calls.append(call()), effort)

    monkeypatch.setattr(clock, "cpu_rounds", counted)
    grid = ["--batch-sizes", "1", "--ctx-lens", "8", "--nhead", "32", "--decode-qlen", "4", "--page-sizes", "1"]
    repeats = ["--warmup", "20", "--iters", "100", "--rounds", "1", "--passes", "1", "--no-emulator"]
    table = tmp_path / "table.csv"
    assert main(["bench", "--device", "cpu", "--set", "aiter-3003", *grid, *repeats, "--csv", str(table)]) == 0
    assert len(calls) == 1 + 20 + 100
    assert table.exists()
    assert "b1-h32-q4-kv8-p1-fp8-plan" in capsys.readouterr().out


def test_sizes_of_the_grid_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    cases = sets.named("aiter-3003", batches=(2,), contexts=(8, 9), heads=16, q_len=2, pages=(1, 64))
    assert [case.shape for case in cases] == [f"b2-h16-q2-kv{kv}-p{page}-fp8-plan" for page in (1, 64) for kv in (8, 9)]
    arguments = ["bench", "--device", "cpu", "--set", "aiter-3003", "--batch-sizes", "1", "--ctx-lens", "8,16"]
    assert main([*arguments, "--rounds", "1", "--passes", "1", "--no-emulator"]) == 0
    assert "b1-h32-q4-kv16-p1-fp8-plan" in capsys.readouterr().out
    assert main(["bench", "--set", "v4", "--batch-sizes", "1", "--device", "cpu"]) == 2
    assert "set 'v4' has fixed shapes, of which --shapes picks" in capsys.readouterr().err


@pytest.mark.parametrize(("batch", "ctx"), [(1, 512), (2, 2048), *LONG])
def test_accuracy_is_as_published(batch: int, ctx: int) -> None:
    if isinstance(manifest.locate(), str):
        pytest.skip("the package's own kernels are not built: run `python -m mla_suite build`")
    found = list(check_h32_q4.lines(batch, ctx, torch.device("cpu")))
    assert [line.planned for line in found] == [False, True]
    for line in found:
        assert line.published is not None
        assert line.holds, line.cells


@pytest.mark.parametrize(("batch", "ctx"), [(1, 512), pytest.param(2, 2048, marks=pytest.mark.full), *LONG])
def test_accuracy_at_the_smaller_softmax_scale_is_as_published(batch: int, ctx: int) -> None:
    """At 1/sqrt(576) scores are closer together and rounding matters more; short work tiles keep bf16 weights."""
    if isinstance(manifest.locate(), str):
        pytest.skip("the package's own kernels are not built: run `python -m mla_suite build`")
    for line in check_h32_q4.lines(batch, ctx, torch.device("cpu"), 576**-0.5):
        assert line.holds, line.cells
        if line.planned or ctx <= 2048:
            assert line.distance < 1e-5
