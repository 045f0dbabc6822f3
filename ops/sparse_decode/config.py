"""Which sparse_decode kernel: an instance that proves itself legal for an arch, and the rule that picks one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mla_suite.core.arch import Arch

WAVES = 4
MOST_POOLS = 4  # groups of pool fields in the kernel's parameters
ROWS = (16, 32, 48, 64, 96, 128)
RECORDS = {
    ("dsv4", 512): "dsv4",
    ("v32", 576): "v32",
    ("v32_pow2", 576): "v32pow2",
    ("bf16", 512): "bf16x512",
    ("bf16", 576): "bf16x576",
}
"""(kv_format, values of a row) -> what a kernel calls the record; all pools of a launch have the same."""


@dataclass(frozen=True)
class SparseConfig:
    """One instance of csrc/<arch>/sparse_decode.hip. Construction raises ValueError, in a sentence, if it is illegal.

    record  how a selected token is stored: a value of RECORDS
    rows    query rows (heads of one token) that a workgroup holds
    """

    arch: Arch = field(repr=False)
    record: str
    rows: int

    def __post_init__(self) -> None:
        if self.arch.name != "gfx950":
            self._refuse(f"{self.arch.name} has no such kernels, gfx950 has")
        if self.record not in RECORDS.values():
            self._refuse(f"records are {', '.join(RECORDS.values())}")
        if self.rows not in ROWS:
            self._refuse(f"rows are one of {', '.join(map(str, ROWS))}")

    def _refuse(self, why: str) -> None:
        raise ValueError(f"sparse_decode: no kernel of {self.record} and {self.rows} rows on {self.arch.name}: {why}")

    @property
    def threads(self) -> int:
        return WAVES * self.arch.wavefront  # a wave per SIMD, each with all registers of its lanes

    @property
    def instance(self) -> str:
        return f"sparse_decode_kvformat-{self.record}_rows-{self.rows}"

    def tiles(self, heads: int) -> int:
        """Workgroups that share the keys of one query token."""
        return -(-heads // self.rows)


def tile_rows(heads: int) -> int:
    """Rows of a workgroup: the fewest of a kernel that hold all heads, or one of the near-equal tiles of many heads."""
    tiles = -(-heads // ROWS[-1])
    return next(rows for rows in ROWS if rows * tiles >= heads)


def record_of(kv_formats: Sequence[str], width: int) -> str | None:
    """What a kernel calls the record of pools in these kv_formats; None when no kernel reads them together."""
    names = {RECORDS.get((kv_format, width)) for kv_format in kv_formats}
    # A power of two is a number: the kernel for any scale reads both.
    return "v32" if names == {"v32", "v32pow2"} else names.pop() if len(names) == 1 else None


def sparse_config(problem: Any, arch: Arch) -> SparseConfig:
    """The instance for a problem; it depends on heads and kv_formats alone, so a batch-invariant call may use it."""
    record = record_of([pool.kv_format for pool in problem.pools], problem.head_dim)
    return SparseConfig(arch, record or "none", tile_rows(problem.heads))
