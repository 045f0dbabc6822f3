"""Which decode kernel on gfx950: an instance of csrc/gfx950/decode*.hip and the rule that picks one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mla_suite.core.arch import Arch
from mla_suite.ops.decode.config import ELEMENTS, FP8_LAYOUTS, TILE, CdnaConfig, tile_rows

WAVES = 4
MOST_STAGES = 4
OUTPUT_BYTES = 16 * 512 * 4  # of a wave, where four waves' rows are merged


@dataclass(frozen=True)
class Cdna4Config(CdnaConfig):
    """As CdnaConfig, with 16-byte copies, transposed LDS reads and 160 KiB of LDS behind it."""

    @property
    def keys(self) -> int:
        """Keys that a tile holds."""
        return 32

    @property
    def lds(self) -> int:
        """Static LDS in bytes: outputs and statistics to merge, or stages of shared keys and their page numbers."""
        if self.rows == TILE:
            return WAVES * OUTPUT_BYTES + 2 * WAVES * TILE * 4
        value = 1 if self.cache == "fp8" else 2
        stage, pages = self.keys * self.width * value, WAVES * 512
        if self.rotate:
            stage += self.keys * 128 + WAVES * 2048  # with what rounding leaves, cosines and sines
        return min(MOST_STAGES, (self.arch.lds_bytes - pages) // stage) * stage + pages


def cdna4_config(problem: Any, arch: Arch) -> Cdna4Config:
    """The instance for a problem; it depends on shapes of the queries alone, so a batch-invariant call may use it."""
    cache = "fp8" if problem.layout in FP8_LAYOUTS.values() else problem.layout
    rows = tile_rows(problem.heads * problem.q_len)
    return Cdna4Config(arch, ELEMENTS[problem.q_dtype], cache, rows, problem.head_dim, problem.rope)
