"""Native kernels of gfx950 (MI350X, MI355X)."""

from mla_suite.archs import ArchSpec
from mla_suite.archs.cdna import CdnaKernels
from mla_suite.archs.cdna.decode_config import CdnaConfig
from mla_suite.archs.common import sparse_decode as sparse_kernels
from mla_suite.archs.gfx950 import decode, sparse_decode
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.ops.decode import Problem as DecodeProblem
from mla_suite.ops.sparse_decode import Problem as SparseDecodeProblem


class Kernels(CdnaKernels):
    def decode_config(self, problem: DecodeProblem, arch: ArchSpec, most: int) -> CdnaConfig:
        return decode.config_for(problem, arch, most)

    def sparse_decode(self, problem: SparseDecodeProblem) -> Supported | Unsupported:
        return sparse_kernels.supports(problem, self.arch, sparse_decode.config_for)
