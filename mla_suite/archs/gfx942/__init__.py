"""Native kernels of gfx942 (MI300X, MI325X)."""

from mla_suite.archs import ArchSpec
from mla_suite.archs.cdna import CdnaKernels
from mla_suite.archs.cdna.decode_config import CdnaConfig
from mla_suite.archs.gfx942 import decode
from mla_suite.ops.decode import Problem as DecodeProblem


class Kernels(CdnaKernels):
    def decode_config(self, problem: DecodeProblem, arch: ArchSpec, most: int) -> CdnaConfig:
        return decode.config_for(problem, arch, most)
