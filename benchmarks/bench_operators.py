"""Every operator's backends on a named set of shapes, for pytest-benchmark.

pytest benchmarks/bench_operators.py --benchmark-enable --set flashmla --benchmark-json=run.json

What pytest-benchmark times is the eager call as the host sees it. Device time by graph replay with cold caches, the
rates it means, its ratio to the floors of the same session and the versions of everything are in `extra_info`. Results
are compared with the reference first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_suite.bench import clock, contenders, environment, floors, inputs, noise
from mla_suite.bench.clock import Effort
from mla_suite.bench.record import Result
from mla_suite.bench.sets import Case
from mla_suite.core import register

EFFORT = Effort(rounds=4, passes=1)


@pytest.fixture(scope="session")
def machine(device: torch.device) -> dict[str, Any]:
    return environment.describe(device)


@pytest.fixture(scope="session")
def ceilings(device: torch.device) -> floors.Floors | None:
    return floors.measure(device) if device.type == "cuda" else None


def test_operator(
    benchmark: Any,
    shape: str,
    case: Case,
    backend: str,
    device: torch.device,
    machine: dict[str, Any],
    ceilings: floors.Floors | None,
) -> None:
    op = register.get(case.op)
    call = inputs.make(case, device)
    contender = next(contenders.backends(op, call, [backend], device), None)
    if contender is None or contender.refusal is not None:
        pytest.skip(f"{case.op} {backend}: {contender.refusal if contender else 'the operator has no such backend'}")
    right, source = inputs.expected(case, call)
    error = inputs.error(contender.answer(call), right)

    benchmark(contender.eager, call)

    result = Result(
        case.op, case.shape, backend, dict(case.facts), case.sample.bytes, case.sample.flops, contender.config
    )
    if device.type == "cuda" and benchmark.enabled:
        turns = inputs.rotation(call, case.sample.bytes, clock.cold_bytes(device), clock.MOST_CALLS)
        result.rounds = clock.device_rounds(contender.run, turns, EFFORT)
        result.floor_us, result.bound = ceilings.of(result.bytes, result.flops) if ceilings else (0.0, "")
    elif benchmark.enabled:
        result.rounds = [benchmark.stats.stats.median * 1e6]
    benchmark.extra_info |= machine | {
        "config": contender.config,
        "reason": contender.reason,
        "error": error,
        "checked": source,
        "bytes": result.bytes,
        "flops": result.flops,
        "device_us": result.us if device.type == "cuda" else None,
        "spread_percent": 100 * noise.spread(result.rounds) / result.us if result.rounds else None,
        "gb_per_s": result.gb_per_s,
        "tflops": result.tflops,
        "floor_us": result.floor_us,
        "over_floor": result.over_floor,
        "bound": result.bound,
    }
