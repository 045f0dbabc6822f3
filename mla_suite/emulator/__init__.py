"""An AMD gfx942 or gfx950 for machines without one: machine code executed on the CPU, checked and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mla_suite.core import checks
from mla_suite.emulator.assembly import AssemblyError, kernel_names
from mla_suite.emulator.driver import EmulatorDriver, Options, options
from mla_suite.emulator.machine import THREADS, Emulator, Memory, Schedule
from mla_suite.emulator.program import Program
from mla_suite.emulator.report import Bound, Finding, Report, SanitizerError
from mla_suite.emulator.snippet import State, run_snippet
from mla_suite.emulator.timing import ModelledTime, total

__all__ = [
    "AssemblyError",
    "Bound",
    "Emulator",
    "EmulatorDriver",
    "Finding",
    "Memory",
    "ModelledTime",
    "Program",
    "Report",
    "SanitizerError",
    "Schedule",
    "State",
    "configured",
    "kernel_names",
    "modelled",
    "run_snippet",
]


T = TypeVar("T")


@contextmanager
def configured(
    *, threads: int = THREADS, order: str = "forward", collect: bool = False, time: bool = False
) -> Iterator[list[Report]]:
    """Within the block, and in this thread, launches of the emulator run so. Yields a list.

    threads  host threads over workgroups
    order    of the workgroups: 'forward', 'reverse', 'shuffle:<seed>' or a permutation of their numbers

    With `collect` each launch appends its Report to the list and findings do not raise; without, the list stays empty.
    With `time` each Report has a modelled time.
    """
    reports: list[Report] = []
    chosen = Options(Schedule(threads=threads, order=order, time=time), reports if collect else None)
    with checks.having(options, chosen):
        yield reports


def modelled(call: Callable[[], T]) -> tuple[T, ModelledTime | None]:
    """What `call` returns, and the modelled time of its launches together; None where it launched nothing.

    SanitizerError for the first launch with a finding.
    """
    with configured(collect=True, time=True) as reports:
        result = call()
    for report in reports:
        if report.findings:
            raise SanitizerError(report)
    times = [report.modelled for report in reports if report.modelled]
    return result, total(times) if times else None
