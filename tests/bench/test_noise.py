"""A verdict is worth something: no false alarm on the same code, no missed 10 %, on noisy timings with heavy tails."""

import random

import pytest
import runs
import simulated

from mla_suite.bench import noise, record

TRIES = 10
SHAPES_US = (20.5, 24.0, 47.0, 118.0, 452.0)


@pytest.mark.parametrize("seed", range(TRIES))
def test_no_run_of_the_same_code_is_a_regression(seed: int) -> None:
    print("seed", seed)
    compared = record.compare(runs.report(seed), runs.report(1000 + seed))
    assert len(compared) == len(runs.cases())
    assert record.slower(compared) == []


@pytest.mark.parametrize("seed", range(TRIES))
def test_ten_percent_slower_is_found_in_every_shape_over_20_us(seed: int) -> None:
    print("seed", seed)
    compared = record.compare(runs.report(seed), runs.report(1000 + seed, slowdown=1.1))
    long = [entry for entry in compared if entry.old.us > 20]
    assert len(long) > 30
    assert [entry.new.shape for entry in long if entry.verdict.word != "slower"] == []


@pytest.mark.parametrize("us", SHAPES_US)
def test_one_planted_shape_is_the_only_one_named(us: float) -> None:
    seed = round(us * 10)
    print("seed", seed)
    source = random.Random(seed)
    for _ in range(TRIES):
        old, same, slow = (simulated.run(level, source) for level in (us, us, 1.1 * us))
        assert noise.judge(old, same).word == "same"
        assert noise.judge(old, slow).word == "slower"
        assert noise.judge(slow, old).word == "faster"


@pytest.mark.parametrize(
    "trouble",
    [dict(noise=0.02), dict(heavy=0.25), dict(disturbed=0.10)],
    ids=["noisy replays", "a quarter of them in a heavy tail", "a tenth of the rounds disturbed"],
)
def test_verdicts_hold_in_worse_noise(trouble: dict[str, float]) -> None:
    """600 pairs of runs; a disturbed run may hide a slowdown once, but nothing may be called slower that is not."""
    source = random.Random(7)
    print("seed 7", trouble)
    false = missed = 0
    for _ in range(300):
        old, same, slow = (simulated.run(level, source, **trouble) for level in (50.0, 50.0, 55.0))
        false += noise.judge(old, same).word == "slower"
        missed += noise.judge(old, slow).word != "slower"
    assert false == 0
    assert missed <= 3


def test_a_shift_within_the_spread_is_noise_and_beyond_it_is_not() -> None:
    old = [100.0, 101.0, 102.0, 103.0]
    assert noise.spread(old) == pytest.approx(3.0)
    allowed = 2 * noise.spread(old) / noise.median(old) + noise.QUIET
    below = [us * (1 + allowed) - 0.5 for us in old]
    above = [us * (1 + allowed) + 1.5 for us in old]
    assert noise.judge(old, below).word == "same"
    assert noise.judge(old, above).word == "slower"


def test_a_disturbed_half_of_the_rounds_changes_neither_spread_nor_verdict() -> None:
    quiet = [100.0, 100.1, 100.2, 100.3, 100.4, 100.5, 100.6, 100.7]
    disturbed = [*quiet[:5], 150.0, 170.0, 900.0]
    assert noise.spread(disturbed) == pytest.approx(noise.spread(quiet))
    assert noise.judge(quiet, [1.1 * us for us in disturbed]).word == "slower"


def test_too_few_rounds_are_not_judged() -> None:
    with pytest.raises(ValueError, match="the new run has 3 rounds; a spread needs at least 4"):
        noise.judge([1.0] * 4, [1.0] * 3)
