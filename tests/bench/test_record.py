"""Runs are saved, read back, and compared only when they can be."""

import dataclasses
import json
from pathlib import Path

import pytest
import runs

from mla_suite.bench import record
from mla_suite.bench.floors import Floors, _rising


def test_a_run_survives_the_file(tmp_path: Path) -> None:
    report = runs.report(0, backends=("native", "triton"))
    report.save(tmp_path / "run.json")
    again = record.load(tmp_path / "run.json")
    assert again == report
    row = json.loads((tmp_path / "run.json").read_text())["results"][0]
    assert row["derived"]["gb_per_s"] == pytest.approx(row["bytes"] / row["derived"]["us"] / 1e3, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("not json", "cannot be read as the JSON of an earlier run"),
        ("[1]", "is not a run in format 1 (it says 'list')"),
        ('{"format": 9}', "is not a run in format 1 (it says 9)"),
        ('{"format": 1}', "lacks a part of a run"),
        (
            '{"format": 1, "environment": {}, "command": "", "sets": [], "floors": null, "results": [{}]}',
            "lacks a part",
        ),
    ],
)
def test_what_is_no_run_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        record.load(path)
    assert sentence in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", ["arch", "device", "compute_units", "date"])
def test_a_run_that_does_not_say_where_it_was_measured_is_refused(name: str, tmp_path: Path) -> None:
    report = runs.report(0)
    del report.environment[name]
    report.save(tmp_path / "run.json")
    with pytest.raises(ValueError, match=f"run.json lacks a part of a run, .*{name}"):
        record.load(tmp_path / "run.json")


def test_a_time_that_cannot_be_is_refused(tmp_path: Path) -> None:
    report = runs.report(0)
    report.results[0].rounds[0] = -1.0
    report.save(tmp_path / "run.json")
    with pytest.raises(ValueError, match="has a round of -1.0 microseconds"):
        record.load(tmp_path / "run.json")


def test_two_machines_are_not_compared() -> None:
    old, new = runs.report(0), runs.report(1)
    new.environment["device"] = "Another GPU"
    with pytest.raises(ValueError, match="'Made-up GPU', this one on 'Another GPU'"):
        record.compare(old, new)


def test_a_slower_card_is_allowed_for_up_to_a_limit() -> None:
    old, new = runs.report(0), runs.report(1)
    floors = runs.FLOORS
    slow_card = Floors(tuple((size, 1.1 * us) for size, us in floors.read), floors.tflops, floors.source)
    plain = {entry.new.key: entry.verdict.allowed for entry in record.compare(old, new)}
    new.floors = slow_card
    for entry in record.compare(old, new):
        extra = entry.verdict.allowed - plain[entry.new.key]
        assert extra == pytest.approx(record.MAX_DRIFT if entry.new.bound == "memory" else 0.0)


def test_what_is_no_longer_timed_is_missing() -> None:
    old, new = runs.report(0), runs.report(1)
    new.results[3] = dataclasses.replace(new.results[3], rounds=[], failure="tensor 0 is off")
    del new.results[5]  # not tried this time: another set, which is no regression
    assert [(result.key, why) for result, why in record.missing(old, new)] == [(old.results[3].key, "tensor 0 is off")]


def test_a_curve_of_floors_never_falls() -> None:
    noisy = [(1 << 18, 2.0), (1 << 20, 1.9), (1 << 22, 4.0), (1 << 24, 3.5), (1 << 26, 17.0)]
    rising = _rising(noisy)
    assert [size for size, _ in rising] == [size for size, _ in noisy]
    assert [us for _, us in rising] == [1.9, 1.9, 3.5, 3.5, 17.0]


def test_floors_lie_between_what_was_measured() -> None:
    floors = runs.FLOORS
    assert floors.memory_us(1 << 20) == pytest.approx(2.0)
    assert 2.0 < floors.memory_us(1 << 23) < 17.0
    assert floors.memory_us(1000) == 1.6
    assert floors.memory_us(1 << 31) == pytest.approx(462.0)
    assert floors.of(1 << 20, 8_000_000_000) == (pytest.approx(10.0), "compute")
    assert floors.of(1 << 30, 1000) == (231.0, "memory")
