"""The README's latency section from saved runs: what it says of a machine, and what it leaves to others."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs

from mla_suite.__main__ import main
from mla_suite.bench import markdown
from mla_suite.bench.record import Result


def made_up():
    report = runs.report(0, backends=("native", "triton", "flash_mla"))
    for result in report.results:
        if result.backend == "flash_mla":
            result.config = "1.2.3"
    report.results.append(Result("decode", "b1-odd", "native", {}, 1, 1, failure="no kernel for it"))
    return report


def test_it_names_the_machine_versions_date_command_and_what_was_not_timed() -> None:
    report = made_up()
    text = markdown.latency([report])
    for part in ("Made-up GPU", "driver 580.00", "CUDA 13.0", "torch 2.11.0", "triton 3.6.0", "flash_mla 1.2.3"):
        assert part in text
    assert report.environment["date"] in text
    assert f"`{report.command}`" in text
    assert "read 4648 GB/s" in text
    assert "Not timed: decode b1-odd (native: no kernel for it)." in text


def test_a_note_of_a_person_is_shown() -> None:
    report = made_up()
    assert "older driver" not in markdown.latency([report])
    report.environment["note"] = "Measured with an older driver."
    assert "\nMeasured with an older driver.\n" in markdown.latency([report])


def test_a_row_is_the_fastest_of_our_own_backends_beside_the_peer() -> None:
    report = made_up()
    rows = [line for line in markdown.latency([report]).splitlines() if line.startswith("| decode | `")]
    shapes = {result.shape for result in report.results if result.op == "decode" and result.rounds}
    assert len(rows) == len(shapes)
    assert all("| native |" in row for row in rows)
    # 1.3 floors and 4 us, and 1.6 times that for the package, which comes third
    assert all(0.55 < float(row.split("|")[-2]) < 0.7 for row in rows)


def test_the_median_of_two_lies_between_them() -> None:
    report = made_up()
    first, second = [result for result in report.results if result.backend == "native" and result.rounds][:2]
    second.op = first.op
    first.floor_us, second.floor_us = first.us / 2, second.us / 4
    report.results = [first, second]
    assert f"| {first.op} | 2 | native | 2.00, 3.00, 4.00 |" in markdown.latency([report])


def test_it_is_written_between_the_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- latency:begin (how) -->\nold\n<!-- latency:end -->\nafter\n")
    assert main(["latency", "--write", str(page)]) == 0
    assert "No run on a GPU is stored" in page.read_text()
    made_up().save(tmp_path / "benchmarks" / "results" / "made-up.json")
    assert main(["latency", "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- latency:begin (how) -->\n**Made-up GPU**")
    assert text.endswith("<!-- latency:end -->\nafter\n")
    assert main(["latency", str(tmp_path / "benchmarks" / "results" / "made-up.json")]) == 0
    assert "**Made-up GPU**" in capsys.readouterr().out


def test_files_that_are_no_run_and_pages_without_markers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    assert main(["latency", "--write", str(page)]) == 2
    assert capsys.readouterr().err == f"latency: {page} cannot be read: No such file or directory\n"
    page.write_text("no markers")
    assert main(["latency", "--write", str(page)]) == 2
    assert "has no <!-- latency:begin --> and" in capsys.readouterr().err
    assert page.read_text() == "no markers"
    assert main(["latency", str(page)]) == 2
    assert "cannot be read as the JSON of an earlier run" in capsys.readouterr().err
