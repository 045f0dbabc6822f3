"""Whole attention layers on an emulated AMD GPU, beside the same layers on the reference.

GEMMs are torch's; `plan`, `append_kv`, `decode` or `sparse_decode` and `combine` are the machine code that this package
builds for that GPU, executed and checked instruction by instruction. Every part runs twice from the same state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch.utils._python_dispatch import TorchDispatchMode

import mla_suite
from mla_suite import emulator
from mla_suite.archs import ArchSpec
from mla_suite.cli import bar
from mla_suite.cli.demo_layers import Part, parts
from mla_suite.cli.emulate import launch_record
from mla_suite.cli.serving import serving
from mla_suite.core import register
from mla_suite.core.explain import Explanation
from mla_suite.errors import UsageError
from mla_suite.launch import current_arch

RTOL, ATOL = 2e-2, 8e-3
"""Tolerances of GPU MODE's amd-mla-decode task, which compares the output and the whole cache."""


class Witness(TorchDispatchMode):
    """Asks `explain` about every call of this package's operators that passes, with that call's own arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Explanation] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "mla_suite":
            self.answers.append(mla_suite.explain(func._schema.name.split("::")[1], *args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def report(arch: str, *, quiet: bool) -> dict[str, Any]:
    """Run every part of an arch on the reference and in the emulator; -> what is printed.

    `problems` holds a sentence for everything that is not as it must be, and is empty when all is well.
    """
    started = time.perf_counter()
    everywhere = current_arch(torch.empty(0))
    if everywhere is not None:
        raise UsageError(
            f"--emulate: MLA_SUITE_EMULATE={everywhere.name} leaves no reference to compare with; unset it"
        )
    with mla_suite.emulate(arch) as record:
        made = list(parts(record))
    if not quiet:
        print(f"device: CPU, emulating {arch}; no GPU is used", flush=True)
    shown: list[dict[str, Any]] = []
    total = 0
    with torch.no_grad(), bar("", total, quiet=quiet) as update:
        for making, make in made:
            update(description=making)
            here = make()
            total += 2 * len(here)
            update(total=total)
            shown += [_shown(part, record, update) for part in here]
    return {
        "arch": arch,
        "rtol": RTOL,
        "atol": ATOL,
        "seconds": round(time.perf_counter() - started, 1),
        "parts": shown,
        "problems": [f"{part['title']}: {problem}" for part in shown for problem in part["problems"]],
    }


def _shown(part: Part, arch: ArchSpec, update: Callable[..., None]) -> dict[str, Any]:
    """One part on the reference and in the emulator; `update` is that of the progress bar."""
    update(description=f"reference: {part.title}")
    expected = part.step()
    update(description=f"emulator : {part.title}", advance=1)
    with mla_suite.emulate(arch.name), emulator.configured(collect=True) as reports, Witness() as witness:
        got = part.step()
    update(advance=1)
    launches = [launch_record(report, arch, 0) for report in reports]
    backends = _backends(witness.answers, launches)
    problems = _not_native(part.operators, arch, backends, launches)
    problems += [f"{launch['kernel']}: {finding}" for launch in launches for finding in launch["findings"]]
    differences = {}
    for name, exact in expected.items():
        differences[name], sentence = _compared(name, exact, got[name])
        problems += [sentence] if sentence else []
    return {
        "title": part.title,
        "backends": backends,
        "launches": launches,
        "largest_difference": differences,
        "largest_y": expected["y"].abs().max().item(),
        "problems": problems,
    }


def _backends(answers: Sequence[Explanation], launches: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Per operator the backend and why. `combine` is no call of the layer: the attention operator launches it."""
    found = {answer.op: {"backend": answer.backend, "why": str(answer)} for answer in answers}
    if "combine" not in found and any(_operator(launch["kernel"]) == "combine" for launch in launches):
        arch = answers[0].arch
        why = f"combine on {arch} -> native ({arch}): launched by the attention operator to combine what plan split"
        found["combine"] = {"backend": "native", "why": why}
    return found


def _not_native(
    operators: Sequence[str], arch: ArchSpec, backends: dict[str, dict[str, str]], launches: Sequence[dict[str, Any]]
) -> list[str]:
    """A sentence per operator that ran otherwise than the support table promises."""
    started = {_operator(launch["kernel"]) for launch in launches}
    problems = []
    for op in operators:
        backend = backends[op]["backend"] if op in backends else "nothing"
        if serving(op, arch.name) == "native" and backend != "native":
            why = f" ({backends[op]['why']})" if op in backends else ""
            problems.append(f"{op} must run native on {arch.name}, and {backend} ran it{why}")
        if backend == "native" and op not in started:
            problems.append(f"{op} is called native, and none of its kernels was launched")
    return problems


def _compared(name: str, expected: torch.Tensor, got: torch.Tensor) -> tuple[float, str]:
    """The largest difference, and a sentence if it is too large. Quantised caches must have equal bytes."""
    if expected.element_size() == 1:
        wrong = int((expected.view(torch.uint8) != got.view(torch.uint8)).sum())
        return float(wrong), f"{name}: {wrong} bytes differ from the reference's" if wrong else ""
    distance = (got.float() - expected.float()).abs()
    beyond = ~(distance <= ATOL + RTOL * expected.float().abs())
    largest = distance.max().item()
    return largest, f"{name}: {int(beyond.sum())} values differ by up to {largest:.2e}" if beyond.any() else ""


def show(record: dict[str, Any], console: Console) -> None:
    """Print a report for people."""
    for part in record["parts"]:
        console.rule(part["title"], align="left")
        for op, found in part["backends"].items():
            console.print(found["why"], highlight=False, soft_wrap=True, markup=False)
            for launch in part["launches"]:
                if _operator(launch["kernel"]) == op:
                    console.print(f"  kernel {launch['kernel']}", highlight=False, soft_wrap=True)
        headings = ("launch", "wave instr.", "KB in", "KB out", "bound", "clocks", "findings")
        table = Table(*(Column(heading, no_wrap=True) for heading in headings), box=box.SIMPLE)
        for launch in part["launches"]:
            table.add_row(
                _operator(launch["kernel"]),
                f"{launch['instructions']:,}",
                f"{sum(launch['bytes_loaded'].values()) / 1024:,.0f}",
                f"{sum(launch['bytes_stored'].values()) / 1024:,.0f}",
                launch["bound"],
                f"{max(launch['bound_clocks'].values()):,.0f}",
                str(len(launch["findings"])),
            )
        console.print(table)
        said = ", ".join(f"{name} {value:.2e}" for name, value in part["largest_difference"].items())
        console.print(f"largest differences from the reference: {said}; y reaches {part['largest_y']:.2f}\n")
    console.print("clocks: a bound, not a time: one compute unit would need at least as many for all of a launch")
    for problem in record["problems"]:
        console.print(problem, style="red", highlight=False, soft_wrap=True, markup=False)
    verdict = f"every value within rtol {record['rtol']}, atol {record['atol']}; sanitizer: no findings"
    console.print(verdict if not record["problems"] else f"{len(record['problems'])} problems")
    console.print(f"{record['arch']} emulated on this CPU in {record['seconds']} s; nothing here ran on an AMD GPU")


def _operator(kernel: str) -> str:
    """The operator that a kernel belongs to, by its name."""
    return max((op for op in register.registry() if kernel.startswith(op)), key=len)
