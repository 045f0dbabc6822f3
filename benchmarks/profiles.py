"""Kernels of steps that torch's profiler saw: when the device was busy, and what attention took."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

Kernel = tuple[str, float, float]  # name, start and end in us
NONE: Kernel = ("", float("inf"), float("inf"))  # behind the last
ATTENTION = re.compile(
    r"^decode_|combine(?!_sampled)|flash_fwd_splitkv_mla_kernel|FlashAttnFwd(Sm90|Combine)|_fwd(_grouped)?_kernel_stage[12]"
)
PLAN = re.compile(r"^plan_|mla_metadata|prepare_varlen_num_blocks")
SELECTING = re.compile(r"decode_kv|combine(?!_sampled)|sparse_attn_fwd|splitkv_mla|FlashAttnFwd")


@contextlib.contextmanager
def recorded() -> Iterator[list[Kernel]]:
    """The kernels that run in the block, once it has ended."""
    found: list[Kernel] = []
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield found
        torch.cuda.synchronize()
    found += device_kernels(profile.events())


def device_kernels(events: Iterable[Any]) -> list[Kernel]:
    """The kernels of a profile in the order in which they start."""
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: kernel[1])


def short(name: str) -> str:
    """A kernel's name without its type and its arguments."""
    return name.split("<")[0].split("(")[0].removeprefix("void ")[-70:]


def busy_us(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which any of them runs; they are in the order in which they start."""
    total, until = 0.0, -float("inf")
    for _, start, end in kernels:
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def spans(kernels: Sequence[Kernel], layers: int) -> tuple[float, float, float, str]:
    """(attention us of a layer, plan us of a step, us between its neighbours, names) of whole steps' kernels."""
    alone: list[float] = []  # of groups of attention's kernels without the plan's
    between: list[float] = []
    planning: list[float] = []
    plans: list[float] = []
    names: dict[str, None] = {}
    group: list[Kernel] = []
    before = -float("inf")
    for kernel in [*kernels, NONE]:
        if ATTENTION.search(kernel[0]) or PLAN.search(kernel[0]):
            group.append(kernel)
            names.setdefault(short(kernel[0]))
            continue
        if group:
            begin, end = max(group[0][1], before), max(end for _, _, end in group)
            planned = any(PLAN.search(name) for name, _, _ in group)
            if not any(ATTENTION.search(name) for name, _, _ in group):
                plans.append(end - begin)
            elif planned:
                planning.append(end - begin)
            elif kernel[1] < float("inf"):
                alone.append(end - begin)
                between.append(kernel[1] - max(before, kernels[0][1]))
        group, before = [], max(before, kernel[2])
    if not alone:
        return float("nan"), float("nan"), float("nan"), ", ".join(names)
    steps = (len(alone) + len(planning)) / layers
    attention = median(alone)
    plan = (sum(plans) + sum(span - attention for span in planning)) / steps
    return attention, plan, median(between), ", ".join(names)


def selecting_us(kernels: Sequence[Kernel]) -> float:
    """Microseconds of attention that selects keys, and of its reduction, from the end of the kernel before where they
    start earlier."""
    total, before, begin, end = 0.0, -float("inf"), None, 0.0
    for name, started, ended in [*kernels, NONE]:
        if SELECTING.search(name):
            begin = max(started, before) if begin is None else begin
            end = ended
        elif begin is not None:
            total, begin = total + end - begin, None
        before = max(before, ended)
    return total
