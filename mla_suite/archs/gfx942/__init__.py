"""Native kernels of gfx942 (MI300X, MI325X): which instance of csrc/gfx942/decode*.hip and sparse_decode.hip runs."""

from typing import ClassVar

from mla_suite.archs.cdna import CdnaKernels
from mla_suite.archs.cdna.decode import FP8_KV_FORMATS, CdnaConfig
from mla_suite.archs.cdna.sparse_decode import CdnaSparseConfig
from mla_suite.archs.cdna.splits import LoopCosts
from mla_suite.archs.sparse_attention import RECORDS, bare_rows


class Gfx942Config(CdnaConfig):
    """One instance of csrc/gfx942/decode*.hip."""

    costs = LoopCosts(
        unit_bytes=38,
        chip_bytes=2122,
        combine=12_500,
        loop={
            ("16bit", "16bit"): (30.4, 100.8, 103.5, 184.9, 187.4),
            ("16bit", "fp8"): (34.2, 76.7, 105.5, 200.3, 201.8),
            ("fp8", "fp8"): (21.4, 50.2, 73.6, 138.3, 148.6),
        },
        matrix={
            ("16bit", "16bit"): (17, 34, 68, 102, 136),
            ("16bit", "fp8"): (17, 34, 68, 102, 136),
            ("fp8", "fp8"): (12.5, 25, 50, 75, 68),
        },
    )


class SparseConfig(CdnaSparseConfig):
    """One instance of csrc/gfx942/sparse_decode.hip. 64 rows are as many as fit; more heads take several workgroups.

    The package has room for those that may matter. A power of two is a number, so the kernel for any scale reads
    v32_pow2. A bf16 row takes memory twice the time that the products of 64 query rows take, so it has none of 32.
    """

    arch_name = "gfx942"
    records: ClassVar = {
        **RECORDS,
        ("v32_pow2", 576): "v32",
        ("dsv4_fnuz", 512): "dsv4fnuz",
        **bare_rows(FP8_KV_FORMATS["fnuz"]),
    }
    block_ms = (16, 32, 64)

    @classmethod
    def rows_of(cls, record: str) -> tuple[int, ...]:
        return (16, 64) if record.startswith("bf16") else cls.block_ms


class Kernels(CdnaKernels):
    config = Gfx942Config
    sparse_config = SparseConfig
