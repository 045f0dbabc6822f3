"""A Triton kernel that only reads. Its time is a floor for every kernel that must read as many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mla_suite.bench.timer import Effort, device_rounds, median
from mla_suite.launch.launcher import compute_units


class Shape(NamedTuple):
    """Words a program reads at a time, and programs per compute unit; 0 programs: one per block of words."""

    block: int
    programs: int
    warps: int


SHAPES = (Shape(4096, 0, 4), Shape(8192, 16, 8), Shape(16384, 4, 8))


@triton.jit
def read_kernel(source, sink, blocks, BLOCK: tl.constexpr):
    word = tl.arange(0, BLOCK)
    mixed = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        mixed ^= tl.load(source + block * BLOCK + word)
    total = tl.sum(mixed, 0)
    if total == 0x5EED5EED:  # practically never, but the compiler cannot know: the loads stay
        tl.store(sink, total)


def read(words: torch.Tensor, sink: torch.Tensor, shape: Shape, units: int) -> None:
    """Read all of `words` [n] int32, n a multiple of 16384 below 2^31, and write nothing."""
    blocks = words.numel() // shape.block
    grid = min(blocks, shape.programs * units) if shape.programs else blocks
    read_kernel[(grid,)](words, sink, blocks, BLOCK=shape.block, num_warps=shape.warps)


def fastest_us(windows: Sequence[torch.Tensor], effort: Effort) -> float:
    """Time to read one of `windows`, which are read in turn, in the fastest of the shapes."""
    sink = torch.empty(1, dtype=torch.int32, device=windows[0].device)
    units = compute_units(windows[0].device)
    calls = [partial(read, sink=sink, shape=shape, units=units) for shape in SHAPES]
    return min(median(device_rounds(call, windows, effort)) for call in calls)
