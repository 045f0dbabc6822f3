"""The model of time beside published points: what the package and the page say is what the points give."""

from dataclasses import replace

import amd_points
import fit_amd_time
import support
from amd_peers import EXPOSED

from mla_suite.emulator.timing import CHIP, HELD_OUT

POINTS = amd_points.points()


def test_the_package_states_the_held_out_errors():
    assert fit_amd_time.held_out(POINTS) == HELD_OUT


def test_the_page_has_the_report():
    found = support.section(fit_amd_time.PAGE.read_text(), "points")
    assert found == f"{fit_amd_time.table(POINTS)}\n", "run `python tools/fit_amd_time.py --write`"


def test_the_constants_are_those_of_the_fit():
    """No single constant is better by a tenth more or less; the fit itself takes seconds and is run by hand."""
    points = fit_amd_time.device(POINTS, "fit")
    best = fit_amd_time.loss(points, CHIP, EXPOSED)
    for factor in (0.9, 1.1):
        assert fit_amd_time.loss(points, CHIP, EXPOSED * factor) > best
        for name in ("launch_us", "memory_share"):
            moved = replace(CHIP, **{name: getattr(CHIP, name) * factor})
            assert fit_amd_time.loss(points, moved, EXPOSED) > best
