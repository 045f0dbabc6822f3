"""Which decode kernel: an instance that proves itself legal for an arch, and the rule that picks one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mla_suite.core.arch import Arch

TILE = 16  # rows of a matrix instruction
MOST_ROWS = 128
WIDTHS = (576, 512)
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class CdnaConfig:
    """One instance of csrc/<arch>/decode.hip. Construction raises ValueError, in one sentence, for an illegal point.

    element  of queries and cache
    rows     query rows (query token x head) that a workgroup holds
    width    values of a cached row
    rotate   the cache holds an un-rotated rope part
    """

    arch: Arch
    element: str
    rows: int
    width: int
    rotate: bool

    def __post_init__(self) -> None:
        if self.arch.vendor != "amd":
            self._refuse(f"{self.arch.name} is not an AMD arch")
        if self.element not in ELEMENTS.values():
            self._refuse(f"element is one of {', '.join(ELEMENTS.values())}")
        if self.rows % TILE or not TILE <= self.rows <= MOST_ROWS:
            self._refuse(f"rows are {TILE} to {MOST_ROWS} in steps of {TILE}")
        if self.width not in WIDTHS:
            self._refuse(f"width is one of {', '.join(map(str, WIDTHS))}")
        if self.rotate and (self.width != WIDTHS[0] or self.element != "bf16"):
            self._refuse(f"only bf16 rows of {WIDTHS[0]} values have un-rotated instances")
        if self.lds > self.arch.lds_bytes:
            self._refuse(f"it needs {self.lds} bytes of LDS of {self.arch.lds_bytes}")

    def _refuse(self, why: str) -> None:
        point = f"element={self.element} rows={self.rows} width={self.width} rotate={self.rotate}"
        raise ValueError(f"decode: no kernel at {point} on {self.arch.name}: {why}")

    @property
    def threads(self) -> int:
        return 4 * self.arch.wavefront  # a wave per SIMD, each with all registers of its lanes

    @property
    def lds(self) -> int:
        """Static LDS in bytes: one private latent tile per wave, or stages of 16 shared rows and their page numbers."""
        if self.rows == TILE:
            return 4 * TILE * 1024
        stage = TILE * (1024 + 16) + (TILE * 128 if self.width == 576 else 0)
        stages, turns = (2, TILE * (256 + 128)) if self.rotate else (3, 0)
        return stages * (stage + turns) + 4 * 512

    @property
    def instance(self) -> str:
        kernel = "decode_rotated" if self.rotate else "decode"
        return f"{kernel}_dtype-{self.element}_rows-{self.rows}_width-{self.width}_rotate-{int(self.rotate)}"

    def tiles(self, rows: int) -> int:
        """Workgroups that share the keys of one work item."""
        return -(-rows // self.rows)


def tile_rows(rows: int) -> int:
    """Rows of a workgroup: ceil(rows / 128) near-equal tiles."""
    tiles = -(-rows // MOST_ROWS)
    return -(-rows // (tiles * TILE)) * TILE


def cdna_config(problem: Any, arch: Arch) -> CdnaConfig:
    """The instance for a problem; it depends on shapes of the queries alone, so a batch-invariant call may use it."""
    return CdnaConfig(
        arch, ELEMENTS[problem.q_dtype], tile_rows(problem.heads * problem.q_len), problem.head_dim, problem.rope
    )
