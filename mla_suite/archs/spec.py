"""Records of GPU architectures, checked as they are read: one per `csrc/<arch>/arch.toml`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from mla_suite.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CSRC = Path(__file__).parent.parent / "csrc"
"""The device sources that belong to this package."""

_NAMES = {"amd": r"gfx[0-9a-f]{3,4}", "nvidia": r"sm_[0-9]{2,3}"}
_WAVEFRONTS = {"amd": (64, 32), "nvidia": (32,)}
_NVIDIA_SIMD_REGISTERS = 16384  # per SM quarter, 32-bit; a thread may name 255 of them


@dataclass(frozen=True, repr=False)
class ArchSpec:
    """One architecture, or one device of it.

    Every "per clock" figure is per compute unit (AMD CU, NVIDIA SM); `lds` is shared memory on NVIDIA; a register is
    32 bits per lane. `lds_bytes_per_clock` is the rate a kernel's budget must hold at, `lds_peak_bytes_per_clock` the
    one reported for the chip. Construction raises ValueError, in one sentence, when the numbers contradict each other.
    """

    name: str
    vendor: str
    wavefront: int
    compute_units: int
    simds: int
    max_waves_per_simd: int
    max_threads: int
    clock_mhz: int
    memory_bytes_per_s: int
    lds_bytes: int
    lds_granule: int
    lds_bytes_per_clock: int
    lds_peak_bytes_per_clock: int
    registers: int
    register_granule: int
    fp8: str

    def __post_init__(self) -> None:
        def need(holds: bool, sentence: str) -> None:
            if not holds:
                raise ValueError(f"arch {self.name}: {sentence}")

        need(self.vendor in _NAMES, f"vendor {self.vendor!r} is not one of {', '.join(_NAMES)}")
        need(
            re.fullmatch(_NAMES[self.vendor], self.name) is not None,
            f"{self.vendor} names look like {_NAMES[self.vendor]}",
        )
        possible = _WAVEFRONTS[self.vendor]
        need(self.wavefront in possible, f"wavefront {self.wavefront}; {self.vendor} has {possible}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                need(type(value) is int and value > 0, f"{field.name} = {value!r} must be a positive integer")
        need(self.fp8 in ("fnuz", "ocp"), f"fp8 {self.fp8!r} is neither fnuz nor ocp")
        need(
            self.lds_bytes_per_clock <= self.lds_peak_bytes_per_clock,
            f"LDS budget rate {self.lds_bytes_per_clock} B/clk above its peak {self.lds_peak_bytes_per_clock}",
        )
        need(
            self.lds_bytes % self.lds_granule == 0,
            f"{self.lds_bytes} bytes of LDS are not whole granules of {self.lds_granule}",
        )

    def __hash__(self) -> int:
        return hash((self.name, self.compute_units))

    def __repr__(self) -> str:
        return f"arch({self.name})"  # a configuration prints its arch

    def on_device(
        self, compute_units: int, memory_bytes_per_s: int | None = None, clock_mhz: int | None = None
    ) -> ArchSpec:
        """The record of one device: parts of a family differ in their compute units, their memory's rate and clock."""
        rate, clock = memory_bytes_per_s or self.memory_bytes_per_s, clock_mhz or self.clock_mhz
        return replace(self, compute_units=compute_units, memory_bytes_per_s=rate, clock_mhz=clock)

    @property
    def emulable(self) -> bool:
        """Whether the emulator executes the arch's machine code."""
        return self.vendor == "amd" and self.wavefront == 64

    @property
    def matrix_min_rows(self) -> int:
        """Rows of the matrix instruction that reaches the full rate: 64 of a warpgroup's, 16 of a wave's."""
        return 64 if self.vendor == "nvidia" else 16

    @property
    def memory_bytes_per_clock(self) -> float:
        """Device memory bytes per clock and compute unit at the highest clock."""
        return self.memory_bytes_per_s / (self.clock_mhz * 1e6) / self.compute_units

    def waves_per_simd(self, registers: int, lds: int, threads: int) -> int:
        """Resident waves per SIMD for a kernel with these registers per lane, LDS bytes and threads per workgroup.

        0 means that the kernel does not fit. Source: allocation granules of the record; waves of a workgroup are dealt
        evenly to the SIMDs.
        """
        waves = -(-threads // self.wavefront)
        granted = -(-max(registers, 1) // self.register_granule) * self.register_granule
        total = self.registers if self.vendor == "amd" else _NVIDIA_SIMD_REGISTERS // self.wavefront
        by_registers = total // granted
        if lds == 0:
            return min(self.max_waves_per_simd, by_registers)
        groups = self.lds_bytes // (-(-lds // self.lds_granule) * self.lds_granule)
        by_lds = groups * waves // self.simds if groups * waves >= self.simds else min(groups * waves, 1)
        return min(self.max_waves_per_simd, by_registers, by_lds)


def read_arch_file(name: str, csrc: Path = CSRC) -> dict[str, Any]:
    """The parsed `csrc/<name>/arch.toml`. ValueError, with the known names, when there is no such arch."""
    path = csrc / name / "arch.toml"
    if not re.fullmatch(r"\w+", name) or not path.is_file():
        known = ", ".join(names(csrc)) or f"none under {csrc}"
        raise UsageError(f"unknown arch {name!r}: known are {known}")
    with path.open("rb") as file:
        try:
            return tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error


def names(csrc: Path = CSRC) -> tuple[str, ...]:
    """Names of every arch that has an `arch.toml` under `csrc`, sorted."""
    return tuple(sorted(path.parent.name for path in csrc.glob("*/arch.toml")))


@cache
def get(name: str, csrc: Path = CSRC) -> ArchSpec:
    """The record of one arch, e.g. `get("gfx950")`. ValueError when unknown or inconsistent."""
    table = read_arch_file(name, csrc).get("arch", {})
    known = {field.name for field in fields(ArchSpec)}
    if set(table) != known:
        raise ValueError(
            f"{csrc / name / 'arch.toml'}: [arch] has unknown keys {sorted(set(table) - known)} "
            f"and lacks {sorted(known - set(table))}"
        )
    if table["name"] != name:
        raise ValueError(f"{csrc / name / 'arch.toml'}: [arch] is named {table['name']!r}, its folder {name!r}")
    return ArchSpec(**table)
