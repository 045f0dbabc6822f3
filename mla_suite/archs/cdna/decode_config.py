"""Configurations of CDNA decode kernels: instances that prove themselves legal for an arch, and the rule for tiles."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mla_suite.archs import ArchSpec
from mla_suite.core.dispatch import Launch
from mla_suite.ops.decode import DecodeArgs

TILE = 16  # rows of a matrix instruction
MAX_ROWS = 128
WIDTHS = (576, 512)
ELEMENTS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e4m3fn: "fp8",
}
FP8_KV_FORMATS = {"fnuz": "fp8_fnuz", "ocp": "fp8"}  # by the arch's flavour
FP8_QUERIES = {"fnuz": torch.float8_e4m3fnuz, "ocp": torch.float8_e4m3fn}
PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8"), ("fp8", "fp8"))
"""(query, cache) that have instances; fp8 is e4m3 in the arch's own flavour."""


@dataclass(frozen=True)
class CdnaConfig:
    """One instance of csrc/<arch>/decode*.hip. Construction raises ValueError, in one sentence, for an illegal point.

    query   type of the queries
    cache   type of the cached values
    rows    query rows (query token x head) that a workgroup holds
    width   values of a cached row
    rotate  the cache holds an un-rotated rope part
    """

    arch: ArchSpec = field(repr=False)
    query: str
    cache: str
    rows: int
    width: int
    rotate: bool

    def __post_init__(self) -> None:
        if self.arch.vendor != "amd":
            self._raise(f"{self.arch.name} is not an AMD arch")
        if (self.query, self.cache) not in PAIRS:
            self._raise(f"query and cache are one of {', '.join(f'{q} and {c}' for q, c in PAIRS)}")
        if self.rows % TILE or not TILE <= self.rows <= MAX_ROWS:
            self._raise(f"rows are {TILE} to {MAX_ROWS} in steps of {TILE}")
        if self.width not in WIDTHS:
            self._raise(f"width is one of {', '.join(map(str, WIDTHS))}")
        if self.cache == "fp8" and self.width != WIDTHS[0]:
            self._raise(f"fp8 rows have {WIDTHS[0]} values")
        if self.rotate and (self.width != WIDTHS[0] or self.cache != "bf16"):
            self._raise(f"only bf16 rows of {WIDTHS[0]} values have un-rotated instances")
        if self.lds > self.arch.lds_bytes:
            self._raise(f"it needs {self.lds} bytes of LDS of {self.arch.lds_bytes}")

    def _raise(self, why: str) -> None:
        point = f"query={self.query} cache={self.cache} rows={self.rows} width={self.width} rotate={self.rotate}"
        raise ValueError(f"decode: no kernel at {point} on {self.arch.name}: {why}")

    @property
    def threads(self) -> int:
        return 4 * self.arch.wavefront  # a wave per SIMD, each with all registers of its lanes

    @property
    def lds(self) -> int:
        """Static LDS in bytes: one private latent tile per wave, or stages of 16 shared rows and their page numbers."""
        if self.rows == TILE:
            return 4 * TILE * 1024
        rope = TILE * 128 if self.width == 576 else 0
        stage, pages = TILE * (1024 + 16) + rope, 4 * 512
        if self.cache == "fp8":
            return 2 * stage + 2 * 4 * (4 * 512 + 256) + pages  # as stored, per wave, and converted
        if self.rotate:
            return 2 * (stage + rope + TILE * 256) + pages  # with what rounding leaves, cosines and sines
        return 3 * stage + pages

    @property
    def instance(self) -> str:
        if self.cache == "fp8":
            return f"decode_fp8_query-{self.query}_rows-{self.rows}"
        kernel = "decode_rotated" if self.rotate else "decode"
        return f"{kernel}_dtype-{self.cache}_rows-{self.rows}_width-{self.width}_rotate-{int(self.rotate)}"

    def tiles(self, rows: int) -> int:
        """Workgroups that share the keys of one work tile."""
        return -(-rows // self.rows)

    def notes(self, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> tuple[str, ...]:
        """Returns what `explain` says of a call: how its keys are split."""
        from mla_suite.archs.cdna import decode

        return decode.notes(self, outputs, args)

    def prepare(self, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> Launch:
        """The launch of decode."""
        from mla_suite.archs.cdna import decode

        return decode.prepare(self, outputs, args)


def tile_rows(rows: int, most: int = MAX_ROWS) -> int:
    """Rows of a workgroup: ceil(rows / most) near-equal tiles."""
    tiles = -(-rows // most)
    return -(-rows // (tiles * TILE)) * TILE
