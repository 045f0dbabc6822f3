"""Every operator's backends on a named set of shapes, tracked by pytest-benchmark.

    pytest benchmarks --set flashmla -k device_time --benchmark-autosave
    pytest benchmarks --set flashmla -k device_time --benchmark-compare --benchmark-compare-fail=median:5%

On a GPU the statistic that is stored and compared is the device time of a call, by replay of a CUDA graph with cold
caches; host time until an eager call returns is a benchmark beside it. Without a GPU the statistic is what the emulator
counts for AMD kernels: the bound of a compute unit in clocks, and wave instructions; and what a model of time makes of
them, with its class and how far it was from published times. Those are the same on every machine, so the stored
baseline of set `counted` holds to the last instruction:

    pytest benchmarks --set counted -k "clocks or instructions or modelled" \\
        --benchmark-compare=benchmarks/baselines/counted.json --benchmark-compare-fail=median:0%

Every result is compared with fp64 or the reference before it is measured. What was run, its error, the rates that the
time means and its ratio to the roofline of the same session are in `extra_info`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import meter
import pytest
import torch

from mla_suite.bench import floors, inputs, runners, timer
from mla_suite.bench.inputs import Call
from mla_suite.bench.measure import Measured
from mla_suite.bench.runners import Runner
from mla_suite.bench.sets import Case
from mla_suite.core import register

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
import counted_bounds as bounds
from counted_bounds import Bounds

ROUNDS = 8


@pytest.fixture(scope="session")
def ceilings(device: torch.device, request: pytest.FixtureRequest) -> floors.Floors | None:
    enabled = not request.config.getoption("benchmark_disable") or request.config.getoption("benchmark_enable")
    wanted = enabled and not request.config.getoption("no_floors")
    return floors.measure(device) if device.type == "cuda" and wanted else None


def checked(case: Case, backend: str, device: torch.device, benchmark: Any) -> tuple[Runner, Call]:
    """A backend whose result is right, and the call. Skips what the backend does not take."""
    op = register.get(case.op)
    call = inputs.make(case, device)
    runner = next(runners.backends(op, call, [backend], device), None)
    if not isinstance(runner, Runner):
        pytest.skip(f"{case.op} {backend}: {runner.why if runner else 'the operator has no such backend'}")
    benchmark.extra_info |= {"config": runner.config, "reason": runner.reason, "error": runner.error(call)}
    return runner, call


@pytest.mark.benchmark(group="device time", timer=meter.meter)
def test_device_time(
    benchmark: Any, case: Case, backend: str, gpu: torch.device, ceilings: floors.Floors | None
) -> None:
    runner, call = checked(case, backend, gpu, benchmark)
    if not benchmark.enabled:
        return
    turns = inputs.rotation(call, timer.cold_turns(case.sample.bytes, gpu, 2))
    replay, rounds = timer.Replay(runner.run, turns), list[float]()

    def one_round() -> None:
        rounds.append(replay.round())
        meter.add(rounds[-1] * 1e-6)

    benchmark.pedantic(one_round, setup=meter.reset, rounds=ROUNDS)
    floor_us, bound = (0.0, "")
    if ceilings is not None:
        floor_us, bound = ceilings.of(case.sample.bytes, case.sample.flops, fp8=case.fp8_products)
    found = Measured(case, backend, rounds=tuple(rounds), floor_us=floor_us, bound=bound)
    kept = ("us", "spread_percent", "gb_per_s", "tflops", "floor_us", "over_floor", "bound", "bytes", "flops")
    benchmark.extra_info |= {name: found.facts()[name] for name in kept}


@pytest.mark.benchmark(group="host time")
def test_host_time(benchmark: Any, case: Case, backend: str, device: torch.device) -> None:
    """Until an eager call returns; on a CPU that is when the result is there."""
    runner, call = checked(case, backend, device, benchmark)
    benchmark(runner.eager, call)
    if device.type == "cuda":
        torch.cuda.synchronize()


_counted: dict[tuple[str, str], Bounds] = {}


def counts(case: Case, arch: str, benchmark: Any, stored: frozenset[str]) -> Bounds:
    """Counts of the emulator, made once for both statistics. Skips what the arch has no kernel for, unless it had."""
    key = case.id, arch
    if key not in _counted:
        _counted[key] = bounds.count(case, arch)
    found = _counted[key]
    assert not found.wrong, found.failure
    if found.failure:
        assert benchmark.fullname not in stored, f"the compared run has it, but now: {found.failure}"
        pytest.skip(f"{case.op} on {arch}: {found.failure}")
    benchmark.extra_info |= {"config": found.config, "clocks": found.clocks}
    return found


@pytest.mark.benchmark(group="clocks", timer=meter.meter)
def test_clocks(benchmark: Any, case: Case, arch: str, stored: frozenset[str]) -> None:
    """The highest bound of a compute unit, work spread evenly over the chip's: never a time."""
    found = counts(case, arch, benchmark, stored)
    benchmark.pedantic(meter.add, (found.clocks[bounds.limiter(found.clocks)],), setup=meter.reset)


@pytest.mark.benchmark(group="instructions", timer=meter.meter)
def test_instructions(benchmark: Any, case: Case, arch: str, stored: frozenset[str]) -> None:
    """Wave instructions of all launches."""
    found = counts(case, arch, benchmark, stored)
    benchmark.pedantic(meter.add, (float(found.instructions),), setup=meter.reset)


@pytest.mark.benchmark(group="modelled ns", timer=meter.meter)
def test_modelled(benchmark: Any, case: Case, arch: str, stored: frozenset[str]) -> None:
    """A modelled time, never a measured one: nanoseconds of all launches. Its class and error name the group."""
    found = counts(case, arch, benchmark, stored)
    if found.modelled is None:
        pytest.skip("extrapolated counts have no modelled time")
    benchmark.group = f"modelled ns, {arch}, {found.modelled.known}"
    benchmark.extra_info["modelled"] = str(found.modelled)
    benchmark.pedantic(meter.add, (round(1e3 * found.modelled.us),), setup=meter.reset)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    parser.error("pytest runs these benchmarks: pytest benchmarks --set NAME")
