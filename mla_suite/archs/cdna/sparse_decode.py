"""sparse_decode on the CDNA archs: the configuration of a kernel, how many splits, and how it is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.common import combine
from mla_suite.archs.common.sparse_decode import (
    MIN_SPLIT,
    POINTERS,
    Prepared,
    Shape,
    combine_launch,
    launch_of,
    numbers_of,
    record_of,
    shape_of,
    slots_and_tiles,
    split_note,
    splits_of_call,
)
from mla_suite.build.params import packer
from mla_suite.core.dispatch import Launch
from mla_suite.ops.sparse_decode import Problem, SparseDecodeArgs

WAVES = 4
LEADING = ("q", *POINTERS)
_pack_leading = packer(len(LEADING)).pack


@dataclass(frozen=True)
class CdnaSparseConfig:
    """One instance of csrc/<arch>/sparse_decode.hip. Construction raises ValueError, in a sentence, if it is illegal.

    record  how a selected token is stored: a value of `records`
    rows    query rows (heads of one token) that a workgroup holds: one of `rows_of(record)`

    A subclass names the arch that it belongs to, its records as `archs.common.sparse_decode.RECORDS` has them, and the
    rows of its instances, fewest first.
    """

    arch_name: ClassVar[str]
    records: ClassVar[Mapping[tuple[str, int], str]]
    block_ms: ClassVar[tuple[int, ...]]

    arch: ArchSpec = field(repr=False)
    record: str
    rows: int

    def __post_init__(self) -> None:
        if self.arch.name != self.arch_name:
            self._raise(f"{self.arch.name} has no such kernels, {self.arch_name} has")
        if self.record not in self.records.values():
            self._raise(f"records are {', '.join(dict.fromkeys(self.records.values()))}")
        if self.rows not in self.rows_of(self.record):
            self._raise(f"rows are one of {', '.join(map(str, self.rows_of(self.record)))}")

    @classmethod
    def for_problem(cls, problem: Problem, arch: ArchSpec) -> CdnaSparseConfig:
        """The instance for a problem; it depends on heads and kv_formats alone, as batch-invariant calls need it."""
        record = record_of([pool.kv_format for pool in problem.pools], problem.head_dim, cls.records) or "none"
        return cls(arch, record, cls.tile_rows(record, problem.heads))

    @classmethod
    def rows_of(cls, record: str) -> tuple[int, ...]:
        """Rows of the instances that read a record."""
        return cls.block_ms

    @classmethod
    def tile_rows(cls, record: str, heads: int) -> int:
        """Rows of a workgroup: the fewest that hold all heads, or one of the near-equal tiles of many heads."""
        possible = cls.rows_of(record)
        tiles = -(-heads // possible[-1])
        return next(rows for rows in possible if rows * tiles >= heads)

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

    def notes(self, outputs: tuple[torch.Tensor, ...], args: SparseDecodeArgs) -> tuple[str, ...]:
        """Returns what `explain` says of a call: how its keys are split."""
        if outputs[0].numel() == 0:
            return ()
        shape = shape_of(args, args.q, outputs, any_lse=False)
        return (split_note(shape, _splits(self, args, shape)),)

    def prepare(self, outputs: tuple[torch.Tensor, ...], args: SparseDecodeArgs) -> Launch:
        """The launch of sparse_decode."""
        if outputs[0].numel() == 0:
            return lambda outputs, tensors: None
        q = -args.q if args.softmax_scale < 0 else args.q  # the kernels find the largest score before they scale
        shape = shape_of(args, q, outputs, any_lse=False)
        units, tiles = self.arch.compute_units, self.tiles(shape.heads)
        splits = _splits(self, args, shape)
        slots, work_tiles = slots_and_tiles(shape, splits)
        groups = min(work_tiles, units) if shape.plan_words else work_tiles
        own = {"q_token_stride": shape.q.strides[0], "q_head_stride": shape.q.strides[1], "grid_stride": groups}
        numbers = numbers_of("sparse_decode", LEADING, args, shape, splits, **own)
        combined = None
        if slots:
            partials, fixed = -(-slots // shape.tokens), args.split_size > 0
            chosen = combine.config_for(
                self.arch, args.head_dim_v, shape.out.dtype, shape.heads, shape.tokens, partials, fixed
            )
            combined = combine_launch(chosen, args, shape, splits)
        prepared = Prepared(self, (groups, tiles, 1), 0, False, numbers, shape, slots, combined)
        return launch_of(prepared, args, _pack_leading)


def _splits(config: CdnaSparseConfig, args: SparseDecodeArgs, shape: Shape) -> int:
    """Splits of each query token; the kernel's own fill the device once, with MIN_SPLIT keys at least."""
    groups = shape.tokens * config.tiles(shape.heads)
    return splits_of_call(
        args, shape, lambda: max(1, min(config.arch.compute_units // groups, shape.keys // MIN_SPLIT))
    )
