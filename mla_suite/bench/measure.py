"""Checks, then times, every backend that takes a case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mla_suite import emulator
from mla_suite.bench import inputs, runners, timer
from mla_suite.bench.floors import Floors
from mla_suite.bench.inputs import Call
from mla_suite.bench.runners import Runner
from mla_suite.bench.sets import Case
from mla_suite.bench.timer import Effort
from mla_suite.core import dispatch, register
from mla_suite.emulator import ModelledTime

CPU_FLOPS = 2 * 10**9
"""Larger cases are not timed on a CPU: the reference takes a tenth of a second at this size, and runs 30 times."""
MAX_EXTRA = 2
"""Times that rounds are taken again of a shape whose rounds lie far apart."""


@dataclass(frozen=True)
class Measured:
    """One backend on one case.

    config         what the backend was run with
    rounds         microseconds per call on the device (CPU: of the call); empty when it was not timed
    host_us        microseconds until an eager call returns; 0 on a CPU
    sustained_us   microseconds per call at the end of some time without a pause; 0 where not measured
    floor_us       the larger of the two floors, and which it is (`bound`); 0 and '' where none was measured
    modelled       what a model makes of the time of an emulated GPU; nothing is measured then
    error          of the result, relative to the definition in fp64
    failure        why there is no time, in a sentence; '' when there is one
    wrong          the failure is a wrong result or a fault, not an unsupported case
    """

    case: Case
    backend: str
    config: str = ""
    rounds: tuple[float, ...] = ()
    host_us: float = 0.0
    sustained_us: float = 0.0
    floor_us: float = 0.0
    bound: str = ""
    modelled: ModelledTime | None = None
    error: float = 0.0
    failure: str = ""
    wrong: bool = False

    @property
    def us(self) -> float:
        return timer.median(self.rounds) if self.rounds else 0.0

    def facts(self) -> dict[str, str | float | int]:
        """Times, rates and the error by name, as a row of a CSV file or the extra of a benchmark."""
        us, sample = self.us, self.case.sample
        return {
            "op": self.case.op,
            "shape": self.case.shape,
            "backend": self.backend,
            "us": us,
            "spread_percent": 100 * timer.spread(self.rounds) / us if us else 0.0,
            "sustained_us": self.sustained_us,
            "host_us": self.host_us,
            "gb_per_s": sample.bytes / us / 1e3 if us else 0.0,
            "tflops": sample.flops / us / 1e6 if us else 0.0,
            "floor_us": self.floor_us,
            "over_floor": us / self.floor_us if self.floor_us else 0.0,
            "bound": self.bound,
            "modelled_us": self.modelled.us if self.modelled else 0.0,
            "modelled": str(self.modelled or ""),
            "bytes": sample.bytes,
            "flops": sample.flops,
            "error": self.error,
            "config": self.config,
            "failure": self.failure,
        }


def measure(
    case: Case, device: torch.device, effort: Effort, *, backends: Sequence[str] = (), floors: Floors | None = None
) -> Iterator[Measured]:
    """Yields a record for each backend that is asked for, as it is measured; what fails says why.

    backends  names to run; none: native and triton on a GPU, native where one is emulated, the reference on a CPU
    """
    none = Measured(case, "any")
    if device.type == "cpu" and case.sample.flops > CPU_FLOPS:
        sentence = f"a CPU takes minutes for {case.sample.flops:.1e} operations; calls up to {CPU_FLOPS:.0e} are timed"
        yield replace(none, failure=sentence)
        return
    try:
        call = inputs.make(case, device)
        turns = inputs.rotation(call, timer.cold_turns(case.sample.bytes, device, 2))
    except torch.OutOfMemoryError:
        yield replace(none, failure="its tensors and a second set of them do not fit the device's memory")
        return
    except RuntimeError as error:  # after a kernel's fault the device refuses everything: what was measured is kept
        yield replace(none, failure=" ".join(str(error).split()), wrong=True)
        return
    emulated = device.type != "cuda" and dispatch.emulated.get() is not None
    usual = ("native", "triton") if device.type == "cuda" else ("native",) if emulated else ("reference",)
    wanted = backends or usual
    for runner in runners.backends(register.get(case.op), call, wanted, device):
        if isinstance(runner, Runner):
            found = _timed(case, runner, turns, effort, device)
        else:
            found = Measured(case, runner.name, failure=runner.why)
        yield _with_floor(found, floors)


def _with_floor(found: Measured, floors: Floors | None) -> Measured:
    if floors is None:
        return found
    case = found.case
    floor_us, bound = floors.of(case.sample.bytes, case.sample.flops, fp8=case.fp8_products)
    return replace(found, floor_us=floor_us, bound=bound)


def _timed(case: Case, runner: Runner, turns: Sequence[Call], effort: Effort, device: torch.device) -> Measured:
    found = Measured(case, runner.name, runner.config)
    try:
        modelled = None
        if runner.name == "native" and device.type != "cuda":
            error, modelled = emulator.modelled(lambda: runner.error(turns[0]))
        else:
            error = runner.error(turns[0])
        found = replace(found, error=error, modelled=modelled)
        if modelled:
            return found
        if device.type != "cuda":
            return replace(found, rounds=tuple(timer.cpu_rounds(lambda: runner.eager(turns[0]), effort)))
        replay = timer.Replay(runner.run, turns)
        rounds = replay.rounds(effort)
        for _ in range(MAX_EXTRA):
            if timer.unsettled(rounds):
                rounds += replay.rounds(effort)
        sustained = replay.sustained(effort.sustained_s) if effort.sustained_s else 0.0
        host = timer.median(timer.host_rounds(lambda: runner.eager(turns[0]), effort))
        return replace(found, rounds=tuple(rounds), sustained_us=sustained, host_us=host)
    except Exception as error:  # a kernel that cannot be compiled, launched or trusted is its case's result
        sentence = " ".join(str(error).split())
        return replace(found, failure=sentence or type(error).__name__, wrong=True)
