"""Native kernels of gfx950 (MI350X, MI355X): which instance of csrc/gfx950/decode*.hip and sparse_decode.hip runs."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

from mla_suite.archs import ArchSpec
from mla_suite.archs.cdna import CdnaKernels
from mla_suite.archs.cdna.decode import FP8_KV_FORMATS, TILE, CdnaConfig
from mla_suite.archs.cdna.sparse_decode import CdnaSparseConfig
from mla_suite.archs.cdna.splits import LoopCosts
from mla_suite.archs.sparse_attention import RECORDS, bare_rows
from mla_suite.ops.decode import Problem as DecodeProblem

WAVES = 4
MAX_STAGES = 4
MAX_ONE_TILE_KEYS = 64  # of a context: bf16 probabilities come in tiles of 64 keys, fp8 ones in tiles of 128
MAX_BF16_P_KEYS = 2048  # of a work tile: 52 matrix clocks each at 128 rows, and of memory, queries and results included


@dataclass(frozen=True)
class Gfx950Config(CdnaConfig):
    """As CdnaConfig, with 16-byte copies, transposed LDS reads and 160 KiB of LDS behind it."""

    costs = LoopCosts(
        unit_bytes=27,
        chip_bytes=2803,
        combine=12_500,
        loop={
            ("16bit", "16bit"): (19.4, 63.5, 84.8, 108.2, 109.4),
            ("16bit", "fp8"): (19.5, 44.4, 68.6, 119.8, 120.0),
            ("fp8", "fp8"): (15.7, 35.5, 53.4, 94.3, 84.4),
        },
        matrix={
            ("16bit", "16bit"): (8.5, 17, 34, 51, 68),
            ("16bit", "fp8"): (8.5, 17, 34, 51, 68),
            ("fp8", "fp8"): (6.5, 13, 26, 39, 36),
        },
    )

    @property
    def keys(self) -> int:
        """Keys of a tile that the waves share."""
        if self.cache == "fp8":
            return 128 if self.fp8_weights else 64
        return 64 if self.narrow else 32

    @property
    def lds(self) -> int:
        """Static LDS in bytes: outputs and statistics to merge, or stages of shared keys and their page numbers."""
        if self.rows == TILE:
            output = TILE * self.head_dim_v * 4  # rows of one wave, where those of four are combined
            return WAVES * output + 2 * WAVES * TILE * 4
        value = 1 if self.cache == "fp8" else 2
        stage, pages = self.keys * self.width * value, WAVES * 512
        if self.rotate:
            stage += WAVES * 2048  # cosines and sines
        return min(MAX_STAGES, (self.arch.lds_bytes - pages) // stage) * stage + pages


def _work_tile_keys(problem: DecodeProblem, arch: ArchSpec, rows: int) -> int:
    """Keys of a plan's longest work tiles, about: its n splits of a sequence cost context / n + rows x n, in keys.

    They are no shorter than a compute unit's share of all keys. 0 in batch-invariant mode, which sees no context.
    """
    row_tiles = -(-problem.heads * problem.q_len // rows)
    share = -(-problem.batch * problem.context * row_tiles // arch.compute_units)
    return min(problem.context, max(share, isqrt(problem.context * rows)))


class SparseConfig(CdnaSparseConfig):
    """One instance of csrc/gfx950/sparse_decode.hip."""

    arch_name = "gfx950"
    records: ClassVar = RECORDS | bare_rows(FP8_KV_FORMATS["ocp"])
    block_ms = (16, 32, 48, 64, 96, 128)


class Kernels(CdnaKernels):
    config = Gfx950Config
    sparse_config = SparseConfig

    def keeps_bf16_weights(self, problem: DecodeProblem, rows: int) -> bool:
        """As long as memory stays the bound: with a plan by the keys of work tiles.

        Without a plan counted rows have given short contexts smaller tiles, whose weights are bf16, and a context of
        one tile has them as well. In batch-invariant mode there is no context.
        """
        planned = problem.planned and 0 < _work_tile_keys(problem, self.arch, rows) <= MAX_BF16_P_KEYS
        return planned or 0 < problem.context <= MAX_ONE_TILE_KEYS
