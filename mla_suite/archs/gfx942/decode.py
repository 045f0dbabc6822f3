"""Which decode kernel on gfx942: the rule that picks an instance of csrc/gfx942/decode*.hip."""

from __future__ import annotations

from mla_suite.archs import ArchSpec
from mla_suite.archs.cdna.decode_config import ELEMENTS, FP8_KV_FORMATS, MAX_ROWS, CdnaConfig, tile_rows
from mla_suite.ops.decode import Problem


def config_for(problem: Problem, arch: ArchSpec, most: int = MAX_ROWS) -> CdnaConfig:
    """The instance for a problem, in tiles of at most `most` rows; it depends on shapes of the queries alone."""
    cache = "fp8" if problem.kv_format in FP8_KV_FORMATS.values() else problem.kv_format
    rows = tile_rows(problem.heads * problem.q_len, most)
    return CdnaConfig(arch, ELEMENTS[problem.q_dtype], cache, rows, problem.head_dim, problem.rope > 0)
