"""Which sparse decode kernels gfx942 has."""

from __future__ import annotations

from typing import ClassVar

from mla_suite.archs.cdna.sparse_decode import CdnaSparseConfig
from mla_suite.archs.common.sparse_decode import RECORDS


class SparseConfig(CdnaSparseConfig):
    """One instance of csrc/gfx942/sparse_decode.hip. 64 rows are as many as fit; more heads take several workgroups.

    The package has room for those that may matter. A power of two is a number, so the kernel for any scale reads
    v32_pow2. A bf16 row takes memory twice the time that the products of 64 query rows take, so it has none of 32.
    """

    arch_name = "gfx942"
    records: ClassVar = {**RECORDS, ("v32_pow2", 576): "v32", ("dsv4_fnuz", 512): "dsv4fnuz"}
    block_ms = (16, 32, 64)

    @classmethod
    def rows_of(cls, record: str) -> tuple[int, ...]:
        return (16, 64) if record.startswith("bf16") else cls.block_ms
