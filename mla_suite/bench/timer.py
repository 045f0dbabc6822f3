"""Time of a call: on the device by graph replay with cold caches, on the host eagerly, and on a CPU.

All times are microseconds per call. A round is the median of several replays, so a slow replay costs nothing; `spread`
says what the median of some rounds is worth, and `judge` whether two sets of rounds differ by more than that. The
pytest-benchmark files, `python -m mla_suite bench` and `tune` all take their times from here.
"""

from __future__ import annotations

import itertools
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from mla_suite.errors import UsageError

MAX_CALLS = 2048  # nodes of a graph: 60 ms to capture, and 80 MB if a call touches only 40 kB
GRAPH_US = 500.0  # shorter graphs would show the gap between two replays, about 2 us
ROUND_US = 20_000.0  # longer rounds would run into the power limit, which is another measurement
REST_S = 0.15  # before each round, so that every round starts with a cool chip and idle memory
SUSTAINED_S = 0.7  # without a pause; after so long an H200 under its power limit has slowed down by what it will


FEWEST_ROUNDS = 4
QUIET = 0.025  # H200 cards differ by this much in memory-bound work; one card from one hour to the next by less
UNSETTLED = 0.035  # with a larger spread, as a fraction, two such runs and QUIET would hide a change of 9.5 %


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds, rest before each, seconds without a pause after them (0: not measured).

    warmup, iters  calls before each round and in it, at least: a graph is replayed whole; 0: as many as the clock needs
    """

    rounds: int = 6
    rest_s: float = REST_S
    sustained_s: float = 0.0
    warmup: int = 0
    iters: int = 0


def cold_bytes(device: torch.device) -> int:
    """Bytes that calls must touch in turn so that none finds its data in a cache."""
    if device.type != "cuda":
        return 0
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    if torch.version.hip:
        cache += 256 << 20  # MI300's Infinity Cache, which L2_cache_size does not count
    return max(160_000_000, cache * 8 // 3)


def cold_turns(touched: int, device: torch.device, fewest: int = 1) -> int:
    """How many inputs calls must rotate through that touch so many bytes each, so that none finds its data in a cache:
    `fewest` at least, MAX_CALLS at most."""
    return min(max(fewest, -(-cold_bytes(device) // max(touched, 1))), MAX_CALLS)


def queued_us(call: Callable[[], object], count: int = 1) -> float:
    """Time of a call on the device, of `count` that are queued one behind the other."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / count


class Replay:
    """A captured graph of calls over rotating inputs, to be timed in rounds.

    call   launches work for one of `turns`
    turns  the inputs to rotate through
    """

    def __init__(self, call: Callable[[Any], object], turns: Sequence[Any]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for turn in turns[:3]:  # compile, load and grow scratch before anything is recorded
                call(turn)
        torch.cuda.current_stream().wait_stream(stream)
        self._call, self._turns = call, turns
        most = max(1, MAX_CALLS // len(turns))
        cycles = min(most, -(-4 // len(turns)))
        self._capture(cycles)
        took = self._replay_us()
        while took < GRAPH_US and cycles < most:  # more than once where the gap was most of it
            cycles = min(most, int(1.1 * cycles * GRAPH_US / took) + 1)
            self._capture(cycles)
            took = self._replay_us()
        self.replays = min(16, max(5, int(ROUND_US / took)))

    def _capture(self, cycles: int) -> None:
        self.calls = cycles * len(self._turns)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for index in range(self.calls):
                self._call(self._turns[index % len(self._turns)])

    def _replay_us(self) -> float:
        """Time of one replay, after another."""
        self.graph.replay()
        return queued_us(self.graph.replay)

    def round(self, rest_s: float = REST_S, warmup: int = 0, iters: int = 0) -> float:
        """Median over the replays of one round; `warmup` and `iters` as in an Effort."""
        time.sleep(rest_s)
        replays = -(-iters // self.calls) or self.replays
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        for _ in range(max(1, -(-warmup // self.calls))):  # brings clocks and memory up after the rest
            self.graph.replay()
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        return self._us(events)

    def rounds(self, effort: Effort) -> list[float]:
        """As many rounds as the effort says."""
        return [self.round(effort.rest_s, effort.warmup, effort.iters) for _ in range(effort.rounds)]

    def sustained(self, seconds: float = SUSTAINED_S) -> float:
        """Time of a call after `seconds` of replays without a pause: the median of the last quarter."""
        count = max(16, int(seconds * 1e6 / self._replay_us()))
        late = count - count // 4
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count - late + 1)]
        for index in range(count):
            if index >= late:
                events[index - late].record()
            self.graph.replay()
        events[-1].record()
        return self._us(events)

    def _us(self, events: Sequence[torch.cuda.Event]) -> float:
        """Time of a call, by the median of the replays between events."""
        torch.cuda.synchronize()
        return median([first.elapsed_time(second) for first, second in itertools.pairwise(events)]) * 1e3 / self.calls


def device_rounds(call: Callable[[Any], object], turns: Sequence[Any], effort: Effort) -> list[float]:
    """Rounds of a call on the device."""
    return Replay(call, turns).rounds(effort)


def host_rounds(call: Callable[[], object], effort: Effort) -> list[float]:
    """Time until an eager call returns, per round; the device's queue holds more than the 24 calls of a round."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    timer = timeit.Timer(call)
    timer.timeit(3)
    rounds = []
    for _ in range(effort.rounds):
        synchronize()
        rounds.append(median(timer.repeat(24, number=1)) * 1e6)
    synchronize()
    return rounds


def cpu_rounds(call: Callable[[], object], effort: Effort) -> list[float]:
    """Time of a call on the CPU: each round the median of five repeats that take at least 10 ms together.

    With `iters` of the effort each round is the median of that many calls.
    """
    timer = timeit.Timer(call)
    first = timer.timeit(1)
    calls, repeats = max(1, int(0.002 / max(first, 1e-7))), 5 if first < 0.5 else 1
    if effort.iters:
        calls, repeats = 1, effort.iters
    rounds = []
    for _ in range(effort.rounds):
        timer.timeit(effort.warmup)
        rounds.append(median(timer.repeat(repeats, calls)) / calls * 1e6)
    return rounds


def spread(rounds: Sequence[float]) -> float:
    """Twice the distance from the fastest round to the median, in the rounds' unit.

    Disturbances only ever make a round slower, so the slower half says nothing about the kernel: up to half of the
    rounds may be disturbed. With 8 rounds of normal noise this is 2.8 standard deviations.
    """
    return 2 * (median(rounds) - min(rounds))


def unsettled(rounds: Sequence[float]) -> bool:
    """Whether the rounds are so far apart that further ones are worth their time: a verdict would miss 10 %."""
    return spread(rounds) > UNSETTLED * median(rounds)


@dataclass(frozen=True)
class Verdict:
    """How a time changed. `change` and `allowed` are fractions of the old time; `word` is slower, faster or same."""

    change: float
    allowed: float
    word: str

    def __str__(self) -> str:
        return f"{self.change:+.1%} ({self.word}; noise {self.allowed:.1%})"


def judge(old: Sequence[float], new: Sequence[float]) -> Verdict:
    """Compare two sets of rounds of one shape. `same` unless the medians differ by more than both spreads and QUIET.

    UsageError when one has fewer rounds than a spread needs.
    """
    for name, rounds in (("old", old), ("new", new)):
        if len(rounds) < FEWEST_ROUNDS:
            raise UsageError(
                f"the {name} measurement has {len(rounds)} rounds; a spread needs at least {FEWEST_ROUNDS}"
            )
    before = median(old)
    change = median(new) / before - 1
    allowed = (spread(old) + spread(new)) / before + QUIET
    word = "slower" if change > allowed else "faster" if change < -allowed else "same"
    return Verdict(change, allowed, word)
