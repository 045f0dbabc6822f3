"""Native kernels of gfx942 (MI300X, MI325X), and the rule that picks an instance of csrc/gfx942/decode*.hip."""

from mla_suite.archs import ArchSpec
from mla_suite.archs.cdna import CdnaKernels
from mla_suite.archs.cdna.decode_config import ELEMENTS, FP8_KV_FORMATS, CdnaConfig, tile_rows
from mla_suite.archs.gfx942.sparse_decode import SparseConfig
from mla_suite.ops.decode import Problem as DecodeProblem


class Kernels(CdnaKernels):
    sparse_config = SparseConfig

    def decode_config(self, problem: DecodeProblem, arch: ArchSpec, most: int) -> CdnaConfig:
        """The instance for a problem, in tiles of at most `most` rows; it depends on the queries' shapes alone."""
        cache = "fp8" if problem.kv_format in FP8_KV_FORMATS.values() else problem.kv_format
        rows = tile_rows(problem.heads * problem.q_len, most)
        return CdnaConfig(arch, ELEMENTS[problem.q_dtype], cache, rows, problem.head_dim, problem.rope > 0)
