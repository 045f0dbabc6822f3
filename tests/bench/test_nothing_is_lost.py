"""A full disk, Ctrl-C, another machine's run, a fault of the device: what was measured outlives them."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import runs
import support
import torch

from mla_suite.__main__ import main
from mla_suite.bench import bounds, clock, page, record, saving, sets
from mla_suite.bench import run as runner
from mla_suite.build import locations
from mla_suite.cli import explain

QUICK = ["bench", "--device", "cpu", "--op", "combine", "--no-emulator"]


def full_disk(descriptor: int) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_earlier_run_and_prints_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    runs.report(0).save(path)
    before = path.read_bytes()
    monkeypatch.setattr(locations.os, "fsync", full_disk)
    assert main([*QUICK, "--rounds", "2", "--save", str(path)]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["results"][0]["shape"] == "b4-r16-s8-v512"
    assert printed.err.splitlines()[-1] == f"bench: {path} cannot be written: No space left on device"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("what", ["page", "section"])
def test_a_full_disk_leaves_pages_and_readmes_as_they_were(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("<!-- support:begin -->\nold\n<!-- support:end -->\n")
    monkeypatch.setattr(locations.os, "fsync", full_disk)
    monkeypatch.setattr(page, "html", lambda *arguments: "new")
    with pytest.raises(ValueError, match="file cannot be written: No space left on device"):
        page.write(path, runs.report(0)) if what == "page" else support.write_section(path, "support", "new")
    assert support.section(path.read_text(), "support") == "old\n"


def test_links_stay_links_and_pipes_are_written(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "run.json")
    saving.write_whole(link, "first")
    saving.write_whole(link, "second")
    assert link.is_symlink()
    assert (tmp_path / "run.json").read_text() == "second"
    os.mkfifo(pipe)
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()
    saving.write_whole(pipe, "through")
    reader.join(10)
    assert heard == ["through"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_what_was_measured(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second of two passes; the comparison that was asked for cannot be made."""
    saved = tmp_path / "run.json"
    assert main([*QUICK, "--rounds", "4", "--passes", "1", "--save", str(saved)]) == 0
    honest, calls = clock.cpu_rounds, []

    def interrupted(*arguments: object) -> list[float]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return honest(*arguments)  # type: ignore[arg-type]  # whatever the runner passes

    monkeypatch.setattr(clock, "cpu_rounds", interrupted)
    capsys.readouterr()
    options = ["--rounds", "2", "--save", str(saved), "--compare", str(saved), *(["--json"] if as_json else [])]
    assert main([*QUICK, *options]) == 130
    printed = capsys.readouterr()
    assert f"bench: stopped before the end; what was measured is above, and saved in {saved}" in printed.err
    report = record.load(saved)
    (result,) = report.results
    assert len(result.rounds) == 2
    assert report.environment["note"].startswith("Stopped before its end")
    shown = json.loads(printed.out)["results"][0]["rounds"] if as_json else printed.out
    assert shown == result.rounds if as_json else "b4-r16-s8-v512" in shown


def test_ctrl_c_before_anything_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(clock, "cpu_rounds", interrupted)
    assert main([*QUICK, "--json"]) == 130
    monkeypatch.setattr(explain, "run", interrupted)
    assert main(["explain"]) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1] == "explain: stopped"
    assert "bench: stopped" in printed.err.splitlines()


def test_ctrl_c_keeps_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU times nothing, counts are all that there is."""
    cases = sets.named("quick")[:2]

    def interrupted(case: sets.Case, arch: str) -> record.Result:
        if case == cases[1]:
            raise KeyboardInterrupt
        return record.Result(case.op, case.shape, f"{arch} emulated", {}, 1, 1, counted={"memory": 1.0})

    monkeypatch.setattr(runner, "CPU_FLOPS", 0)
    monkeypatch.setattr(bounds, "count", interrupted)
    with pytest.raises(runner.Stopped) as stop:
        runner.run(cases, torch.device("cpu"), clock.Effort(1, 1), emulated=["gfx942"])
    assert [result.shape for result in stop.value.results] == [cases[0].shape]


def test_ctrl_c_while_suspects_are_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first measurement is whole, and in every file; what was suspected is not judged."""
    old, saved, table = (tmp_path / name for name in ("old.json", "new.json", "table.csv"))
    assert main([*QUICK, "--rounds", "4", "--passes", "1", "--save", str(old)]) == 0
    before = record.load(old)
    before.results[0].rounds = [10.0] * 4
    before.save(old)
    honest, runs_made = runner.run, []

    def slow_then_stopped(*arguments: Any, **options: Any) -> list[record.Result]:
        runs_made.append(1)
        if len(runs_made) == 2:
            raise runner.Stopped([])
        results = honest(*arguments, **options)
        results[0].rounds = [1000.0] * 4
        return results

    monkeypatch.setattr(runner, "run", slow_then_stopped)
    files = ["--save", str(saved), "--csv", str(table)]
    assert main([*QUICK, "--rounds", "4", "--passes", "1", "--compare", str(old), *files]) == 130
    assert record.load(saved).results[0].rounds == [1000.0] * 4
    assert table.exists()
    printed = capsys.readouterr()
    assert f"saved in {saved} and {table}" in printed.err
    assert "regression" not in printed.out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "the old run was on arch 'sm_90', this one on 'cpu'"),
        (["--rounds", "3", "--passes", "1"], "--rounds 3 --passes 1: a comparison needs 4 rounds in all"),
    ],
)
def test_what_cannot_be_compared_is_not_measured(
    options: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = runs.report(0)
    monkeypatch.setattr(runner, "run", lambda *a, **k: pytest.fail("minutes are spent before it is refused"))
    if options:
        monkeypatch.setattr(record, "need_same_machine", lambda *a: None)
    old.save(tmp_path / "old.json")
    assert main([*QUICK, *options, "--compare", str(tmp_path / "old.json")]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_that_shares_no_shape_with_the_old_one_is_saved_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "need_same_machine", lambda *a: None)
    runs.report(0).save(tmp_path / "old.json")
    saved = tmp_path / "new.json"
    assert main([*QUICK, "--save", str(saved), "--compare", str(tmp_path / "old.json")]) == 2
    assert "shares no timed shape with this run" in capsys.readouterr().err
    assert record.load(saved).results[0].rounds


def test_brackets_of_a_reason_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The console takes [words] for markup, and drops them, or stops at [/words]."""
    old, new = runs.report(0), runs.report(1)
    why = "kv_cache is [pages, page, 576]; see [/notes]"
    new.results[0].rounds, new.results[0].failure = [], why
    old.save(tmp_path / "old.json")
    new.save(tmp_path / "new.json")
    assert main(["bench", "--load", str(tmp_path / "new.json"), "--compare", str(tmp_path / "old.json")]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"was timed before: {why}" in printed
    assert printed.count(why) == 2
