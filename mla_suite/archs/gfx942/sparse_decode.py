"""Which sparse decode kernels gfx942 has."""

from __future__ import annotations

from typing import ClassVar

from mla_suite.archs.cdna.sparse_decode import CdnaSparseConfig
from mla_suite.archs.common.sparse_decode import RECORDS


class SparseConfig(CdnaSparseConfig):
    """One instance of csrc/gfx942/sparse_decode.hip. 64 rows are as many as fit; more heads take several workgroups."""

    arch_name = "gfx942"
    records: ClassVar = {**RECORDS, ("dsv4_fnuz", 512): "dsv4fnuz"}
    block_ms = (16, 32, 64)
