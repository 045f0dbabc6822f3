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
    (1, 16, 1024): {16: 7.70, 20: 7.68, 25: 7.75, 30: 7.86, 32: 7.39},
    (1, 16, 2048): {32: 7.98, 37: 8.23, 43: 8.40, 52: 8.64, 60: 8.50, 64: 7.97},
    (1, 16, 4096): {32: 9.45, 40: 9.81, 52: 9.51, 64: 8.73, 80: 10.52},
    (1, 16, 8192): {43: 11.86, 56: 11.26, 64: 10.67, 66: 10.85, 86: 12.13},
    (1, 16, 16384): {43: 16.85, 56: 15.42, 64: 14.33, 66: 14.51, 86: 15.14},
    (1, 16, 32768): {50: 23.39, 60: 21.57, 72: 21.12, 94: 19.26, 132: 21.20},
    (1, 64, 4096): {22: 11.65, 30: 11.07, 32: 10.43, 37: 11.19, 50: 11.04, 60: 11.26, 64: 10.63},
    (1, 64, 8192): {32: 13.63, 40: 14.04, 52: 13.14, 64: 12.59, 80: 14.38},
    (1, 64, 16384): {37: 19.30, 50: 17.66, 60: 16.71, 64: 16.17, 72: 17.64, 86: 17.70},
    (1, 128, 256): {4: 8.43, 5: 8.59, 6: 8.51, 7: 8.54, 8: 8.01},
    (1, 128, 2048): {11: 11.60, 32: 10.37, 33: 10.65},
    (1, 128, 4096): {32: 11.76, 33: 12.01, 37: 13.30, 40: 13.73, 43: 16.19, 50: 16.06},
    (1, 128, 8192): {32: 14.96, 33: 14.99, 37: 18.33, 40: 18.60, 43: 18.32, 50: 18.38},
    (2, 16, 8192): {16: 18.57, 22: 16.19, 30: 14.40, 32: 14.04, 37: 14.50, 50: 15.39},
    (2, 64, 8192): {32: 15.78, 33: 16.38, 37: 18.90, 40: 19.51, 43: 20.01, 50: 18.39},
    (4, 16, 4096): {11: 16.18, 14: 15.04, 20: 14.04, 22: 13.45, 28: 13.73, 33: 14.10},
    (4, 16, 8192): {12: 23.54, 16: 19.57, 22: 18.30, 24: 17.75, 28: 18.21, 33: 18.87},
    (4, 128, 1200): {4: 15.42, 6: 13.68, 8: 13.02, 10: 13.27, 12: 13.72, 14: 16.96},
    (4, 128, 4096): {5: 27.20, 8: 21.29, 11: 20.37, 12: 20.36, 14: 22.75},
    (8, 16, 4096): {6: 23.60, 9: 19.20, 12: 17.40, 16: 17.50},
    (8, 16, 8192): {6: 38.18, 9: 29.46, 12: 25.96, 16: 26.02},
    (8, 64, 4096): {5: 27.47, 8: 22.20, 10: 21.28, 11: 21.32, 14: 23.93},
    (8, 128, 512): {1: 16.72, 3: 13.92, 4: 12.87, 5: 13.74, 8: 18.13},
    (8, 128, 1200): {2: 21.91, 4: 16.21, 6: 16.34, 8: 18.52},
    (8, 128, 3200): {3: 32.50, 5: 25.29, 6: 24.11, 7: 25.21, 8: 25.02, 9: 35.76, 11: 34.25},
    (8, 128, 4096): {3: 38.86, 5: 28.76, 6: 26.91, 7: 28.66, 8: 28.22, 9: 40.22, 11: 37.37},
    (8, 128, 8192): {4: 53.80, 6: 42.00, 8: 39.92, 10: 56.61, 12: 52.53, 14: 51.86},
    (16, 16, 4096): {4: 31.06, 6: 26.07, 8: 27.17, 10: 34.76, 12: 31.83, 14: 31.47},
    (16, 64, 8192): {4: 56.33, 6: 47.34, 8: 52.33, 10: 67.74, 12: 64.01, 14: 65.30},
    (16, 128, 1200): {1: 32.63, 2: 23.90, 3: 23.64, 4: 21.54, 5: 29.52},
    (16, 128, 4096): {2: 54.21, 3: 45.06, 4: 37.60, 5: 54.87, 6: 50.64, 7: 50.84, 8: 49.77},
    (32, 16, 1024): {1: 27.39, 2: 19.51, 3: 17.84, 4: 18.04, 5: 25.05, 6: 23.70},
    (32, 16, 4096): {1: 94.21, 2: 53.46, 3: 43.40, 4: 43.55, 5: 58.56, 6: 52.07},
    (32, 64, 4096): {2: 54.74, 3: 57.23, 4: 51.52, 5: 67.22},
    (32, 128, 512): {1: 18.16, 2: 21.76, 3: 28.57},
    (32, 128, 1200): {1: 33.40, 2: 28.89, 3: 38.33, 4: 39.07, 5: 48.78},
    (32, 128, 3200): {1: 77.02, 2: 52.56, 3: 71.60, 4: 64.82, 5: 78.89},
    (64, 16, 2048): {1: 52.55, 2: 44.41, 3: 53.37, 4: 48.66, 5: 54.95},
    (64, 64, 8192): {1: 182.63, 2: 161.31, 3: 185.77, 4: 176.63},
    (128, 16, 4096): {1: 145.30, 2: 151.02, 3: 156.45},
    (128, 128, 256): {1: 26.02, 2: 69.73},
}


def lost(shape):
    """What the rule's choice takes, over the best of those that were measured."""
    batch, rows, keys = shape
    times = MEASURED[shape]
    return times[cuts(H200, batch, rows, -(-keys // KEYS))] / min(times.values())


def test_the_rule_chooses_close_to_what_was_measured_to_be_best():
    """Within 1 % in the mean; the worst is B16 H64 at 8192 keys, with 8 cuts for 6."""
    losses = {shape: lost(shape) for shape in MEASURED}
    assert sum(losses.values()) / len(losses) <= 1.01
    assert max(losses, key=losses.__getitem__) == (16, 64, 8192)
    assert sorted(losses.values())[-2] <= 1.06
    assert losses[16, 64, 8192] <= 1.11


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
