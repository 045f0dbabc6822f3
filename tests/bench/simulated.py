"""Timings as a GPU gives them, simulated: replays with heavy tails, disturbed rounds, drift between passes and runs."""

from __future__ import annotations

import random
import statistics

from mla_suite.bench.measure import MAX_EXTRA
from mla_suite.bench.timer import unsettled

ROUNDS, PASSES, REPLAYS = 3, 2, 9


def run(
    true_us: float,
    source: random.Random,
    *,
    noise: float = 0.005,
    heavy: float = 0.08,
    disturbed: float = 0.03,
    drift: float = 0.004,
) -> list[float]:
    """Rounds of one run, with the passes that are added for what does not settle.

    noise      standard deviation of a replay, as a fraction
    heavy      share of replays with a Pareto tail added (infinite variance)
    disturbed  share of rounds in which something else slows everything by 5 to 50 %
    drift      standard deviation of what a run, and half of what a pass, adds
    """
    rounds: list[float] = []
    level = true_us * (1 + source.gauss(0, drift))
    for number in range(PASSES + MAX_EXTRA):
        if number >= PASSES and not unsettled(rounds):
            break
        passed = level * (1 + source.gauss(0, drift / 2))
        for _ in range(ROUNDS):
            slow = 1 + source.uniform(0.05, 0.5) if source.random() < disturbed else 1.0
            replays = []
            for _ in range(REPLAYS):
                tail = 0.05 * (source.paretovariate(1.5) - 1) if source.random() < heavy else 0.0
                replays.append(passed * slow * (1 + abs(source.gauss(0, noise)) + tail))
            rounds.append(statistics.median(replays))
    return rounds
