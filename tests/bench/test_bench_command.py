"""`python -m mla_suite bench` from end to end on the CPU, and what its exit code means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
import torch

from mla_suite.__main__ import main
from mla_suite.bench import noise, record, sets, table, third_party
from mla_suite.bench import run as runner
from mla_suite.bench.clock import Effort


def test_quick_set_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "run.json"
    arguments = ["bench", "--device", "cpu", "--op", "combine", "--rounds", "2", "--no-emulator", "--save", str(saved)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "No GPU: these are times of the reference on the CPU" in printed
    assert "b4-r16-s8-v512" in printed
    report = record.load(saved)
    (result,) = report.results
    assert len(result.rounds) >= 4
    assert report.environment["arch"] == "cpu"
    assert result.floor_us == 0
    assert main(["bench", "--load", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["shape"] == "b4-r16-s8-v512"


def test_progress_counts_every_shape_of_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that are added for noise are reported, and count nothing."""
    monkeypatch.setattr(noise, "unsettled", lambda rounds: True)
    reported: list[tuple[str, int]] = []
    case = sets.combine(1, 2, 2)
    runner.run([case], torch.device("cpu"), Effort(rounds=1, passes=2), progress=lambda *step: reported.append(step))
    assert reported == [(case.id, 0), (case.id, 1), *[(f"{case.id} once more", 2)] * noise.MAX_EXTRA, ("done", 2)]


def test_decode_is_checked_against_fp64_and_planned_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--device", "cpu", "--op", "decode", "--plan", "with", "--rounds", "1", "--passes", "1"]
    assert main([*arguments, "--no-emulator", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert len(results) == 5
    assert all(
        row["shape"].endswith("-plan") and row["checked"] == "fp64" and 0 < row["error"] < 5e-3 for row in results
    )


@pytest.mark.parametrize(("slowdown", "code", "word"), [(1.0, 0, "no regression"), (1.1, 1, "regression")])
def test_exit_code_of_a_comparison(
    slowdown: float, code: int, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    runs.report(0).save(old)
    runs.report(1, slowdown).save(new)
    assert main(["bench", "--load", str(new), "--compare", str(old)]) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(word)
    assert main(["bench", "--load", str(new), "--compare", str(old), "--json"]) == code
    verdicts = json.loads(capsys.readouterr().out)["comparison"]
    assert len(verdicts) == len(runs.cases())
    assert ("slower" in {verdict["verdict"] for verdict in verdicts}) == bool(code)


def test_a_comparison_says_what_it_could_not_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = runs.report(0), runs.report(1)
    new.results[0].rounds = [us * (1 + 0.1 * index) for index, us in enumerate(new.results[0].rounds)]
    old.save(tmp_path / "old.json")
    new.save(tmp_path / "new.json")
    assert main(["bench", "--load", str(tmp_path / "new.json"), "--compare", str(tmp_path / "old.json")]) == 0
    assert "1 too noisy to show a change of 10 %" in capsys.readouterr().out


def test_a_shape_that_became_wrong_is_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = runs.report(0), runs.report(1)
    new.results[0].rounds, new.results[0].failure, new.results[0].wrong = [], "tensor 0 is off by 1.0", True
    old.save(tmp_path / "old.json")
    new.save(tmp_path / "new.json")
    assert main(["bench", "--load", str(tmp_path / "new.json"), "--compare", str(tmp_path / "old.json")]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "was timed before: tensor 0 is off by 1.0" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "fast"], "no set of shapes 'fast'; there are quick, flashmla"),
        (["--op", "plan"], "set 'quick' has no case of 'plan'"),
        (["--compare", "absent.json"], "absent.json cannot be read"),
        (["--shapes", "b999"], "no shape contains b999; they are decode-b2-h16-q1-kv64"),
        (["--sustained", "-1"], "bench: --sustained -1.0: it takes 0 to 60 seconds"),
        (["--load", "a.json", "--op", "plan", "--shapes", "b1"], "run as it was saved; leave out --op --shapes"),
        (["--save", "/dev/null/run.json"], "/dev/null/run.json cannot be written"),
        (["--html", "/"], "/ cannot be written; name a file"),
    ],
)
def test_bad_requests_are_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("bench: ")
    assert sentence in error


def test_list_names_every_set_and_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "aiter-3003: 64 shapes. AITER pull request 3003" in printed


def test_peers_are_columns_beside_our_backends() -> None:
    report = runs.report(0, backends=("native", "flash_mla"))
    shown = table.times(report)
    assert [row[2] for row in shown.rows] == ["native"] * len(runs.cases())
    at = shown.header.index("x flash_mla")
    assert not {"flashinfer us", "x aiter"} & set(shown.header), "a package that was not timed has no column"
    ours, theirs = report.results[0], report.results[1]
    assert shown.rows[0][at - 1 : at + 1] == (f"{theirs.us:.1f}", f"{ours.us / theirs.us:.2f}")


def test_sustained_time_is_a_column_where_it_was_measured() -> None:
    report = runs.report(0)
    assert "sustained us" not in table.times(report).header
    report.results[0].sustained_us = 123.4
    shown = table.times(report)
    column = shown.header.index("sustained us")
    assert [row[column] for row in shown.rows[:2]] == ["123.4", ""]
    assert column in shown.numeric


def test_wrong_results_come_before_refusals() -> None:
    report = runs.report(0)
    report.results[0].failure = "needs 64 heads"
    report.results[1].failure, report.results[1].wrong = "off", True
    shown = table.failures(report.results)
    assert shown.marks == ["failed", ""]
    assert shown.rows[0][3] == "off"


def test_no_peer_is_installed_where_none_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(third_party, "find_spec", lambda name: None)
    assert third_party.installed() == []
