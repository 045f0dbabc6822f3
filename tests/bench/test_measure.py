"""A wrong result is not timed, what fails says why, and rows are in their file as soon as they are measured."""

from __future__ import annotations

import csv
import errno
import os
import threading
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import support
import torch

from mla_suite.bench import measure as measuring
from mla_suite.bench import saving, sets
from mla_suite.bench.floors import Floors
from mla_suite.bench.inputs import Call
from mla_suite.bench.measure import measure
from mla_suite.bench.runners import Runner, configured
from mla_suite.bench.timer import Effort
from mla_suite.build import locations
from mla_suite.core import dispatch, register
from mla_suite.core.dispatch import Backend, Supported

CPU = torch.device("cpu")
SMALL = sets.decode(2, 4, 20, page=4)
ONCE = Effort(rounds=4, rest_s=0.0)


def tampered(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    """decode's reference, in place of a fast backend, with something done to what it wrote."""
    op = register.get("decode")
    reference = op.backends[-1]

    def wrong(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> Any:
        def launch(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
            reference.run(config, outputs, args)
            damage(*outputs)

        return launch

    fast = Backend("native", lambda problem, arch: Supported(None, "a test's own"), wrong)
    monkeypatch.setattr("mla_suite.core.register._registry", {"decode": replace(op, backends=(fast, reference))})
    dispatch.clear_caches()


@pytest.fixture(autouse=True)
def _choices_are_forgotten():
    yield
    dispatch.clear_caches()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda out, lse: out[1, 0, 3].mul_(1.03), "out at [1, 0, 3, "),
        (lambda out, lse: out[1, 0, 3, 7].fill_(torch.nan), "out at [1, 0, 3, 7] is nan"),
        (lambda out, lse: out.view(torch.uint8)[..., -2:].fill_(0xFF), "out at [0, 0, 0, 511] is nan"),
        (lambda out, lse: lse[0, 0, 2].add_(0.1), "lse at [0, 0, 2] is "),
        (lambda out, lse: lse[0, 0, 2].fill_(-torch.inf), "lse at [0, 0, 2] is -inf"),
    ],
    ids=["one row 3 % off", "one NaN", "the last column never written", "one lse off", "one lse -inf"],
)
def test_a_wrong_result_is_not_timed(damage, sentence, monkeypatch):
    tampered(monkeypatch, damage)
    (result,) = measure(SMALL, CPU, ONCE, backends=["native"])
    assert result.wrong
    assert sentence in result.failure
    assert result.rounds == ()


def test_a_right_result_is_timed(monkeypatch):
    tampered(monkeypatch, lambda out, lse: None)
    native, reference = measure(SMALL, CPU, Effort(6, 0.0), backends=["native", "reference"])
    for result in (native, reference):
        assert result.failure == ""
        assert len(result.rounds) == 6
        assert 0 < result.error < 5e-3


def test_a_backend_that_fails_is_a_result_and_not_the_end(monkeypatch):
    def fail(*outputs: torch.Tensor) -> None:
        raise RuntimeError("no such\n  kernel")

    tampered(monkeypatch, fail)
    native, reference = measure(SMALL, CPU, ONCE, backends=["native", "reference"])
    assert (native.failure, native.wrong) == ("no such kernel", True)
    assert reference.rounds


def test_launches_are_those_of_a_call_whose_bound_counts_rounded_up():
    """Timed with the exact one, a backend could have other splits than a call gets."""
    op, bounds = register.get("decode"), list[int]()

    def prepare(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> dispatch.Launch:
        bounds.append(args.max_seqlen_kv)
        return op.backends[-1].prepare(config, outputs, args)

    backend = Backend("counted", lambda problem, arch: Supported(None, ""), prepare)
    args, kwargs = op.samples()[0].make(torch.device("cpu"))
    call = Call(args, kwargs | dict(max_seqlen_kv=1001))
    runner = configured(op, backend, None, "")
    for run in (runner.run, runner.error, runner.eager):
        run(call)
    assert bounds == [1008] * 3


def test_triton_refuses_the_cpu_in_a_sentence():
    (result,) = measure(SMALL, CPU, ONCE, backends=["triton"])
    assert result.failure == "it runs on cuda, not on cpu"
    assert not result.wrong


def test_a_case_too_large_for_a_cpu_is_refused_before_it_is_made():
    (found,) = measure(sets.decode(64, 128, 8192), CPU, ONCE)
    assert found.failure.startswith("a CPU takes minutes for 1.5e+11 operations")
    assert not found.wrong


class Scripted:
    """In the place of a Replay: rounds as they are listed, then quiet ones."""

    def __init__(self, *rounds: list[float]) -> None:
        self.left = list(rounds)

    def __call__(self, run: object, turns: object) -> Scripted:
        return self

    def rounds(self, effort: Effort) -> list[float]:
        return list(self.left.pop(0))

    def sustained(self, seconds: float) -> float:
        return 60.0 + seconds


@pytest.mark.parametrize(("seconds", "sustained"), [(0.0, 0.0), (0.7, 60.7)])
def test_rounds_that_lie_apart_are_taken_again(seconds, sustained, monkeypatch):
    apart, quiet = [50.0, 55.0, 60.0], [50.0, 50.1, 50.2]
    runner = Runner("native", "", "", lambda call: None, lambda call: 0.0, lambda call: None)
    monkeypatch.setattr(measuring.timer, "host_rounds", lambda call, effort: [7.0])
    for rounds, taken in (([quiet, quiet], 3), ([apart, quiet, quiet, quiet], 6), ([apart] * 4, 9)):
        monkeypatch.setattr(measuring.timer, "Replay", Scripted(*rounds))
        effort = Effort(sustained_s=seconds)
        found = measuring._timed(SMALL, runner, [Call((), {})], effort, torch.device("cuda"))
        assert (len(found.rounds), found.sustained_us, found.host_us, found.failure) == (taken, sustained, 7.0, "")


def test_a_fp8_case_has_the_floor_of_its_own_ceiling():
    ceilings = Floors(((1 << 18, 1.0), (1 << 30, 230.0)), 0.001, "made up", fp8_tflops=0.002)
    narrow = sets.decode(1, 4, 64, page=1, kv_format="fp8", dtype=torch.float8_e4m3fn)
    floors = {}
    for case in (narrow, replace(narrow, options={})):
        (found,) = measure(case, CPU, ONCE, floors=ceilings)
        assert found.bound == "compute"
        assert found.facts()["over_floor"] == pytest.approx(found.us / found.floor_us)
        floors[case.fp8_products] = found.floor_us
    assert floors[False] == pytest.approx(2 * floors[True])


def test_every_row_is_in_the_file_when_it_is_added(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    table = saving.Table(path, {"device": "made up"})
    table.add({"shape": "a", "us": 1.23456789})
    table.add({"shape": "b", "failure": "commas, too"})
    first, *lines = path.read_text().splitlines()
    assert first == "# device: made up"
    assert list(csv.DictReader(lines)) == [
        {"shape": "a", "us": "1.2346", "failure": ""},
        {"shape": "b", "us": "", "failure": "commas, too"},
    ]
    saving.Table(None).add({"shape": "a"})


def test_rows_are_printed_below_their_columns_names(capsys: pytest.CaptureFixture[str]) -> None:
    table = saving.Table(None, shown=("shape", "us"))
    table.add({"shape": "a", "us": 1234.56789, "bytes": 1})
    table.add({"shape": "of nine or so", "us": 0.123456})
    table.add({"shape": "b"})
    assert capsys.readouterr().out.splitlines() == [
        "   shape       us",
        "       a     1235",
        "of nine or so   0.1235",
        "            b         ",
    ]


@pytest.mark.parametrize("name", [".", "file/rows.csv"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written; name a file in a folder of yours"):
        saving.Table(tmp_path / name)


def full_disk(descriptor: int) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["table", "section"])
def test_a_full_disk_leaves_a_file_as_it_was(what, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("<!-- support:begin -->\nold\n<!-- support:end -->\n")
    monkeypatch.setattr(locations.os, "fsync", full_disk)
    with pytest.raises(ValueError, match="file cannot be written: No space left on device"):
        saving.Table(path).add({"a": 1}) if what == "table" else support.write_section(path, "support", "new")
    assert support.section(path.read_text(), "support") == "old\n"
    assert list(tmp_path.iterdir()) == [path]


def test_links_stay_links_and_pipes_are_written(tmp_path):
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
