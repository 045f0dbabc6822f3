"""Native kernels of gfx950 (MI350X, MI355X)."""

from mla_suite.archs.cdna import CdnaKernels
from mla_suite.archs.gfx950 import decode, sparse_decode
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.ops.sparse_decode import Problem as SparseDecodeProblem


class Kernels(CdnaKernels):
    decode_rule = staticmethod(decode.config_for)

    def sparse_decode(self, problem: SparseDecodeProblem) -> Supported | Unsupported:
        return sparse_decode.supports(problem, self.arch)
