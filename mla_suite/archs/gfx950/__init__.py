"""Native kernels of gfx950 (MI350X, MI355X)."""

from mla_suite.archs import ArchSpec
from mla_suite.archs.cdna import CdnaKernels
from mla_suite.archs.cdna.decode import CdnaConfig
from mla_suite.archs.cdna.sparse_decode import CdnaSparseConfig
from mla_suite.archs.common.sparse_decode import RECORDS
from mla_suite.archs.gfx950 import decode
from mla_suite.ops.decode import Problem as DecodeProblem


class SparseConfig(CdnaSparseConfig):
    """One instance of csrc/gfx950/sparse_decode.hip."""

    arch_name = "gfx950"
    records = RECORDS
    block_ms = (16, 32, 48, 64, 96, 128)


class Kernels(CdnaKernels):
    sparse_config = SparseConfig

    def decode_config(self, problem: DecodeProblem, arch: ArchSpec, most: int) -> CdnaConfig:
        return decode.config_for(problem, arch, most)
