"""The present GPU's best rates, measured in the same run: reading memory, and multiplying matrices of bf16 and fp8."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch

from mla_suite.bench.timer import Effort, cold_turns, device_rounds, median

READ_BYTES = tuple(65536 * n for n in (4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
"""256 KiB to 1 GiB."""
MATRIX = 8192
EFFORT = Effort(rounds=2)


@dataclass(frozen=True)
class Floors:
    """Measured ceilings of one run.

    read        (bytes, microseconds) of a kernel that only reads, rising; one launch is included
    tflops      of a bf16 matrix product of 8192 x 8192 x 8192 random values by torch, not throttled
    source      what measured the reads
    fp8_tflops  of the same product in e4m3; 0 where the GPU or its torch has none
    """

    read: tuple[tuple[int, float], ...]
    tflops: float
    source: str
    fp8_tflops: float = 0.0

    def memory_us(self, moved: int) -> float:
        """Time to read a number of bytes: between measured sizes along a power law, beyond them at the last rate."""
        sizes = [size for size, _ in self.read]
        if moved <= sizes[0]:
            return self.read[0][1]
        if moved >= sizes[-1]:
            return self.read[-1][1] * moved / sizes[-1]
        at = bisect_left(sizes, moved)
        (low, low_us), (high, high_us) = self.read[at - 1], self.read[at]
        share = math.log(moved / low) / math.log(high / low)
        return low_us * (high_us / low_us) ** share

    def of(self, moved: int, flops: int, *, fp8: bool = False) -> tuple[float, str]:
        """The floor of a case in microseconds, and what it comes from: memory or compute.

        fp8  whether both operands of its products are fp8; where their ceiling was not measured, that of bf16 counts
        """
        tflops = self.fp8_tflops if fp8 and self.fp8_tflops else self.tflops
        memory, compute = self.memory_us(moved), flops / tflops / 1e6
        return (memory, "memory") if memory >= compute else (compute, "compute")

    @property
    def gb_per_s(self) -> float:
        """Best read rate of the curve."""
        return max(size / us / 1e3 for size, us in self.read)

    def __str__(self) -> str:
        fp8 = f"fp8 {self.fp8_tflops:.0f} TFLOP/s" if self.fp8_tflops else "fp8 not measured"
        return f"read {self.gb_per_s:.0f} GB/s ({self.source}), bf16 product {self.tflops:.0f} TFLOP/s, {fp8}"


def measure(device: torch.device, effort: Effort = EFFORT) -> Floors:
    """Measure the ceilings on a GPU: about 20 seconds and 1.2 GB."""
    words = torch.randint(-(2**31), 2**31 - 1, (READ_BYTES[-1] // 4 + (32 << 20),), dtype=torch.int32, device=device)
    curve = [(size, _read_us(words, size, effort)) for size in READ_BYTES]
    del words
    left, right = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    us = median(device_rounds(lambda turn: torch.mm(turn, right, out=product), [left, left.clone()], effort))
    source = "a Triton kernel" if find_spec("triton") else "torch.sum, which reads at 95 % of what a Triton kernel does"
    return Floors(_rising(curve), 2 * MATRIX**3 / us / 1e6, source, _fp8_tflops(left, right, effort))


def fp8_product(
    left: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None:
    """`left` in e4m3, of the flavour that the device multiplies, and the call that gives bf16 `left @ right` of it.

    None where torch has no such product on the device.
    """
    one = torch.ones((), device=left.device)
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        columns = right.to(dtype).t().contiguous().t()  # the second operand lies by columns
        product = partial(torch._scaled_mm, mat2=columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        try:
            product(left.to(dtype))
        except RuntimeError:  # a GPU of the other flavour, or with none
            continue
        return left.to(dtype), product
    return None


def _fp8_tflops(left: torch.Tensor, right: torch.Tensor, effort: Effort) -> float:
    found = fp8_product(left, right)
    if found is None:
        return 0.0
    rows, product = found
    return 2 * MATRIX**3 / median(device_rounds(product, [rows, rows.clone()], effort)) / 1e6


def _rising(curve: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """More bytes never take less time: what noise says otherwise is lowered to the next size's time."""
    fixed: list[tuple[int, float]] = []
    least = math.inf
    for size, us in reversed(curve):
        least = min(least, us)
        fixed.append((size, least))
    return tuple(reversed(fixed))


def _read_us(words: torch.Tensor, size: int, effort: Effort) -> float:
    count = size // 4
    turns = cold_turns(size, words.device, 2)
    windows = [words[at : at + count] for at in range(0, words.numel() - count + 1, count)][:turns]
    if find_spec("triton") is None:
        return median(device_rounds(torch.sum, windows, effort))
    from mla_suite.bench import stream_kernel

    return stream_kernel.fastest_us(windows, effort)
