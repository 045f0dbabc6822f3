"""A search finds the fastest right configuration, and stores it only when that is worth a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_suite import archs as arch
from mla_suite.__main__ import main
from mla_suite.bench import environment, search, sets, store
from mla_suite.bench.inputs import Call
from mla_suite.bench.runners import Runner
from mla_suite.bench.search import Outcome
from mla_suite.bench.timer import FEWEST_ROUNDS, Effort
from mla_suite.core import dispatch, register, tuning
from mla_suite.core.dispatch import Backend, Supported
from mla_suite.core.tuning import Format, Integer, SearchSpace
from mla_suite.launch import declared_kernels

GPU = {
    "arch": "sm_90",
    "device": "Made-up GPU",
    "compute_units": 132,
    "driver": "580.00",
    "cuda": "13.0",
    "rocm": "",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "mla_suite": "0.1.0",
    "python": "3.12",
    "date": "2026-11-21",
    "commit": "0" * 40,
    "changed": False,
}
CASE = sets.combine(2, 4, 3)
ARCH = arch.get("sm_90")
FORM = Format(op="combine", exact=(Integer("rows", 1, 1024),), near=(Integer("batch", 1, 1024),),
              config=(Integer("point", 0, 9),))  # fmt: skip
SPACE = SearchSpace(
    candidates=lambda problem, arch: iter(range(7)),
    form=FORM,
    key=lambda problem, arch: dict(rows=problem.rows, batch=problem.batch),
    cells=lambda problem, arch, point: dict(point=point),
)
WRONG, BROKEN = 4, 5


@pytest.fixture(autouse=True)
def _operator(monkeypatch, tmp_path):
    """combine with a native backend of seven points (one is wrong, one cannot be launched) and a triton one."""
    op = register.get("combine")
    reference = op.backends[-1]

    def run(point: int, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
        if point == BROKEN:
            raise RuntimeError("too many registers")
        reference.run(None, outputs, args)
        if point == WRONG:
            outputs[0][0, 0] *= 2

    def prepare(point: int, outputs: tuple[torch.Tensor, ...], args: Any) -> Any:
        return lambda outputs, tensors: run(point, outputs, args)

    native = Backend("native", lambda problem, arch: Supported(0, "rule"), prepare)
    triton = Backend("triton", lambda problem, arch: Supported(8, "rule"), prepare)
    monkeypatch.setattr(register, "_registry", {"combine": replace(op, backends=(native, triton, reference))})
    monkeypatch.setenv("MLA_SUITE_TUNED_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")  # the real tables have other columns than FORM
    tuning.clear_cache()
    yield
    dispatch.clear_caches()
    tuning.clear_cache()


def searched(times: dict[int, float], baseline_us: float = 100.0, space: SearchSpace = SPACE) -> Outcome:
    """Points that `times` does not name take 40 us. Rounds differ by 1 %, and every fifth is disturbed."""

    def timer(runner: Runner, turns: Sequence[Call], effort: Effort) -> list[float]:
        us = baseline_us if runner.config == "8" else times.get(int(runner.config), 40.0)
        return [us * (1.3 if number % 5 == 4 else 1 + number % 3 / 200) for number in range(effort.rounds)]

    return search.search(CASE, space, ARCH, torch.device("cpu"), timer)


def searching(monkeypatch: pytest.MonkeyPatch, one: Callable[..., Outcome]) -> None:
    """The command finds a GPU, and `one` in the place of the search of a shape."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment, "describe", lambda device: dict(GPU))
    monkeypatch.setattr(search, "space_of", lambda op: SPACE)
    monkeypatch.setattr(search, "search", one)


def test_the_fastest_right_point_is_worth_a_row():
    found = searched({0: 40.0, 2: 30.0, 3: 35.0, WRONG: 5.0, BROKEN: 4.0})
    assert found.best is not None
    assert (found.present.config, found.best.config) == (0, 2)
    assert found.kept is None
    assert found.tried == 4
    assert [entry.split(":")[0] for entry in found.refused] == [str(WRONG), str(BROKEN)]
    assert "too many registers" in found.refused[1]
    assert len(found.best.rounds) == len(found.present.rounds) >= FEWEST_ROUNDS


def test_what_is_within_the_noise_of_the_present_point_is_not():
    found = searched({0: 40.0, 3: 39.6})
    assert found.kept is not None
    assert found.kept.startswith("within the noise of the present configuration")


def test_a_shape_another_backend_does_faster_is_left_to_it():
    found = searched({0: 40.0, 2: 30.0}, baseline_us=12.0)
    assert found.kept is not None
    assert found.kept.startswith("triton takes 1")


LEAVES = replace(SPACE, leaves=lambda backend: dict(point=9) if backend == "triton" else None)
"""Point 9 of its table is Triton."""


def test_a_table_that_can_leave_a_shape_to_a_faster_backend_gets_a_row(tmp_path):
    found = searched({0: 40.0, 2: 30.0}, baseline_us=12.0, space=LEAVES)
    assert found.kept is None
    path = tmp_path / "sm_90.csv"
    store.write(FORM, "sm_90", path, [search.cells(found, LEAVES, ARCH, GPU)])
    (row,) = tuning.load(FORM, "sm_90", path)
    assert row.values["point"] == 9
    assert row.provenance["baseline"] == "native"
    assert 11 < float(row.provenance["microseconds"]) < 13
    assert 39 < float(row.provenance["baseline_microseconds"]) < 42
    alone = replace(LEAVES, candidates=lambda problem, arch: iter(()))
    assert searched({0: 40.0}, baseline_us=12.0, space=alone).kept is None, "one configuration may lose as well"
    for slower in (29.9, 100.0):
        assert not searched({0: 40.0, 2: 30.0}, baseline_us=slower, space=LEAVES).left_to


def test_the_baseline_is_the_fastest_of_the_other_backends():
    op = register.get("combine")
    others = [Backend(name, lambda problem, arch, n=n: Supported(n, "rule"), op.backends[0].prepare)
              for n, name in ((7, "slower"), (8, "faster"), (9, "middle"))]  # fmt: skip
    register._registry["combine"] = replace(op, backends=(op.backends[0], *others, op.backends[-1]))
    found = searched({0: 40.0, 2: 30.0, 7: 50.0, 9: 25.0}, baseline_us=20.0)
    assert found.baseline is not None
    assert found.baseline.config == "faster"
    assert found.kept is not None
    assert found.kept.startswith("faster takes ")


def test_a_backend_that_is_wrong_as_it_stands_is_an_error():
    op = register.get("combine")
    native, *others = op.backends
    wrong = Backend("native", lambda problem, arch: Supported(WRONG, "rule"), native.prepare)
    register._registry["combine"] = replace(op, backends=(wrong, *others))
    with pytest.raises(ValueError, match=r"out at \[0, 0, 0\] is "):
        search.search(CASE, SPACE, ARCH, torch.device("cpu"), lambda *_: [1.0] * 4)


def test_rows_carry_their_provenance_and_pass_the_linter(tmp_path):
    found = searched({0: 40.0, 2: 30.0})
    row = search.cells(found, SPACE, ARCH, GPU | {"device": 'NVIDIA "H200", 141 GB'})
    path = store.path_for(FORM, "sm_90", user=True)
    assert path == tmp_path / "user" / "combine" / "sm_90.csv"
    store.write(FORM, "sm_90", path, [row])
    (loaded,) = tuning.load(FORM, "sm_90", path)
    assert loaded.values == dict(rows=4, batch=2, point=2)
    assert loaded.provenance["device"] == "NVIDIA  H200   141 GB"
    assert loaded.provenance["baseline"] == "triton"
    assert loaded.provenance["software"] == "cuda 13.0 torch 2.11.0 triton 3.6.0"
    assert 29 < float(loaded.provenance["microseconds"]) < 31
    match = tuning.find(FORM, "sm_90", dict(rows=4, batch=2))
    assert match is not None
    assert match.row.position == f"{path}:2"


def test_a_row_takes_the_place_of_its_like_and_tables_stay_sorted(tmp_path):
    row = search.cells(searched({0: 40.0, 2: 30.0}), SPACE, ARCH, GPU)
    path = tmp_path / "sm_90.csv"
    store.write(FORM, "sm_90", path, [row | {"batch": 16}, row | {"batch": 3}])
    store.write(FORM, "sm_90", path, [row | {"batch": 16, "point": 6}])
    assert [(r.values["batch"], r.values["point"]) for r in tuning.load(FORM, "sm_90", path)] == [(3, 2), (16, 6)]
    assert not list(tmp_path.glob(".*"))


def test_unsound_rows_leave_the_table_as_it_was(tmp_path):
    row = search.cells(searched({0: 40.0, 2: 30.0}), SPACE, ARCH, GPU)
    path = tmp_path / "sm_90.csv"
    store.write(FORM, "sm_90", path, [row])
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"sm_90.csv:3: point is '77'"):
        store.write(FORM, "sm_90", path, [row | {"batch": 9, "point": 77}])
    path.write_bytes(before + b"damaged\n")
    with pytest.raises(ValueError, match="1 cells; the header has"):
        store.write(FORM, "sm_90", path, [row])
    assert path.read_bytes() == before + b"damaged\n"


def test_a_read_only_package_sends_rows_to_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "package")
    (tmp_path / "package" / "combine").mkdir(parents=True)
    assert store.path_for(FORM, "sm_90", user=False) == tmp_path / "package" / "combine" / "tuned" / "sm_90.csv"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert store.path_for(FORM, "sm_90", user=False) == tmp_path / "user" / "combine" / "sm_90.csv"


def test_a_row_without_a_commit_is_refused():
    with pytest.raises(ValueError, match="the commit of this package is unknown"):
        search.cells(searched({2: 30.0}), SPACE, ARCH, GPU | {"commit": ""})


def test_tiles_of_decodes_own_kernels_become_crossover_rows(tmp_path):
    """Each kernel is tried once, its row is a limit on batch and context, and the row decides up to there."""
    from mla_suite.archs import decode_search as native_search
    from mla_suite.archs import decode_table
    from mla_suite.ops.decode import DECODE

    gfx950, space = arch.get("gfx950"), native_search.SPACE
    args, kwargs = sets.decode(4, 128, 2048).sample.make(torch.device("cpu"))
    problem = DECODE.problem(*args, **kwargs)
    with declared_kernels():
        configs = list(space.candidates(problem, gfx950))
        assert [config.rows for config in configs] == [16, 32, 64, 128]
        assert list(space.candidates(problem, ARCH)) == [], "sm_90 has no tiles to choose"
        narrow = problem._replace(heads=32)
        assert [config.rows for config in space.candidates(narrow, gfx950)] == [16, 32]
    row = {**space.key(problem, gfx950), **space.cells(problem, gfx950, configs[1]), "kind": "measured"}
    row |= dict(microseconds="12.5", spread_percent="0.3", device="MI355X", compute_units=256, driver="6.14")
    row |= dict(software="torch 2.13", date="2026-11-22", commit="abcdef1")
    path = store.path_for(space.form, "gfx950", user=True)
    store.write(space.form, "gfx950", path, [row])
    for batch, context, decides in ((4, 2048, True), (2, 100, True), (5, 2048, False), (4, 2049, False)):
        found = decode_table.row_of(gfx950, problem._replace(batch=batch, context=context))
        assert (found is not None) is decides
        assert found is None or found.values["use"] == "rows32"
    left = {**space.key(problem, gfx950), **(space.leaves("triton") or {})}
    assert decode_table.FORMAT.line(left).split(",")[7] == decode_table.TRITON
    assert space.leaves("reference") is None
    assert not space.plans, "planned calls do not see the table, so shapes are timed without a plan"


def test_the_command_prints_and_stores(tmp_path, capsys, monkeypatch):
    found = searched({0: 40.0, 2: 30.0})
    kept = searched({0: 40.0, 3: 39.9})
    searching(monkeypatch, lambda case, *rest, **options: found if "b4-" in case.shape else kept)
    arguments = ["tune", "--op", "combine", "--set", "aiter-3468", "--shapes", "b4-r16-s2-", "b8-r16-s2-", "--user"]
    path = tmp_path / "user" / "combine" / "sm_90.csv"
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"1 rows would be stored in {path}; add --write" in printed
    assert "within the noise of the present configuration" in printed
    assert not path.exists()
    assert main([*arguments, "--write", "--commit", "abcdef1234"]) == 0
    (row,) = tuning.load(FORM, "sm_90", path)
    assert row.provenance["commit"] == "abcdef1234"
    assert f"1 rows stored in {path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("trouble", "first", "code", "said"),
    [
        (KeyboardInterrupt(), False, 130, "tune: stopped before the end, at combine"),
        (RuntimeError("CUDA error: an illegal [memory] access"), False, 1, "1 of 2 shapes could not be searched"),
        (ValueError("native does not take it: too wide"), True, 1, "1 of 2 shapes could not be searched"),
    ],
    ids=["Ctrl-C", "a fault of the device", "a shape that cannot be searched"],
)
def test_trouble_costs_no_other_shape_its_row(trouble, first, code, said, tmp_path, capsys, monkeypatch):
    found = searched({0: 40.0, 2: 30.0})
    outcomes = iter([trouble, found] if first else [found, trouble])

    def one(*arguments: Any, **options: Any) -> Outcome:
        outcome = next(outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    searching(monkeypatch, one)
    arguments = ["--set", "aiter-3468", "--shapes", "b4-r16-s2-", "b8-r16-s2-", "--user", "--write"]
    assert main(["tune", "--op", "combine", *arguments]) == code
    assert len(tuning.load(FORM, "sm_90", tmp_path / "user" / "combine" / "sm_90.csv")) == 1
    printed = capsys.readouterr()
    assert said in printed.err
    assert str(trouble) in printed.out


def test_the_linter_names_file_and_line(tmp_path, capsys):
    assert main(["tune", "--lint"]) == 0
    capsys.readouterr()
    table = tmp_path / "user" / "combine" / "gfx942.csv"
    table.parent.mkdir(parents=True)
    table.write_text("rows,batch\n")
    assert main(["tune", "--lint"]) == 1
    assert f"{table}:1: the header is 'rows,batch'" in capsys.readouterr().out
