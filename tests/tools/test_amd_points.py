"""Published points of AMD GPUs: enough of them, each from a named source, PR 3003 held out as a whole."""

from dataclasses import replace

import amd_points
import pytest


def test_points_and_their_division():
    points = amd_points.points()
    assert len(points) == 396
    assert {point.source.part for point in points if "3003" in point.source.url} == {"held_out"}
    fitted = {point.source.url for point in points if point.source.part == "fit"}
    held_out = {point.source.url for point in points if point.source.part == "held_out"}
    assert not fitted & held_out
    assert {point.card.arch for point in points if point.source.part == "fit"} == {"gfx942", "gfx950"}


def test_a_point_that_is_none_is_refused():
    points = amd_points.points()
    with pytest.raises(ValueError, match="is there 2 times"):
        amd_points.check([*points, points[0]])
    with pytest.raises(ValueError, match="no time of such a problem"):
        amd_points.check([replace(points[0], us=0.0), *points[1:]])
    with pytest.raises(ValueError, match="no point comes from aiter-3188"):
        amd_points.check([point for point in points if point.source.name != "aiter-3188"])
