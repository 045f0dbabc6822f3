"""Which sparse decode kernels gfx950 has."""

from __future__ import annotations

from mla_suite.archs.cdna.sparse_decode import CdnaSparseConfig
from mla_suite.archs.common.sparse_decode import RECORDS


class SparseConfig(CdnaSparseConfig):
    """One instance of csrc/gfx950/sparse_decode.hip."""

    arch_name = "gfx950"
    records = RECORDS
    block_ms = (16, 32, 48, 64, 96, 128)
