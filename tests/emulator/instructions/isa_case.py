"""One check of one instruction: text, the state before it, and what must stand where after it.

Everything here and in the isa_*.py tables is written from AMD's instruction set manuals ("AMD Instinct MI300" and
"AMD Instinct CDNA4" Instruction Set Architecture, cited by chapter name) and the LLVM AMDGPU user guide; nothing is
taken from the emulator, whose table of instructions is only asked for its names.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mla_suite.emulator import Memory, State, run_snippet

ARCHS = ("gfx942", "gfx950")
ALL = (1 << 64) - 1
LANE = np.arange(64)
DENORMALS, FLUSH = 0xF0, 0x00
DX10_CLAMP = 0x100


@dataclass
class Case:
    """`check(state)` raises AssertionError; it runs after the snippet and is given the wave's state."""

    lines: Sequence[str]
    check: Callable[[State], None]
    vgpr: Mapping[int | str, object] = field(default_factory=dict)
    sgpr: Mapping[int | str, int] = field(default_factory=dict)
    exec_mask: int = ALL
    scc: bool = False
    lds: np.ndarray | int = 0
    scratch: int = 0
    memory: Sequence[tuple[str, np.ndarray, str]] = ()
    mode: int = DENORMALS
    findings: frozenset[str] = frozenset()

    def run(self, arch: str) -> None:
        state = run_snippet(
            arch,
            list(self.lines),
            self.vgpr,
            self.sgpr,
            exec_mask=self.exec_mask,
            scc=self.scc,
            lds=self.lds,
            scratch=self.scratch,
            buffers=[Memory.of(name, array, access) for name, array, access in self.memory],
            mode=self.mode,
        )
        assert {finding.kind for finding in state.findings} == self.findings, [str(f) for f in state.findings]
        self.check(state)


class Spec(Protocol):
    """All checks of one instruction."""

    op: str
    archs: Sequence[str]

    def cases(self, arch: str) -> Iterable[Case]: ...


REGISTRY: dict[str, list[Spec]] = {}


def register(*specs: Spec) -> None:
    for spec in specs:
        REGISTRY.setdefault(spec.op, []).append(spec)


class Custom:
    """An instruction whose checks are written out: `make(rng, op, *given)` yields them."""

    def __init__(
        self, op: str, make: Callable[..., Iterable[Case]], *given: object, archs: Sequence[str] = ARCHS
    ) -> None:
        self.op, self.make, self.given, self.archs = op, make, given, archs

    def cases(self, arch: str) -> Iterable[Case]:
        return self.make(generator(self.op, arch), self.op, *self.given)


def in_registers(first: int, want: np.ndarray, text: object) -> Callable[[State], None]:
    """The check that the vector registers from `first` on hold the rows of `want`, a row or several."""
    rows = np.atleast_2d(want)

    def check(state: State) -> None:
        np.testing.assert_array_equal(state.v[first : first + len(rows)], rows, err_msg=str(text))

    return check


def in_memory(array: np.ndarray, want: np.ndarray, text: str) -> Callable[[State], None]:
    """The check that memory which the snippet was given, `array`, now holds `want`."""
    return lambda state: np.testing.assert_array_equal(array, want, err_msg=text)


def in_lds(want: np.ndarray, text: str) -> Callable[[State], None]:
    return lambda state: np.testing.assert_array_equal(state.lds.view(want.dtype), want, err_msg=text)


def anything(state: State) -> None:
    """The check of a case whose findings say all."""


def rows_from(first: int, rows: Iterable[np.ndarray]) -> dict[int | str, object]:
    """Rows of 64 lanes by register, from `first` on."""
    return dict(enumerate(rows, first))


def vector_name(first: int, count: int) -> str:
    if first >= 256:
        return "a" + vector_name(first - 256, count)[1:]
    return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"


def generator(*name: object) -> np.random.Generator:
    """Random numbers of their own for each instruction, the same in every run."""
    return np.random.default_rng(zlib.crc32(" ".join(map(str, name)).encode()))


def active(mask: int) -> np.ndarray:
    """The lanes of an EXEC mask as booleans."""
    return np.array([mask >> lane & 1 for lane in range(64)], bool)


def mask_of(lanes: np.ndarray) -> int:
    return sum(1 << lane for lane in range(64) if lanes[lane])


def random_mask(rng: np.random.Generator) -> int:
    return int(rng.integers(1, 1 << 63)) << 1 | int(rng.integers(0, 2))


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32)
