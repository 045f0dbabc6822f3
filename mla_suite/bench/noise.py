"""The worth of a measured time: the median of its rounds, their spread, and whether two runs differ by more.

A round is itself the median of several replays, so a slow replay costs nothing. Rounds lie apart in time, in several
passes over a whole set, so their spread holds what clocks, heat and neighbours do within a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mla_suite.errors import UsageError

FEWEST_ROUNDS = 4
QUIET = 0.025
"""H200 cards differ by this much in memory-bound work, and the same card from one hour to the next by less."""


UNSETTLED = 0.035
"""A larger spread, as a fraction, asks for more rounds: two such runs and QUIET would hide a change of 9.5 %."""
MAX_EXTRA = 2
"""Passes added for shapes that do not settle."""


def spread(rounds: Sequence[float]) -> float:
    """Twice the distance from the fastest round to the median, in the rounds' unit.

    Disturbances only ever make a round slower, so the slower half says nothing about the kernel: up to half of the
    rounds may be disturbed. With 8 rounds of normal noise this is 2.8 standard deviations.
    """
    return 2 * (median(rounds) - min(rounds))


def unsettled(rounds: Sequence[float]) -> bool:
    """Whether the rounds are so far apart that another pass is worth its time: a verdict would miss 10 %."""
    return spread(rounds) > UNSETTLED * median(rounds)


@dataclass(frozen=True)
class Verdict:
    """How a time changed. `change` and `allowed` are fractions of the old time; `word` is slower, faster or same."""

    change: float
    allowed: float
    word: str

    def __str__(self) -> str:
        return f"{self.change:+.1%} ({self.word}; noise {self.allowed:.1%})"


def judge(old: Sequence[float], new: Sequence[float], drift: float = 0.0) -> Verdict:
    """Compare the rounds of two runs of one shape. `same` unless the medians differ by more than both runs' spread.

    drift   a fraction that is allowed in addition: how far the ceilings measured in the two runs lie apart

    ValueError when a run has fewer rounds than a spread needs.
    """
    for name, rounds in (("old", old), ("new", new)):
        if len(rounds) < FEWEST_ROUNDS:
            raise UsageError(f"the {name} run has {len(rounds)} rounds; a spread needs at least {FEWEST_ROUNDS}")
    before = median(old)
    change = median(new) / before - 1
    allowed = (spread(old) + spread(new)) / before + QUIET + drift
    word = "slower" if change > allowed else "faster" if change < -allowed else "same"
    return Verdict(change, allowed, word)
