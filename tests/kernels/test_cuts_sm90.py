"""Into how many cuts sm_90's decode takes a sequence, and how many blocks walk them."""

import itertools

import pytest

from mla_suite.core import arch as archs
from mla_suite.ops.decode import hopper
from mla_suite.ops.decode.hopper import KEYS, cuts, workers

H200 = archs.get("sm_90")


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 128, 512, 8448, 20000])
def test_a_launch_fills_the_device_once(rows):
    tiles = -(-rows // hopper.ROWS)
    for items in (1, 7, 66, 128, 132, 1000):
        groups = workers(H200, items, tiles)
        assert 1 <= groups <= max(items, 1)
        assert groups * tiles <= H200.compute_units or groups == 1, "a second block of an SM would wait for the first"
        assert groups == items or (groups + 1) * tiles > H200.compute_units


MEASURED = {  # (batch, rows, keys) -> us of a call by cuts, on an H200; csrc/sm_90/README.md, "How many cuts"
    (1, 128, 256): {2: 10.96, 4: 10.01, 8: 9.27},
    (1, 128, 1024): {8: 11.21, 12: 10.73, 16: 10.14, 32: 10.53},
    (1, 128, 3200): {16: 14.19, 20: 13.17, 25: 12.98, 32: 12.84, 40: 14.29},
    (1, 128, 4096): {20: 14.78, 25: 14.15, 26: 13.53, 32: 13.09, 40: 15.97, 50: 17.85},
    (1, 128, 8192): {20: 18.94, 25: 17.78, 32: 16.35, 40: 20.80, 66: 18.73},
    (1, 16, 1024): {16: 8.13, 20: 8.34, 25: 8.67, 32: 8.09},
    (1, 16, 4096): {32: 10.66, 50: 10.37, 64: 9.77, 66: 9.93},
    (8, 128, 512): {1: 16.72, 3: 13.92, 4: 12.87, 5: 13.74, 8: 18.13},
    (8, 128, 3200): {4: 28.23, 5: 25.75, 6: 25.31, 8: 26.13, 10: 34.65},
    (8, 128, 8192): {5: 47.36, 6: 42.73, 8: 40.61, 10: 57.07, 16: 54.11},
    (32, 128, 512): {1: 18.16, 2: 21.76, 3: 28.57},
    (32, 128, 1200): {1: 33.41, 2: 29.74, 3: 39.97, 4: 40.63},
    (32, 64, 4096): {2: 54.74, 3: 57.23, 4: 51.52, 5: 67.22},
    (32, 16, 4096): {2: 52.35, 3: 44.01, 4: 44.24, 5: 58.94},
    (64, 64, 8192): {1: 182.63, 2: 161.31, 3: 185.77, 4: 176.63},
    (128, 128, 256): {1: 26.02, 2: 69.73},
    (128, 16, 4096): {1: 145.30, 2: 151.02, 3: 156.45},
}


@pytest.mark.parametrize("shape", MEASURED)
def test_the_rule_chooses_what_was_measured_to_be_best(shape):
    batch, rows, keys = shape
    times = MEASURED[shape]
    assert times[cuts(H200, batch, rows, -(-keys // KEYS))] <= 1.02 * min(times.values())


def test_split_counts():
    """One where the batch fills the device; many for one sequence; none that a cut's keys do not repay."""
    assert cuts(H200, 128, 128, 4096 // KEYS) == 1
    assert cuts(H200, 128, 16, 8192 // KEYS) == 1
    assert cuts(H200, 32, 128, 256 // KEYS) == 1, "eight stages are less than a merge of 4096 rows"
    assert cuts(H200, 32, 128, 8192 // KEYS) == 2, "two row tiles of 32 sequences leave half the device idle"
    assert cuts(H200, 1, 16, 8192 // KEYS) >= 64
    assert cuts(H200, 1, 16, 1) == 1
    assert cuts(H200, 1, 16, 0) == 1
    for batch, rows, stages in itertools.product((1, 2, 8, 31, 100, 300), (16, 64, 128, 512), (1, 2, 9, 40, 256, 4000)):
        splits = cuts(H200, batch, rows, stages)
        assert 1 <= splits <= stages
        assert splits == 1 or batch * splits * -(-rows // 64) <= 8 * H200.compute_units
