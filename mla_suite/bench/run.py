"""Runs cases: check, then time, every backend that takes a shape, and other packages that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from mla_suite.bench import bounds, clock, inputs, noise, third_party
from mla_suite.bench.clock import Effort
from mla_suite.bench.floors import Floors
from mla_suite.bench.inputs import Call, Right
from mla_suite.bench.record import Result
from mla_suite.bench.runners import Runner
from mla_suite.bench.runners import backends as runners_of
from mla_suite.bench.sets import Case
from mla_suite.core import register

CPU_FLOPS = 2 * 10**9
"""Larger cases are not timed on a CPU: the reference takes a tenth of a second at this size, and runs 30 times."""

Progress = Callable[[str, int], None]
"""Told what is being measured, and the steps done so far."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C before the end. `results` are those with a time or a count, as far as they came."""

    def __init__(self, results: list[Result]) -> None:
        super().__init__()
        self.results = results


def run(
    cases: Sequence[Case],
    device: torch.device,
    effort: Effort,
    *,
    backends: Sequence[str] = (),
    with_third_party: bool = True,
    floors: Floors | None = None,
    emulated: Sequence[str] = (),
    progress: Progress = lambda what, done: None,
) -> list[Result]:
    """Every case in every pass, so that a shape's rounds lie apart in time; then again those that did not settle.

    backends   names to run; empty: native and triton on a GPU, the reference on a CPU
    emulated   archs whose bounds are counted in the emulator; on a CPU only

    Stopped, a KeyboardInterrupt, has what was measured when Ctrl-C came.
    """
    found: dict[tuple[str, str, str], Result] = {}
    steps = 0
    try:
        for number in range(effort.passes + noise.MAX_EXTRA):
            extra = number >= effort.passes
            again = {(r.op, r.shape) for r in found.values() if r.rounds and noise.unsettled(r.rounds)}
            for case in cases:
                if extra and (case.op, case.shape) not in again:
                    continue
                progress(f"{case.id} once more" if extra else case.id, steps)
                for result in _case(case, device, effort, backends, with_third_party, found, first=number == 0):
                    found.setdefault(result.key, result)
                for arch in emulated if number == 0 else ():
                    counted = bounds.count(case, arch)
                    found[counted.key] = counted
                steps += not extra
        progress("done", steps)
    except KeyboardInterrupt:
        results = _with_floors(cases, found, floors)
        raise Stopped([result for result in results if result.rounds or result.counted]) from None
    return _with_floors(cases, found, floors)


def _with_floors(
    cases: Sequence[Case], found: dict[tuple[str, str, str], Result], floors: Floors | None
) -> list[Result]:
    fp8 = {(case.op, case.shape) for case in cases if case.fp8_products}
    for result in found.values():
        if floors is not None:
            own = (result.op, result.shape) in fp8
            result.floor_us, result.bound = floors.of(result.bytes, result.flops, fp8=own)
    return list(found.values())


def _case(
    case: Case,
    device: torch.device,
    effort: Effort,
    backends: Sequence[str],
    with_third_party: bool,
    found: dict[tuple[str, str, str], Result],
    first: bool,
) -> Iterable[Result]:
    op = register.get(case.op)
    shape = (dict(case.facts), case.sample.bytes, case.sample.flops)
    if device.type == "cpu" and case.sample.flops > CPU_FLOPS:
        sentence = f"a CPU takes minutes for {case.sample.flops:.1e} operations; calls up to {CPU_FLOPS:.0e} are timed"
        yield Result(case.op, case.shape, "reference", *shape, failure=sentence)
        return
    try:
        call = inputs.make(case, device)
        right = inputs.expected(case, call) if first else None
        turns = inputs.rotation(call, case.sample.bytes, clock.cold_bytes(device), clock.MAX_CALLS)
    except torch.OutOfMemoryError:
        sentence = "its tensors and a second set of them do not fit the device's memory"
        yield Result(case.op, case.shape, "any backend", *shape, failure=sentence)
        return
    except RuntimeError as error:  # after a kernel's fault the device refuses everything: what was measured is kept
        yield Result(case.op, case.shape, "any backend", *shape, failure=" ".join(str(error).split()), wrong=True)
        return
    wanted = backends or (("native", "triton") if device.type == "cuda" else ("reference",))
    runners = list(runners_of(op, call, wanted, device))
    if with_third_party and device.type == "cuda":
        runners += [package.runner(case, call) for package in third_party.installed()]
    for runner in runners:
        fresh = Result(case.op, case.shape, runner.name, *shape, runner.config, runner.reason)
        result = found.get(fresh.key, fresh)
        if runner.unsupported is not None:
            result.failure = runner.unsupported
        elif not result.failure:
            _measure(result, runner, turns, right, effort, device)
        yield result


def _measure(
    result: Result,
    runner: Runner,
    turns: Sequence[Call],
    right: Right | None,
    effort: Effort,
    device: torch.device,
) -> None:
    """Append the rounds of one pass to a result; before the first, compare what is computed with what is `right`."""
    run, eager = runner.run, runner.eager
    assert run is not None  # only an unsupported case has none
    assert eager is not None
    try:
        if right is not None and not result.checked:
            is_definition = result.backend == "reference" and right.source == "reference"
            result.checked = "definition" if is_definition else right.source
            error = runner.error(turns[0], right)
            result.error = 0.0 if is_definition else error
        if device.type == "cuda":
            replay = clock.Replay(run, turns)
            result.rounds += replay.rounds(effort)
            if effort.sustained_s and not result.sustained_us:
                result.sustained_us = replay.sustained(effort.sustained_s)
            result.host_rounds += clock.host_rounds(lambda: eager(turns[0]), effort)
        else:
            result.rounds += clock.cpu_rounds(lambda: eager(turns[0]), effort)
    except Exception as error:  # a kernel that cannot be compiled, launched or trusted is its case's result
        sentence = " ".join(str(error).split())
        result.failure, result.wrong, result.rounds = sentence or type(error).__name__, True, []
