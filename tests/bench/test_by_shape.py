"""The sm_90 benchmarks print, choose and write, with made-up times: their loop, options, and checks of results."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import bench_decode_sm90
import bench_sparse_sm90
import by_shape
import pytest
import torch
from by_shape import Timed, Work

from mla_suite import archs
from mla_suite.bench.floors import Floors
from mla_suite.bench.inputs import Call
from mla_suite.core.op import Op

BENCHMARKS = {"decode": bench_decode_sm90, "sparse_decode": bench_sparse_sm90}
CEILINGS = Floors(((1 << 20, 2.0), (1 << 30, 250.0)), 800.0, "made up")
US = 40.0


class Replay:
    """A graph of calls that takes US for each, and half of it where the caller says how often to split."""

    def __init__(self, call: Any, turns: Any) -> None:
        call(turns[0])
        self.us = US / 2 if "num_splits" in turns[0].kwargs else US

    def round(self, rest_s: float = 0.0) -> float:
        return self.us

    def sustained(self) -> float:
        return 1.2 * self.us


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """An H100 whose times are made up; the calls that were timed."""
    calls: list[Call] = []
    monkeypatch.setattr(by_shape, "Replay", Replay)
    monkeypatch.setattr(by_shape, "operator_call", lambda op, turn: calls.append(turn))
    monkeypatch.setattr(by_shape.floors, "measure", lambda device, effort: CEILINGS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    return calls


def prepared(row: Any) -> Work:
    return Work([Call((), {})] * 3, None if "~" in row.name else 6, 1 << 28, 10**9)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("decode", "--sustained 'B128 H128' --splits 'B1 ,B8 ,B32 H32' --seconds 52 --json decode.json"),
        ("decode", "--planned --seconds 30"),
        ("decode", "--rows 'B128 H128,B1 ' --seconds 50"),
        ("decode", "--sustained --splits"),
        ("sparse_decode", "--rows 'v32 B128,dsv4 B128,v32 B1 ' --seconds 15 --json sparse.json"),
    ],
)
def test_options_are_taken_and_without_a_card_it_says_so(
    name: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BENCHMARKS[name].main(shlex.split(line)) == 2
    assert capsys.readouterr().err == f"{BENCHMARKS[name].__name__}: no H100 or H200 here\n"


@pytest.mark.parametrize("module", BENCHMARKS.values())
def test_help_says_what_it_is(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    assert stop.value.code == 0
    assert "on an H100 or H200, shape by shape" in " ".join(capsys.readouterr().out.split())


def test_names_are_wanted_by_how_they_begin() -> None:
    rows = bench_decode_sm90.SHAPES

    def names(text: str | None) -> list[str]:
        return [row.name for row in filter(by_shape.wanted(text), rows)]

    assert names(None) == []
    assert names("") == [row.name for row in rows]
    assert names("B1 H16,B128 H128 kv~") == [
        "B1 H16 kv1024 q1", "B1 H16 kv4096 q1", "B1 H16 kv8192 q1", "B128 H128 kv~4096 q1",
    ]  # fmt: skip
    assert names("B9") == []


def test_every_shape_in_triton_has_its_peer() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    import bench_decode_triton

    assert all(row.flash_mla > 0 for row in bench_decode_triton.SHAPES)
    rows = {row.name: row for row in bench_decode_triton.SHAPES}
    assert len(rows) == 26
    assert (rows["B8 H32 kv1200 q4"].flash_mla, rows["B64 H16 kv16384"].flash_mla) == (21.4, 280.1)
    chosen = [row.name for row in filter(by_shape.wanted("B1 ,B64 H16"), bench_decode_triton.SHAPES)]
    assert chosen == [
        "B1 H16 kv1024", "B1 H16 kv4096", "B1 H16 kv8192", "B1 H128 kv1024", "B1 H128 kv8192", "B64 H16 kv16384",
        "B1 H32 kv1200 q4",
    ]  # fmt: skip


def test_a_line_fits_its_header() -> None:
    timed = Timed("B1 H16 kv1024 q1", "32", 9.3, 9.4, 131, 4.4, 2.6, "memory", 11.2, 5.1, {"16": 10.0, "64": 9.94})
    assert by_shape.header(22) == (
        "shape                 splits       us   sustd   GB/s    TF   floor     xfloor  FlashMLA xfloor  ratio"
    )
    assert by_shape.shown(timed, 22) == (
        "B1 H16 kv1024 q1          32     9.30     9.40    131     4     2.6 mem   3.58     11.2   5.10   0.83  "
        "16:10.0 64:9.9"
    )
    assert by_shape.name_width(bench_decode_sm90.SHAPES) == 22
    assert by_shape.name_width(bench_sparse_sm90.SHAPES) == 26


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_row_is_timed_and_written(
    name: str, card: list[Call], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = BENCHMARKS[name]
    monkeypatch.setattr(module, "prepare", prepared)
    written = tmp_path / "times.json"
    assert module.main(["--json", str(written)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"a card: read {CEILINGS.gb_per_s:.0f} GB/s, bf16 product 800 TFLOP/s"
    saved = json.loads(written.read_text())
    assert saved["floors"] == json.loads(json.dumps(CEILINGS.as_json()))
    names = [row.name for row in module.SHAPES]
    assert [row["name"] for row in saved["rows"]] == names
    assert [line.split("  ")[0] for line in lines[2 : 2 + len(names)]] == names
    assert all(row["us"] == US and row["sustained_us"] is None and not row["others"] for row in saved["rows"])
    assert {row["splits"] for row in saved["rows"]} == ({"6", "plan"} if name == "decode" else {"6"})
    if name == "decode":
        assert lines[-1].startswith("32 heads, 4 tokens: 20 shapes, geometric mean ")
    assert len(card) == len(names)


def test_sustained_and_other_cuts_are_of_the_rows_asked_for(card: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decode_sm90, "prepare", prepared)
    options = by_shape.arguments("").parse_args(["--rows", "B8 H16,B128 H128", "--sustained", "B128", "--splits"])
    found, right = by_shape.run(bench_decode_sm90.SHAPES, bench_decode_sm90.DECODE, prepared, options)
    assert right
    assert len(found) == 7
    for timed in found:
        assert timed.sustained_us == pytest.approx(1.2 * US) if timed.name.startswith("B128") else timed.us == US
        # A call with a plan has no other split counts.
        assert timed.others == ({} if "~" in timed.name else {"3": US / 2, "12": US / 2})
    assert [call.kwargs.get("num_splits") for call in card[:3]] == [None, 3, 12]


def test_a_row_that_fails_says_why_and_the_next_is_timed(
    card: list[Call], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_wrong(row: Any) -> Work:
        if row.heads == 64:
            raise AssertionError("out is 7 times as far\nfrom fp64 as it may be")
        return prepared(row)

    monkeypatch.setattr(bench_sparse_sm90, "prepare", half_wrong)
    assert bench_sparse_sm90.main(["--rows", "v32 B1 "]) == 1
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[1] == f"{'v32 B1 H64 k2048':26s} FAILED: out is 7 times as far from fp64 as it may be"
    assert [line.split()[2] for line in lines] == ["H128", "H64", "H16"]


def test_no_row_begins_after_its_time(
    card: list[Call], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_sparse_sm90, "prepare", prepared)
    assert bench_sparse_sm90.main(["--rows", "v32 B1 ", "--seconds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 3
    assert all(line.endswith("not begun: the time given is over") for line in lines)
    assert not card


def test_planned_shapes_are_compared_and_nothing_else(
    card: list[Call], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_decode_sm90, "compare_planned", lambda row, width: f"{row.name:{width}s} compared")
    assert bench_decode_sm90.main(["--planned"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "shape                 splits        us  items partial   planned  ratio"
    assert len(lines) == len(bench_decode_sm90.PLANNED)
    assert all(line.startswith(bench_decode_sm90.PLANNED) for line in lines)
    assert bench_decode_sm90.main(["--planned", "--rows", "B1 H16"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert not card


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in BENCHMARKS.values():
        monkeypatch.setattr(module, "CUDA", torch.device("cpu"))


SMALL: dict[str, Any] = {
    "decode": bench_decode_sm90.Row(3, 16, 2, 70, math.nan, math.nan, ragged=True),
    "sparse_decode": bench_sparse_sm90.Row(
        "dsv4", 2, 16, (bench_sparse_sm90.Pool(256, 1024, 8), bench_sparse_sm90.Pool(64, 1024, 24)), True, 1.0, 1.0
    ),
}


def small_call(name: str) -> tuple[Op, Call]:
    row = SMALL[name]
    if name == "decode":
        sample = bench_decode_sm90.decode_sample(row.lens(), heads=row.heads, q_len=row.q_len)
        return bench_decode_sm90.DECODE, Call(*sample.make(torch.device("cpu")))
    return bench_sparse_sm90.SPARSE_DECODE, bench_sparse_sm90.turns_of(row, 2)[1]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_wrong_result_is_not_timed(name: str, on_cpu: None) -> None:
    op, turn = small_call(name)
    out, lse = by_shape.operator_call(op, turn)
    check = BENCHMARKS[name].check
    check(turn, out, lse)
    for change in (
        lambda: (out * 1.1, lse),
        lambda: (out, lse + 0.01),
        lambda: (out.roll(1, 0), lse),
        lambda: (torch.full_like(out, torch.nan), lse),
    ):
        with pytest.raises(AssertionError, match="times as far from fp64 as it may be"):
            check(turn, *change())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_another_backend_is_not_timed(name: str, on_cpu: None) -> None:
    with pytest.raises(AssertionError, match="^reference: "):
        BENCHMARKS[name].prepare(SMALL[name])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_calls_of_a_shape_are_made(name: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, by the definition, as if that were our kernel."""
    module, row = BENCHMARKS[name], SMALL[name]
    monkeypatch.setattr(module, "assert_native", lambda op, turn: None)
    monkeypatch.setattr(module, "dispatch", SimpleNamespace(arch_of=lambda tensor: archs.get("sm_90")))
    work = module.prepare(row)
    assert len(work.turns) == 2
    if name == "decode":
        assert work.splits is None
        assert work.turns[0].args[bench_decode_sm90.PLAN] is not None
        work = module.prepare(row._replace(ragged=False))
        assert work.turns[0].args[bench_decode_sm90.PLAN] is None
    assert work.splits >= 1
    assert work.bytes > 0
    assert work.flops > 0
