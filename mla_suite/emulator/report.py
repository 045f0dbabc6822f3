"""The result of a launch in the emulator: findings of the sanitizer and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mla_suite.archs import ArchSpec
from mla_suite.emulator.timing import ModelledTime
from mla_suite.launch.driver import LaunchError

_EXPLANATIONS = {
    "register_before_wait": "{register} is used before its s_waitcnt",
    "lds_race": "wave {detail} touched the same LDS bytes at {address} in this barrier interval",
    "lds_in_flight": "wave {detail} has not waited for its own access to LDS {address}",
    "lds_out_of_bounds": "{detail} bytes at LDS {address} are outside the workgroup's LDS",
    "lds_misaligned": "LDS address {address} is not a multiple of {detail}",
    "lds_uninitialised": "LDS {address} was never written",
    "global_out_of_bounds": "{detail} bytes at {address} lie in no buffer",
    "global_misaligned": "address {address} is not a multiple of {detail}",
    "global_uninitialised": "{address} holds nothing yet",
    "global_unwritten": "{detail} bytes of the output, the first at {address}, were never written",
    "global_read_only": "{address} may not be written",
    "global_unordered": "workgroup {detail} wrote {address} in this launch, and nothing orders this access after it",
    "divergent_barrier": "waits at a barrier that {detail} waves of its workgroup will never reach",
    "partial_exec_matrix": "EXEC does not hold all 64 lanes",
    "uninitialised_address": "{register} is an address and was never written",
    "spin": "reads {detail} at {address} again and again; the workgroup that would change it has not been started",
    "instruction_limit": "{detail} instructions in one wave; the loop does not end",
    "rounding_mode": "the MODE register asks for another rounding than to nearest even, which is not modelled",
    "scratch_out_of_bounds": "{detail} bytes at {address} are outside the lane's private memory",
    "bad_resource": "the buffer resource asks for swizzling or thread ids, which are not modelled",
}


@dataclass(frozen=True)
class Finding:
    """One broken rule at one instruction: the first time, and how often (`count`, over lanes and executions).

    `lanes` is a mask; `workgroup` a linear index; `instruction` is empty where the whole launch broke the rule.
    """

    kind: str
    kernel: str
    instruction: str
    source: str
    workgroup: int
    wave: int
    lanes: int
    address: str
    count: int
    explanation: str

    def __str__(self) -> str:
        if not self.instruction:
            return f"{self.kind}: {self.kernel}: {self.explanation}"
        where = f" at {self.source}" if self.source else ""
        lanes = "all lanes" if self.lanes == (1 << 64) - 1 else f"lanes {_lane_list(self.lanes)}"
        times = f", {self.count} times" if self.count > 1 else ""
        return (
            f"{self.kind}: {self.kernel}: `{self.instruction}`{where}: {self.explanation} "
            f"(workgroup {self.workgroup}, wave {self.wave}, {lanes}{times})"
        )


def _lane_list(mask: int) -> str:
    lanes = [lane for lane in range(64) if mask >> lane & 1]
    return ",".join(map(str, lanes[:8])) + (",..." if len(lanes) > 8 else "") if lanes else "none"


def register_name(index: int) -> str:
    """The name of a register in the core's numbering: vectors, accumulation registers, scalars."""
    if index < 256:
        return f"v{index}"
    if index < 512:
        return f"a{index - 256}"
    special = {618: "vcc_lo", 619: "vcc_hi", 636: "m0", 638: "exec_lo", 639: "exec_hi"}
    return special.get(index, f"s{index - 512}")


def explain(kind: str, address: str, detail: int) -> str:
    return _EXPLANATIONS[kind].format(address=address, detail=detail, register=register_name(detail))


class SanitizerError(LaunchError):
    """A kernel broke rules of the machine. `report` has every finding and the counters."""

    def __init__(self, report: Report) -> None:
        self.report = report
        findings = report.findings
        more = f"\n(and {len(findings) - 8} more)" if len(findings) > 8 else ""
        super().__init__("the emulator's sanitizer found:\n" + "\n".join(map(str, findings[:8])) + more)


_VALU_CLOCKS = {"valu": 4, "transcendental": 16}
_CLOCKS_PER_PASS = 4


@dataclass(frozen=True)
class Bound:
    """Clocks of one compute unit below which this work cannot be done, per resource. Bounds, never times.

    memory: bytes moved to and from global memory over the chip's bytes per clock and unit; matrix and valu: issue
    clocks over the unit's SIMDs; lds_128 and lds_256: bank clocks under the two models of the README.
    """

    memory: float
    matrix: float
    valu: float
    lds_128: float
    lds_256: float

    @property
    def limiter(self) -> str:
        """The resource whose bound is highest, LDS counted at 128 bytes per clock."""
        rows = {"memory": self.memory, "matrix": self.matrix, "valu": self.valu, "lds": self.lds_128}
        return max(rows, key=lambda name: rows[name])


@dataclass(frozen=True)
class Report:
    """Findings, and counts per instruction of the program summed over all waves.

    `times`, `lanes`, `global_bytes`, `lds_bytes`, `lds_clocks_128`, `lds_clocks_256` are arrays over instructions;
    `loaded` and `stored` are bytes per buffer name; `modelled` is there where the launch's `Schedule` asked for it, and
    with it `groups`, what each workgroup took: [models of `timing.models`, workgroups] of `core.GroupTime`.
    """

    kernel: str
    arch: str
    findings: tuple[Finding, ...]
    names: Sequence[str]
    classes: Sequence[str]
    passes: Sequence[int]
    times: np.ndarray
    lanes: np.ndarray
    global_bytes: np.ndarray
    lds_bytes: np.ndarray
    lds_clocks_128: np.ndarray
    lds_clocks_256: np.ndarray
    loaded: dict[str, int]
    stored: dict[str, int]
    modelled: ModelledTime | None = None
    groups: np.ndarray | None = None

    def mix(self) -> Counter[str]:
        """Wave instructions by mnemonic."""
        out: Counter[str] = Counter()
        for name, times in zip(self.names, self.times, strict=True):
            if times:
                out[name] += int(times)
        return out

    def by_class(self) -> Counter[str]:
        """Wave instructions by class: salu, smem, valu, transcendental, matrix, lds, global, atomic, control."""
        out: Counter[str] = Counter()
        for name, times in zip(self.classes, self.times, strict=True):
            out[name] += int(times)
        return out

    def instructions(self) -> int:
        return int(self.times.sum())

    def matrix_clocks(self) -> int:
        """Clocks of one SIMD's matrix unit: 4 per pass."""
        return _CLOCKS_PER_PASS * int(self.times @ np.array(self.passes))

    def valu_clocks(self) -> int:
        """Issue clocks of one SIMD's vector unit: 4 per instruction, 16 for a transcendental one."""
        return sum(_VALU_CLOCKS.get(name, 0) * times for name, times in self.by_class().items())

    def lds_clocks(self, bytes_per_clock: int = 128) -> int:
        """Bank clocks of the LDS at 128 bytes a clock, or with reads at 256 (gfx950)."""
        return int((self.lds_clocks_128 if bytes_per_clock == 128 else self.lds_clocks_256).sum())

    def memory_bytes(self) -> int:
        """Bytes of every global load, store and atomic, each lane counted; caches are not modelled."""
        return int(self.global_bytes.sum())

    def bound(self, arch: ArchSpec) -> Bound:
        """The least clocks that one compute unit of `arch`, with its share of memory, needs for all this work."""
        return Bound(
            memory=self.memory_bytes() / arch.memory_bytes_per_clock,
            matrix=self.matrix_clocks() / arch.simds,
            valu=self.valu_clocks() / arch.simds,
            lds_128=float(self.lds_clocks()),
            lds_256=float(self.lds_clocks(bytes_per_clock=256)),
        )
