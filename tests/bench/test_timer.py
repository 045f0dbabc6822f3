"""Graph replay recovers a kernel's time, on a made-up device; verdicts go by the spread."""

from __future__ import annotations

import timeit
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_suite.bench import timer
from mla_suite.bench.timer import Effort, Replay

GAP_US = 4.0  # between two replays
NO_REST = Effort(rounds=3, rest_s=0.0)


class Device:
    """The part of torch.cuda that a Replay uses; `us` is the device's clock. A turn's kernel takes `kernel_us`."""

    def __init__(self, kernel_us: float) -> None:
        self.kernel_us = kernel_us
        self.us = 0.0
        self.recording: list[object] | None = None
        self.replays = 0
        self.visits: Counter[object] = Counter()

    def call(self, turn: object) -> None:
        if self.recording is not None:
            self.recording.append(turn)
        else:
            self.us += self.kernel_us + 30.0  # eager: the host is slower than the device

    def stand_in(self) -> SimpleNamespace:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.us

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at) / 1e3

        class CUDAGraph:
            def __init__(self) -> None:
                self.nodes: list[object] = []

            def replay(self) -> None:
                device.replays += 1
                device.us += GAP_US + len(self.nodes) * device.kernel_us
                device.visits.update(self.nodes)

        @contextmanager
        def graph(target: CUDAGraph) -> Iterator[None]:
            device.recording = target.nodes
            yield
            device.recording = None

        @contextmanager
        def stream(which: object) -> Iterator[None]:
            yield

        quiet = SimpleNamespace(wait_stream=lambda other: None)
        return SimpleNamespace(
            Event=Event, CUDAGraph=CUDAGraph, graph=graph, stream=stream, Stream=lambda: quiet,
            current_stream=lambda: quiet, synchronize=lambda: None, is_available=lambda: True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel_us", "turns"), [(2.1, 512), (5.0, 3), (12.0, 119), (47.0, 2), (450.0, 2), (3000.0, 2)]
)
def test_a_replay_is_worth_its_kernels(kernel_us, turns, monkeypatch):
    device = Device(kernel_us)
    monkeypatch.setattr(timer, "torch", SimpleNamespace(cuda=device.stand_in()))
    rounds = timer.device_rounds(device.call, range(turns), NO_REST)
    assert len(rounds) == 3
    # one gap per replay is in it, which is why graphs are long: 1 % at most
    assert all(kernel_us <= us <= 1.01 * kernel_us for us in rounds)


def test_every_turn_is_used_equally_and_graphs_stay_small(monkeypatch):
    device = Device(1.0)
    monkeypatch.setattr(timer, "torch", SimpleNamespace(cuda=device.stand_in()))
    replay = Replay(device.call, range(7))
    replay.round(0.0)
    assert set(device.visits) == set(range(7))
    assert len(set(device.visits.values())) == 1
    assert timer.GRAPH_US <= replay.calls * 1.0 <= timer.MAX_CALLS
    assert 5 <= replay.replays <= 16


def test_a_round_is_the_median_of_its_replays(monkeypatch):
    device = Device(100.0)
    monkeypatch.setattr(timer, "torch", SimpleNamespace(cuda=device.stand_in()))
    replay = Replay(device.call, range(4))
    plain = replay.graph.replay

    def disturbed() -> None:
        plain()
        device.us += 5000.0 if device.replays % 4 == 0 else 0.0

    monkeypatch.setattr(replay.graph, "replay", disturbed)
    assert replay.round(0.0) < 101.5


def test_sustained_time_is_that_of_the_end(monkeypatch):
    """A chip that slows down while it works: by a tenth after half a second, by a sixth at the end."""
    device = Device(100.0)
    monkeypatch.setattr(timer, "torch", SimpleNamespace(cuda=device.stand_in()))
    replay = Replay(device.call, range(4))
    assert replay.sustained(0.7) == pytest.approx(100.0, rel=0.01)
    plain, begun = replay.graph.replay, device.us

    def heating() -> None:
        before = device.us
        plain()
        since = device.us - begun
        device.us += (device.us - before) * (0.1 if since < 500_000 else 0.16)

    monkeypatch.setattr(replay.graph, "replay", heating)
    assert replay.sustained(0.7) == pytest.approx(116.0, rel=0.01)
    assert 0.6e6 < device.us - begun < 1.2e6, "about as long as asked"


def test_caches_of_amd_that_torch_does_not_count_are_counted(monkeypatch):
    properties = SimpleNamespace(L2_cache_size=4 << 20)
    stand_in = SimpleNamespace(
        cuda=SimpleNamespace(get_device_properties=lambda device: properties), version=SimpleNamespace(hip="7.0")
    )
    monkeypatch.setattr(timer, "torch", stand_in)
    assert timer.cold_bytes(torch.device("cuda")) > 2 * (256 << 20)
    stand_in.version.hip = None
    assert timer.cold_bytes(torch.device("cuda")) == 160_000_000
    properties.L2_cache_size = 126 << 20
    assert timer.cold_bytes(torch.device("cuda")) > 2 * (126 << 20)
    assert timer.cold_bytes(torch.device("cpu")) == 0


def test_turns_touch_what_a_cache_could_hold(monkeypatch):
    monkeypatch.setattr(timer, "cold_bytes", lambda device: {"cuda": 1000, "cpu": 0}[device.type])
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [timer.cold_turns(touched, gpu) for touched in (100, 101, 999, 1000, 5000)] == [10, 10, 2, 1, 1]
    assert timer.cold_turns(5000, gpu, fewest=2) == timer.cold_turns(100, cpu, fewest=2) == 2
    monkeypatch.setattr(timer, "cold_bytes", lambda device: 10**9)
    assert timer.cold_turns(0, gpu) == timer.cold_turns(1, gpu) == timer.MAX_CALLS


def test_warmup_and_iterations_are_run(monkeypatch):
    """At least as many calls as asked for, since a graph is replayed whole; without them, the timer's own numbers."""
    device = Device(30.0)
    monkeypatch.setattr(timer, "torch", SimpleNamespace(cuda=device.stand_in()))
    replay = Replay(device.call, range(5))
    plain, before = replay.replays + 1, device.replays
    replay.rounds(NO_REST)
    assert device.replays - before == 3 * plain
    before = device.replays
    (us, *_) = replay.rounds(Effort(rounds=2, rest_s=0.0, warmup=20, iters=100))
    assert 30.0 <= us <= 31.0
    assert device.replays - before == 2 * (-(-20 // replay.calls) + -(-100 // replay.calls))


@pytest.mark.parametrize("took_s", [2e-6, 0.002, 0.6])
def test_cpu_rounds_are_microseconds(took_s, monkeypatch):
    """By a clock that moves when the call does; the first call, which is slower, decides how often it is repeated."""
    now, calls = 0.0, 0

    def call() -> None:
        nonlocal now, calls
        calls += 1
        now += took_s if calls > 1 else 1.5 * took_s

    monkeypatch.setattr(timer.timeit, "Timer", partial(timeit.Timer, timer=lambda: now))
    rounds = timer.cpu_rounds(call, NO_REST)
    assert rounds == pytest.approx([took_s * 1e6] * NO_REST.rounds)
    repeats = {2e-6: 5 * 666, 0.002: 5, 0.6: 1}[took_s]
    assert calls == 1 + NO_REST.rounds * repeats


def test_a_shift_within_the_spread_is_noise_and_beyond_it_is_not():
    old = [100.0, 101.0, 102.0, 103.0]
    assert timer.spread(old) == pytest.approx(3.0)
    allowed = 2 * timer.spread(old) / timer.median(old) + timer.QUIET
    below = [us * (1 + allowed) - 0.5 for us in old]
    above = [us * (1 + allowed) + 1.5 for us in old]
    assert timer.judge(old, below).word == "same"
    assert timer.judge(old, above).word == "slower"


def test_a_disturbed_half_of_the_rounds_changes_neither_spread_nor_verdict():
    quiet = [100.0, 100.1, 100.2, 100.3, 100.4, 100.5, 100.6, 100.7]
    disturbed = [*quiet[:5], 150.0, 170.0, 900.0]
    assert timer.spread(disturbed) == pytest.approx(timer.spread(quiet))
    assert timer.judge(quiet, [1.1 * us for us in disturbed]).word == "slower"


def test_too_few_rounds_are_not_judged():
    with pytest.raises(ValueError, match="the new measurement has 3 rounds; a spread needs at least 4"):
        timer.judge([1.0] * 4, [1.0] * 3)
