"""Modelled time of our decode on problems too large to emulate: never a measured time.

All sequences are equally long, so one of them is emulated beside empty ones, in a launch that has the workgroups of the
whole batch; each of its workgroups has its keys shortened by whole periods (extrapolation.py), whose time is added
again. Then the workgroups of the whole batch are put on the chip as those of any emulated launch are. A combine behind
them reads as many partial results of every row, so all of its workgroups take as long as its slowest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import extrapolation
import numpy as np
import torch
from extrapolation import PERIOD, STEADY

from mla_suite import archs
from mla_suite.archs import ArchSpec
from mla_suite.bench import inputs, sets
from mla_suite.bench.inputs import Call
from mla_suite.core import register
from mla_suite.core.prepared import ceil_div
from mla_suite.emulator import ModelledTime, Report, timing
from mla_suite.launch import emulate
from mla_suite.ops.plan.scheduler import round_up


@dataclass(frozen=True)
class Problem:
    """Equal sequences of `keys` keys in pages of `page` tokens; `cache` and `queries` are bf16, fp16 or fp8."""

    batch: int
    heads: int
    q_len: int
    keys: int
    cache: str = "bf16"
    queries: str = "bf16"
    page: int = 64

    def call(self, arch: ArchSpec, lens: list[int]) -> Call:
        """The arguments with other lengths, whose sequences share the pages of the longest."""
        fnuz = arch.fp8 == "fnuz"
        fp8 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": fp8}[self.queries]
        kv_format = "fp8_fnuz" if fnuz and self.cache == "fp8" else self.cache
        types: dict[str, Any] = dict(kv_format=kv_format, dtype=dtype)
        case = sets.decode(self.batch, self.heads, self.keys, self.q_len, page=self.page, **types)
        return extrapolation.one_pool(replace(case, lens=tuple(lens)))


def modelled(arch_name: str, problem: Problem, num_splits: int = 0) -> ModelledTime:
    """The modelled time of decode without a plan and of its combine; `num_splits` 0 are those that it would choose.

    ValueError where the arch has no kernel for it.
    """
    arch, op = archs.get(arch_name), register.get("decode")
    with emulate(arch_name):
        call = problem.call(arch, [problem.keys] * problem.batch)
        args = op.Args(*call.args, **call.kwargs)
        choice = op.choose(args)
        if choice.backend.name != "native":
            raise ValueError(f"{arch_name} has no decode kernel for {problem}: {dict(choice.refused).get('native')}")
        chosen = choice.supported.config.spec(inputs.outputs_for(op, call), args).launches[0].numbers["num_splits"]
        splits = num_splits or int(chosen)
        left_out = max(0, (round_up(ceil_div(problem.keys, splits)) - STEADY) // PERIOD)

        def reports(periods: int) -> list[Report]:
            """Of the first sequence alone, with `periods` left out of each of its splits."""
            keys = problem.keys - periods * PERIOD * splits
            call = problem.call(arch, [keys] + [0] * (problem.batch - 1))
            call = Call(call.args, call.kwargs | {"num_splits": splits})
            return extrapolation.launches(op, choice, call, time=True)[0]

        found = reports(left_out)
        times = _busiest(found[0], problem.batch)
        if left_out:
            more = _busiest(reports(left_out - 1)[0], problem.batch)
            times = _sum(times, more, left_out)
    parts = [_on_chip(arch, found[0], np.tile(times, problem.batch))]
    parts += [_on_chip(arch, each, _slowest(each)) for each in found[1:]]
    return timing.total(parts)


def _busiest(report: Report, batch: int) -> np.ndarray:
    """Times of one sequence's workgroups, [models, workgroups / batch]: those that took longest have its keys."""
    groups = _groups(report)
    order = np.argsort(-groups[0]["clocks"], kind="stable")[: groups.shape[1] // batch]
    return groups[:, np.sort(order)]


def _slowest(report: Report) -> np.ndarray:
    """The time of the slowest workgroup for each of the launch."""
    groups = _groups(report)
    slowest = int(np.argmax(groups[0]["clocks"]))
    return np.repeat(groups[:, slowest : slowest + 1], groups.shape[1], axis=1)


def _sum(times: np.ndarray, longer: np.ndarray, periods: int) -> np.ndarray:
    """`times` and, `periods` times, what a period more adds."""
    found = times.copy()
    for name in times.dtype.names or ():
        found[name] += periods * (longer[name] - times[name])
    return found


def _groups(report: Report) -> np.ndarray:
    assert report.groups is not None, "a launch that is emulated with `time` has the times of its workgroups"
    return report.groups


def _on_chip(arch: ArchSpec, report: Report, times: np.ndarray) -> ModelledTime:
    """The modelled time of a launch like `report`'s whose workgroups take `times`."""
    assert report.modelled is not None
    return timing.launch(arch, report.modelled.copies, times)
