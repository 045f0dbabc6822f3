"""Into how many splits sm_90's decode takes a sequence, and how many CTAs walk them."""

import itertools
import json
from pathlib import Path

import pytest
from built import require_dense
from decode_launches import H200, long_call

from mla_suite.archs.sm_90.costs import Estimate, best_splits, max_splits
from mla_suite.archs.sm_90.tile import BLOCK_M, BLOCK_N, groups_of
from mla_suite.core.explain import explain_on
from mla_suite.launch.launcher import read_rate


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 128, 512, 8448, 20000])
def test_a_launch_fills_the_device_once(rows):
    tiles = -(-rows // BLOCK_M)
    for work_tiles in (1, 7, 66, 128, 132, 1000):
        groups = groups_of(H200, work_tiles, tiles)
        assert 1 <= groups <= max(work_tiles, 1)
        assert groups * tiles <= H200.compute_units or groups == 1, "a second CTA of an SM would wait for the first"
        assert groups == work_tiles or (groups + 1) * tiles > H200.compute_units


# us of a call on an H200 by splits, with combine (none), and with each two splits combined in a cluster (reduce_o and
# exchange_p); all of one run. csrc/sm_90/combine/PERF.md says how they were measured.
MEASURED: dict[tuple[int, int, int], dict[str, dict[int, float]]] = {
    (row["batch"], row["rows"], row["keys"]): {
        mode: {int(splits): us for splits, us in row[mode].items()} for mode in ("none", "reduce_o", "exchange_p")
    }
    for row in json.loads(Path(__file__).with_name("decode_times_sm90.json").read_text())
}


def lost(shape):
    """Returns the time of the rule's choice over the best measured time."""
    batch, rows, keys = shape
    stages = -(-keys // BLOCK_N)
    chosen = best_splits(H200, "tma", batch, rows, stages)
    mode = Estimate(H200, "tma", batch, rows, stages).cluster_mode(chosen)
    return MEASURED[shape][mode][chosen] / min(us for times in MEASURED[shape].values() for us in times.values())


def test_the_rule_chooses_close_to_what_was_measured_to_be_best():
    """Within 0.7 % in the mean; the worst is B8 H32 at 4096 keys, with 16 splits for 12."""
    losses = {shape: lost(shape) for shape in MEASURED}
    assert len(losses) == 72
    assert sum(losses.values()) / len(losses) <= 1.007
    assert sorted(losses.values())[-4] <= 1.03
    assert max(losses.values()) <= 1.08


def test_the_estimate_is_close_to_what_was_measured():
    """Within 7 % on average, at other splits than the best, too."""
    off = []
    for (batch, rows, keys), by_mode in MEASURED.items():
        estimate = Estimate(H200, "tma", batch, rows, -(-keys // BLOCK_N))
        for mode, times in by_mode.items():
            off += [abs((estimate.decode(n) + estimate.combines(n)[mode]) / us - 1) for n, us in times.items()]
    assert len(off) > 700
    assert sum(off) / len(off) <= 0.07


BATCHES, ROW_COUNTS, LENGTHS = (
    (1, 2, 3, 8, 31, 64, 100, 300),
    (8, 16, 48, 64, 128, 512),
    (1, 2, 9, 40, 100, 256, 512, 4000),
)


@pytest.mark.parametrize("units", [78, 114, 132, 228])
def test_the_search_finds_what_trying_all_counts_finds(units):
    """The pruned search against every split count: the same estimated time within 2 %, and nearly always the same
    count."""
    arch, other = H200.on_device(units), 0
    for batch, rows, stages in itertools.product(BATCHES, ROW_COUNTS, LENGTHS):
        for kv_load in ("tma", "cp_async", "fp8"):
            estimate = Estimate(arch, kv_load, batch, rows, stages)

            def total(splits, estimate=estimate):
                return estimate.decode(splits) + min(estimate.combines(splits).values())

            counts = range(1, max_splits(arch, batch * estimate.tiles, stages) + 1)
            best, found = min(counts, key=total), best_splits(arch, kv_load, batch, rows, stages)
            assert total(found) <= 1.02 * total(best), (batch, rows, stages, kv_load)
            other += found != best
    assert other <= (0 if units == 132 else 4)


def test_memory_and_clock_are_the_cards():
    """Where memory is the limit on an H100 and not yet on an H200, fewer splits leave less to combine."""
    h100 = H200.on_device(132, read_rate(2_619_000, 5120), 1980)
    for rows in (16, 64):
        assert best_splits(H200, "tma", 32, rows, 2048 // BLOCK_N) == 4
        assert best_splits(h100, "tma", 32, rows, 2048 // BLOCK_N) == 2
    for batch, keys in ((1, 8192), (8, 1024), (128, 4096)):
        of_cards = [best_splits(card, "tma", batch, 16, keys // BLOCK_N) for card in (h100, H200)]
        assert of_cards[0] == of_cards[1]
    slow = H200.on_device(132, H200.memory_bytes_per_s // 2, H200.clock_mhz // 2)
    assert Estimate(slow, "tma", 32, 16, 64).read == Estimate(H200, "tma", 32, 16, 64).read


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_batch_invariant_calls_do_not_depend_on_the_card(heads, kv_format):
    require_dense("sm_90")
    h100 = H200.on_device(132, read_rate(2_619_000, 5120), 1755)
    for split_size in (256, 1024):
        args, kwargs = long_call((2048,) * 32, heads=heads, kv_format=kv_format, split_size=split_size)
        of_cards = [explain_on(card, "decode", *args, **kwargs) for card in (H200, h100)]
        assert of_cards[0].notes == of_cards[1].notes
        first, second = [[launch.kernel for launch in seen.spec.launches] for seen in of_cards]
        assert first == second


def test_split_counts():
    """One where the batch fills the device; many for one sequence; none that a split's keys do not repay."""
    assert best_splits(H200, "tma", 128, 128, 4096 // BLOCK_N) == 1
    assert best_splits(H200, "tma", 128, 16, 8192 // BLOCK_N) == 1
    assert best_splits(H200, "tma", 64, 128, 256 // BLOCK_N) == 1, "its CTAs fill the device"
    assert best_splits(H200, "tma", 32, 128, 256 // BLOCK_N) == 2
    assert best_splits(H200, "tma", 32, 128, 8192 // BLOCK_N) == 2, "two row tiles each leave half of it idle"
    assert best_splits(H200, "tma", 1, 16, 8192 // BLOCK_N) >= 64
    assert best_splits(H200, "tma", 1, 16, 1) == 1
    assert best_splits(H200, "tma", 1, 16, 0) == 1
    for batch, rows, stages in itertools.product((1, 2, 8, 31, 100, 300), (16, 64, 128, 512), (1, 2, 9, 40, 256, 4000)):
        splits = best_splits(H200, "tma", batch, rows, stages)
        assert 1 <= splits <= stages
        assert splits == 1 or batch * splits * -(-rows // 64) <= 8 * H200.compute_units
