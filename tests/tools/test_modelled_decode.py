"""Modelled times of decode on large problems, and the table beside other kernels that is made of them."""

import compare_amd_peers
import extrapolation
import pytest
import support
from amd_peers import predict
from modelled_decode import Problem, modelled

from mla_suite import archs
from mla_suite.bench.inputs import Call
from mla_suite.core import register
from mla_suite.emulator import timing
from mla_suite.launch import emulate


def whole(arch: str, problem: Problem, num_splits: int) -> float:
    """The modelled microseconds of the problem with every sequence emulated."""
    op = register.get("decode")
    with emulate(arch):
        call = problem.call(archs.get(arch), [problem.keys] * problem.batch)
        choice = op.choose(op.Args(*call.args, **call.kwargs))
        call = Call(call.args, call.kwargs | {"num_splits": num_splits})
        reports, _ = extrapolation.launches(op, choice, call, time=True)
    return timing.total([report.modelled for report in reports]).us


@pytest.mark.parametrize(
    ("arch", "problem", "num_splits"),
    [
        ("gfx942", Problem(3, 128, 1, 700), 0),  # splits of which the last is shorter, and a combine
        ("gfx950", Problem(4, 32, 4, 512, "fp8", "fp8", page=1), 0),
        ("gfx950", Problem(2, 16, 1, 2600), 1),  # three periods left out
        ("gfx942", Problem(2, 16, 1, 3300, "fp8", "fp8"), 2),
    ],
)
def test_it_is_the_time_of_the_whole_problem(arch, problem, num_splits):
    found = modelled(arch, problem, num_splits)
    assert found.us == pytest.approx(whole(arch, problem, num_splits), rel=1e-3)


def test_every_published_problem_has_a_row():
    rows = compare_amd_peers.stored()
    points = compare_amd_peers.chosen()
    assert len(rows) == len(points)
    for row, point in zip(rows, points, strict=True):
        shape = point.heads, point.q_len, point.batch, point.ctx
        assert (row.source, row.gpu, row.implementation) == (point.source.name, point.card.gpu, point.implementation)
        assert (row.queries, row.cache, *shape) == (point.q_dtype, point.kv_dtype, *row[5:9])
        assert row.published == pytest.approx(point.us, rel=1e-4)
        assert row.peer == pytest.approx(predict(point).us, rel=1e-4, abs=0.006)


def test_rows_are_what_the_kernels_give():
    """Two of them; `--write` models all."""
    rows = [row for row in compare_amd_peers.stored() if row.keys <= 512]
    for row in (rows[0], rows[-1]):
        problem = Problem(row.batch, row.heads, row.q_len, row.keys, row.cache, row.queries, page=1)
        found = modelled(compare_amd_peers.CARDS[row.gpu], problem)
        assert (round(found.us, 2), found.bound) == (pytest.approx(row.ours, rel=1e-4), row.bound)


def test_the_page_has_the_summary():
    found = support.section(compare_amd_peers.PAGE.read_text(), "comparison")
    made = "\n".join(compare_amd_peers.summary(compare_amd_peers.stored()))
    assert found == f"{made}\n", "run `python tools/compare_amd_peers.py --write`"
