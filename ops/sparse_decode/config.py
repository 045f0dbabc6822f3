"""Which sparse_decode kernel: an instance that proves itself legal for an arch, and the rule that picks one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mla_suite.core.arch import Arch

TILE = 16  # rows of a matrix instruction
WAVES = 4
MOST_ROWS = 128
MOST_POOLS = 4  # groups of pool fields in the kernel's parameters
ROW_GROUPS = {16: 1, 32: 1, 48: 1, 64: 2, 96: 2, 128: 4}
"""Rows of a workgroup -> waves that share them in the scores; the others of four take other keys."""
RECORDS = {("dsv4", 512): "dsv4", ("v32", 576): "v32", ("v32_pow2", 576): "v32pow2"}
RECORDS |= {("bf16", width): "bf16" for width in (512, 576)}
"""(layout, width of a row) -> what a kernel calls the record; all pools of a launch have the same."""


@dataclass(frozen=True)
class SparseConfig:
    """One instance of csrc/<arch>/sparse_decode.hip. Construction raises ValueError, in a sentence, if it is illegal.

    record  how a selected token is stored: a value of RECORDS
    width   values of a row
    rows    query rows (heads of one token) that a workgroup holds
    """

    arch: Arch
    record: str
    width: int
    rows: int

    def __post_init__(self) -> None:
        if self.arch.name != "gfx950":
            self._refuse(f"{self.arch.name} has no such kernels, gfx950 has")
        if (self.record, self.width) not in {(record, width) for (_, width), record in RECORDS.items()}:
            self._refuse(f"records are {', '.join(f'{r} of {w}' for (_, w), r in RECORDS.items())} values")
        if self.rows not in rows_of(self.record):
            self._refuse(f"rows are one of {', '.join(map(str, rows_of(self.record)))}")

    def _refuse(self, why: str) -> None:
        point = f"record={self.record} width={self.width} rows={self.rows}"
        raise ValueError(f"sparse_decode: no kernel at {point} on {self.arch.name}: {why}")

    @property
    def threads(self) -> int:
        return WAVES * self.arch.wavefront  # a wave per SIMD, each with all registers of its lanes

    @property
    def instance(self) -> str:
        groups = ROW_GROUPS[self.rows]
        return f"sparse_decode_layout-{self.record}_width-{self.width}_rows-{self.rows}_rowgroups-{groups}"

    def tiles(self, heads: int) -> int:
        """Workgroups that share the keys of one query token."""
        return -(-heads // self.rows)


def rows_of(record: str) -> tuple[int, ...]:
    """Rows that a kernel for this record may have: 96 with arbitrary scales spills registers (LLVM 22)."""
    return tuple(rows for rows in ROW_GROUPS if (record, rows) != ("v32", 96))


def tile_rows(record: str, heads: int) -> int:
    """Rows of a workgroup: the fewest of a kernel that hold all heads, or one of the near-equal tiles of many heads."""
    tiles = -(-heads // MOST_ROWS)
    return next(rows for rows in rows_of(record) if rows * tiles >= heads)


def record_of(layouts: Sequence[str], width: int) -> str | None:
    """What a kernel calls the record of pools in these layouts; None when no kernel reads them together."""
    # A power of two is a number: the kernel for any scale reads both.
    names = {RECORDS.get((layout, width)) for layout in layouts}
    return "v32" if names == {"v32", "v32pow2"} else names.pop() if len(names) == 1 else None


def sparse_config(problem: Any, arch: Arch) -> SparseConfig:
    """The instance for a problem; it depends on heads and layouts alone, so a batch-invariant call may use it."""
    record = record_of([pool.layout for pool in problem.pools], problem.head_dim) or "none"
    return SparseConfig(arch, record, problem.head_dim, tile_rows(record, problem.heads))
