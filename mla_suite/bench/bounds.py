"""Bounds of AMD kernels, counted by the emulator: the least clocks of a compute unit, per resource. Never times."""

from __future__ import annotations

import torch

from mla_suite import archs as arch_records
from mla_suite.bench import inputs
from mla_suite.bench.record import Result
from mla_suite.bench.sets import Case
from mla_suite.core import dispatch, register
from mla_suite.launch import LaunchError, emulate

MOST_FLOPS = 10**9
"""Larger cases would take the emulator minutes."""


def count(case: Case, arch: str) -> Result:
    """Run the native kernels of an AMD arch in the emulator, check the result, and read the counters.

    The bounds are clocks of one compute unit when the work is spread evenly over all of the chip's. A wrong result, or
    one that the sanitizer objects to, has none.
    """
    name = f"native on {arch}, emulated"
    found = Result(case.op, case.shape, name, dict(case.facts), case.sample.bytes, case.sample.flops)
    if case.sample.flops > MOST_FLOPS:
        found.failure = f"{case.sample.flops:.1e} operations are too many to emulate; bounds are counted up to 1e9"
        return found
    record = arch_records.get(arch)
    with emulate(arch):
        call = inputs.make(case, torch.device("cpu"))
        op = register.get(case.op)
        problem = op.problem(*call.args, **call.kwargs)
        choice = dispatch.choose(case.op, op.backends, problem, record, "cpu")
        if choice.backend.name != "native":
            found.failure = dict(choice.refused).get("native", f"{case.op} has no kernel of its own for {arch}")
            return found
        # Only here: the emulator's library is built at its first use, and most runs never need it.
        from mla_suite.emulator import configured

        found.config, found.reason = str(choice.supported.config), choice.supported.reason
        try:
            right, found.checked = inputs.expected(case, call)
            with configured(collect=True) as reports:
                outputs = inputs.outputs_for(op, call)
                record_of = register.get(case.op)
                choice.backend.run(choice.supported.config, outputs, record_of.Args(*call.args, **call.kwargs))
            found.error = inputs.error(outputs, right)
        except LaunchError as error:
            found.failure = str(error).splitlines()[0]
            return found
        except ValueError as error:
            found.failure, found.wrong = str(error), True
            return found
    findings = [str(finding) for report in reports for finding in report.findings]
    if findings:  # what breaks a rule of the machine has no bounds, whatever its numbers
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        found.failure, found.wrong = f"the emulator's sanitizer found {findings[0]}{more}", True
        return found
    parts = [report.bound(record) for report in reports]
    totals = {
        "memory": sum(part.memory for part in parts),
        "matrix": sum(part.matrix for part in parts),
        "vector": sum(part.valu for part in parts),
        "LDS at 128 B": sum(part.lds_128 for part in parts),
        "LDS at 256 B": sum(part.lds_256 for part in parts),
    }
    found.counted = {resource: round(clocks / record.compute_units, 1) for resource, clocks in totals.items()}
    return found
