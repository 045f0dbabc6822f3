"""Bounds of kernels, counted by the emulator: the least clocks of a compute unit, per resource. Never times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import extrapolation
from extrapolation import CPU, Counted

from mla_suite import archs as arch_records
from mla_suite.archs import ArchSpec
from mla_suite.bench import inputs
from mla_suite.bench.inputs import Call
from mla_suite.bench.sets import Case
from mla_suite.core import register
from mla_suite.core.dispatch import Choice
from mla_suite.core.op import Op
from mla_suite.emulator import ModelledTime, Report, SanitizerError, timing
from mla_suite.launch import LaunchError, emulate

WHOLE_FLOPS = 2 * 10**9
"""Cases up to this size, a few seconds each, are emulated whole; larger ones from equal sequences and steady loops."""


def countable(case: Case) -> bool:
    """Whether a case is small enough to be emulated whole, or has equal sequences of which one is emulated."""
    return case.sample.flops <= WHOLE_FLOPS or case.planned or case.op == "sparse_decode"


@dataclass
class Bounds:
    """Counts of an arch's native kernels on a case.

    config        what the kernel was run with
    clocks        bounds per compute unit, by resource; never times
    modelled      what the model of time makes of the launches together; None for counts that are extrapolated
    instructions  wave instructions of all launches
    error         relative error of the result
    failure       why there is no count, in a sentence; `wrong`: the result or the kernel is, not only unsupported
    """

    config: str = ""
    clocks: dict[str, float] = field(default_factory=dict)
    modelled: ModelledTime | None = None
    instructions: int = 0
    error: float = 0.0
    failure: str = ""
    wrong: bool = False


def count(case: Case, arch: str) -> Bounds:
    """Run the native kernels of an arch in the emulator, check the result, and read the counters.

    The bounds are clocks of one compute unit when the work is spread evenly over all of the chip's. A wrong result, or
    one that the sanitizer objects to, has none.
    """
    found = Bounds()
    whole = case.sample.flops <= WHOLE_FLOPS
    if not countable(case):
        found.failure = (
            f"{case.sample.flops:.1e} operations without a plan are too many to emulate; bounds are counted up to "
            f"{WHOLE_FLOPS:.0e}, and with a plan at any size"
        )
        return found
    record, op = arch_records.get(arch), register.get(case.op)
    with emulate(arch):
        call = inputs.make(case, CPU) if whole else extrapolation.one_pool(case)
        choice = op.choose(op.Args(*call.args, **call.kwargs))
        if choice.backend.name != "native":
            found.failure = dict(choice.refused).get("native", f"{case.op} has no kernel of its own for {arch}")
            return found
        found.config = str(choice.supported.config)
        try:
            if whole:
                counted = _whole(op, call, choice)
            elif case.op == "decode":
                counted = extrapolation.planned_decode(case, call, choice)
            else:
                counted = extrapolation.sparse(case, choice)
        except LaunchError as error:
            found.failure, found.wrong = _sentence(error), isinstance(error, SanitizerError)
            return found
        except ValueError as error:
            found.failure, found.wrong = str(error), True
            return found
    found.error = counted.error
    found.clocks = clocks(counted.reports, record)
    times = [report.modelled for report in counted.reports if report.modelled]
    found.modelled = timing.total(times) if times else None
    found.instructions = sum(report.instructions() for report in counted.reports)
    return found


def clocks(reports: Sequence[Report], arch: ArchSpec) -> dict[str, float]:
    """Clocks of a compute unit by resource, for launches that are spread evenly over all of the chip's."""
    parts = [report.bound(arch) for report in reports]
    totals = {
        "memory": sum(part.memory for part in parts),
        "matrix": sum(part.matrix for part in parts),
        "vector": sum(part.valu for part in parts),
        "LDS at 128 B": sum(part.lds_128 for part in parts),
        "LDS at 256 B": sum(part.lds_256 for part in parts),
    }
    return {resource: round(total / arch.compute_units, 1) for resource, total in totals.items()}


def limiter(counted: dict[str, float]) -> str:
    """The resource whose bound is highest, LDS counted at 128 bytes per clock."""
    return max(counted, key=lambda name: counted[name] if name != "LDS at 256 B" else 0.0)


def _whole(op: Op, call: Call, choice: Choice) -> Counted:
    reports, outputs = extrapolation.launches(op, choice, call, time=True)
    return Counted(reports, inputs.error(op, choice.supported.config, outputs, call))


def _sentence(error: LaunchError) -> str:
    """The first line; what the sanitizer says begins on the second."""
    if not isinstance(error, SanitizerError):
        return str(error).splitlines()[0]
    findings = error.report.findings
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"the emulator's sanitizer found {findings[0]}{more}"
