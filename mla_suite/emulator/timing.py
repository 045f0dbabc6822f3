"""The model of time: constants of a compute unit, of the chip around it, and the modelled time of a launch.

A modelled time is never a measured one: it says what the model makes of the instructions that an emulated launch
executed. docs/amd_time_model.md says what is modelled, what is not, and how far the model is from published times.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mla_suite.archs import ArchSpec
from mla_suite.emulator import core


@dataclass(frozen=True)
class Unit:
    """Constants of one compute unit, in clocks and bytes per clock; csrc/emulator/timeline.hpp has those it takes.

    memory_rate     what one compute unit draws from memory at most
    matrix_flops    16-bit operations of a compute unit per clock
    softmax_clocks  of one SIMD for 64 scores, in kernels whose code is not played
    """

    vector_latency: float
    transcendental: float
    matrix_extra: float
    lds_latency: float
    lds_rate: float
    memory_latency: float
    scalar_latency: float
    cache_rate: float
    memory_rate: float
    matrix_flops: float
    issue: float = 4
    branch: float = 16
    barrier: float = 16
    lds_direct: float = 128
    softmax_clocks: float = 100


# Sources. A SIMD issues for a wave once in four clocks, a transcendental takes four such issues, and the first-level
# cache passes 64 bytes per clock: CDNA3 ISA and white paper. A vector instruction delivers after 8.3 clocks, a matrix
# instruction of 16 clocks after 18.25, a dependent b32 read of the LDS after 69, global memory after 790: measured on
# gfx950 by facebookexperimental/triton, pull request 2507; LLVM gives gfx942 the same passes, so it has the same here.
# One compute unit draws at most 1.5 % (gfx942) and 0.8 % (gfx950) of the memory's rate: AMD's rocm-origami 0.0.3.
# Operations per clock are the data sheets' peaks. Softmax: the vector instructions beside products of
# AITER's and tokenspeed's objects of 64 and 128 rows, counted in the emulator, are 98 to 122 clocks. No published
# figure was found for a taken branch, a barrier, a miss of the scalar cache and the rate of loads to LDS; they are
# assumed, and `RANGES` has how far they may be off.
UNITS = {
    "gfx942": Unit(8, 16, 2, 64, 1, 790, 400, 64, 38, 2048),
    "gfx950": Unit(8, 16, 2, 64, 1, 790, 400, 64, 27, 4096),
}

# The least and the greatest that a constant may be. The LDS of gfx950 is reported at 256 bytes per clock for reads.
# Pointer chases on CDNA3 put a hit of the Infinity Cache near two thirds of memory's latency.
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "gfx942": {"branch": (4, 32), "barrier": (4, 40), "scalar_latency": (200, 790), "memory_latency": (530, 1100)},
    "gfx950": {"branch": (4, 32), "barrier": (4, 40), "scalar_latency": (200, 790), "memory_latency": (530, 1100),
               "lds_rate": (2, 1)},
}  # fmt: skip


@dataclass(frozen=True)
class Chip:
    """Constants of the chip around compute units.

    launch_us     device time of a kernel beside that of its workgroups, at 2,400 MHz
    memory_share  of the data sheet's rate that a stream sustains
    matrix_clock  the clock under full load of all matrix units, as a share of the highest: 1489 TFLOP/s at 98.75 % of
                  the matrix units' time (AMD's Gluon tutorial, MI355X) are 0.6 of 2,400 MHz
    """

    launch_us: float
    memory_share: float
    matrix_clock: float


CHIP = Chip(launch_us=3.66, memory_share=0.841, matrix_clock=0.6)
"""The first two are fitted by tools/fit_amd_time.py, on the points of benchmarks/published whose part is 'fit'."""

BOUNDS = ("launch", "memory", "matrix")
"""The classes of a launch: what most of its time goes to. LDS and vector unit feed the products and count as matrix."""


@dataclass(frozen=True)
class HeldOut:
    """How far the model was from published times that it was not fitted to: of `points`, in percent.

    The points are other people's kernels, modelled from what is known of their geometry, or from waves where their code
    is open. No published time is one of this package's kernels.
    """

    median: float
    p90: float
    points: int


HELD_OUT: dict[tuple[str, str], HeldOut] = {
    ("gfx942", "launch"): HeldOut(15.2, 27.0, 40),
    ("gfx950", "launch"): HeldOut(14.7, 34.4, 67),
    ("gfx950", "memory"): HeldOut(14.9, 39.0, 22),
    ("gfx950", "matrix"): HeldOut(11.9, 35.7, 22),
}
"""By arch and class; a class that is not there has too few published points. tools/fit_amd_time.py reports them."""


@dataclass(frozen=True)
class ModelledTime:
    """The modelled microseconds of a launch: never a measured time.

    low, high   with all constants of `RANGES` at their one end and at the other
    bound       its class, one of BOUNDS
    launch_us   of it that the launch takes beside its workgroups
    busy        share of the workgroups' time in which each unit is busy: matrix, vector, lds, memory
    copies      workgroups that share a compute unit
    """

    arch: str
    us: float
    low: float
    high: float
    bound: str
    launch_us: float
    busy: dict[str, float]
    copies: int

    @property
    def known(self) -> str:
        """The class, and how far the model was from published times of it, in words."""
        found = HELD_OUT.get((self.arch, self.bound))
        known = (
            f"held-out median error {found.median} % (90th percentile {found.p90} %) over {found.points} published "
            "times of other kernels"
            if found
            else "unvalidated: too few published times of this class were held out"
        )
        return f"{self.bound}-bound: {known}"

    def __str__(self) -> str:
        times = f"modelled {self.us:.1f} us ({self.low:.1f} to {self.high:.1f})"
        groups = "1 workgroup" if self.copies == 1 else f"{self.copies} workgroups"
        return f"{times}, {groups} a compute unit, {self.known}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields, the held-out error of the class (None where it is unvalidated) and the sentence."""
        found = HELD_OUT.get((self.arch, self.bound))
        return asdict(self) | {"held_out": asdict(found) if found else None, "sentence": str(self)}


def total(times: Sequence[ModelledTime]) -> ModelledTime:
    """Launches that follow each other as one time, of the class of the longest."""
    longest = max(times, key=lambda time: time.us)
    names = ("us", "low", "high", "launch_us")
    return replace(longest, **{name: sum(getattr(time, name) for time in times) for name in names})


REREAD = 5.3 / 17.2
"""What a byte costs that another row tile reads, too: AMD's data sheet of the MI300X has 17.2 TB/s for the Infinity
Cache and 5.3 TB/s for memory."""


def fetched(tiles: float) -> float:
    """What a byte of the keys takes of memory's time, where `tiles` row tiles read each: on average of all of them."""
    return (1 + (tiles - 1) * REREAD) / tiles


def matrix_clock(chip: Chip, load: float) -> float:
    """The clock as a share of the highest, when the matrix units of the whole chip are busy for `load` of the time: the
    power that they draw together slows it."""
    return 1 - (1 - chip.matrix_clock) * min(1.0, load)


def models(arch: ArchSpec, registers: int, lds_bytes: int, threads: int, workgroups: int) -> list[core.TimeModel]:
    """The compute unit of a launch as it is taken to be, as fast as it may be, and as slow."""
    waves = -(-threads // arch.wavefront)
    resident = arch.waves_per_simd(registers, lds_bytes, threads) * arch.simds // waves
    copies = max(1, min(resident, -(-workgroups // arch.compute_units)))
    active = min(arch.compute_units, workgroups)
    unit, ends = UNITS[arch.name], RANGES[arch.name]
    chosen = [unit, *(replace(unit, **{name: pair[end] for name, pair in ends.items()}) for end in (0, 1))]
    share = arch.memory_bytes_per_s * CHIP.memory_share / (arch.clock_mhz * 1e6) / active
    made = []
    for each in chosen:
        values = {field[0]: getattr(each, field[0]) for field in core.TimeModel._fields_ if hasattr(each, field[0])}
        values |= {"chip_rate": share, "slowdown": (1 - CHIP.matrix_clock) * active / arch.compute_units}
        made.append(core.TimeModel(**values, simds=arch.simds, copies=copies))
    return made


def launch(arch: ArchSpec, copies: int, groups: Sequence[np.ndarray] | np.ndarray) -> ModelledTime:
    """The modelled time of a launch whose workgroups took `groups`, one array of `core.GroupTime` per model."""
    fixed = CHIP.launch_us * 2400 / arch.clock_mhz
    totals = [fixed + _microseconds(arch, copies, times) for times in groups]
    times = groups[0]
    clocks = max(float(times["clocks"].sum()), 1.0)
    busy = {name: float(times[name].sum()) / clocks for name in ("matrix", "vector", "lds", "memory")}
    work = {"memory": busy["memory"], "matrix": max(busy["matrix"], busy["vector"], busy["lds"])}
    longest = max(work, key=lambda name: work[name])
    bound = "launch" if fixed > work[longest] * (totals[0] - fixed) else longest
    return ModelledTime(arch.name, totals[0], min(totals), max(totals), bound, fixed, busy, copies)


def _microseconds(arch: ArchSpec, copies: int, times: np.ndarray) -> float:
    """Workgroups in their order, each to the compute unit that is free first; `copies` of them at a time on one."""
    slots = arch.compute_units * copies
    free = [0.0] * min(len(times), slots)
    for clocks in times["clocks"]:
        heapq.heapreplace(free, free[0] + float(clocks))
    load = float(times["matrix"].sum()) / max(max(free) * slots, 1.0)
    return max(free) / (arch.clock_mhz * matrix_clock(CHIP, load))
