"""sparse_decode on gfx950: which instance, how many splits, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.common import combine
from mla_suite.archs.common.attention import packer
from mla_suite.archs.common.sparse_decode import (
    MIN_SPLIT,
    POINTERS,
    RECORDS,
    Prepared,
    combine_launch,
    launch_of,
    numbers_of,
    record_of,
    shape_of,
    slots_and_tiles,
)
from mla_suite.core.dispatch import Launch
from mla_suite.ops.sparse_decode import Problem, SparseDecodeArgs, splits_by_size

WAVES = 4
BLOCK_MS = (16, 32, 48, 64, 96, 128)
LEADING = ("q", *POINTERS)
_pack_leading = packer(len(LEADING)).pack


@dataclass(frozen=True)
class SparseConfig:
    """One instance of csrc/gfx950/sparse_decode.hip. Construction raises ValueError, in a sentence, if it is illegal.

    record  how a selected token is stored: a value of RECORDS
    rows    query rows (heads of one token) that a workgroup holds
    """

    arch: ArchSpec = field(repr=False)
    record: str
    rows: int

    def __post_init__(self) -> None:
        if self.arch.name != "gfx950":
            self._raise(f"{self.arch.name} has no such kernels, gfx950 has")
        if self.record not in RECORDS.values():
            self._raise(f"records are {', '.join(RECORDS.values())}")
        if self.rows not in BLOCK_MS:
            self._raise(f"rows are one of {', '.join(map(str, BLOCK_MS))}")

    def _raise(self, why: str) -> None:
        raise ValueError(f"sparse_decode: no kernel of {self.record} and {self.rows} rows on {self.arch.name}: {why}")

    @property
    def threads(self) -> int:
        return WAVES * self.arch.wavefront  # a wave per SIMD, each with all registers of its lanes

    @property
    def instance(self) -> str:
        return f"sparse_decode_kvformat-{self.record}_rows-{self.rows}"

    def tiles(self, heads: int) -> int:
        """Workgroups that share the keys of one query token."""
        return -(-heads // self.rows)

    def prepare(self, outputs: tuple[torch.Tensor, ...], args: SparseDecodeArgs) -> Launch:
        """The launch of sparse_decode."""
        return _prepare(self, outputs, args)


def tile_rows(heads: int) -> int:
    """Rows of a workgroup: the fewest of a kernel that hold all heads, or one of the near-equal tiles of many heads."""
    tiles = -(-heads // BLOCK_MS[-1])
    return next(rows for rows in BLOCK_MS if rows * tiles >= heads)


def config_for(problem: Problem, arch: ArchSpec) -> SparseConfig:
    """The instance for a problem; it depends on heads and kv_formats alone, so a batch-invariant call may use it."""
    record = record_of([pool.kv_format for pool in problem.pools], problem.head_dim)
    return SparseConfig(arch, record or "none", tile_rows(problem.heads))


def _prepare(config: SparseConfig, outputs: tuple[torch.Tensor, ...], args: SparseDecodeArgs) -> Launch:
    if outputs[0].numel() == 0:
        return lambda outputs, tensors: None
    q = -args.q if args.softmax_scale < 0 else args.q  # the kernels find the largest score before they scale
    shape = shape_of(args, q, outputs, any_lse=False)
    units, tiles = config.arch.compute_units, config.tiles(shape.heads)
    splits = 1
    if not shape.plan_words:
        fill = max(1, min(units // (shape.tokens * tiles), shape.keys // MIN_SPLIT))
        splits = args.num_splits or (splits_by_size(args) if args.split_size else fill)
    slots, items = slots_and_tiles(args, shape, splits)
    groups = min(items, units) if shape.plan_words else items
    own = {"q_token_stride": shape.q.strides[0], "q_head_stride": shape.q.strides[1], "grid_stride": groups}
    numbers = numbers_of("sparse_decode", LEADING, args, shape, splits, **own)
    combined = None
    if slots:
        partials, fixed = -(-slots // shape.tokens), args.split_size > 0
        chosen = combine.config_for(
            config.arch, args.head_dim_v, shape.out.dtype, shape.heads, shape.tokens, partials, fixed
        )
        combined = combine_launch(chosen, args, shape, splits)
    prepared = Prepared(config, (groups, tiles, 1), 0, False, numbers, shape, slots, combined)
    return launch_of(prepared, args, _pack_leading)
