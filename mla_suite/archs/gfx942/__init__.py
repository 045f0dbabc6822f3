"""Native kernels of gfx942 (MI300X, MI325X)."""

from mla_suite.archs.cdna import CdnaKernels
from mla_suite.archs.gfx942 import decode


class Kernels(CdnaKernels):
    decode_rule = staticmethod(decode.config_for)
