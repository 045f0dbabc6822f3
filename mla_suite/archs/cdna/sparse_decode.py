"""sparse_decode on the CDNA archs: the configuration of a kernel, how many splits, and how it is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from mla_suite.archs import ArchSpec, combine, sparse_attention
from mla_suite.archs.attention import SPARSE_INPUTS, call_of, combined
from mla_suite.archs.combine import OUTPUTS
from mla_suite.launch.spec import CallSpec, LaunchSpec, Temporary
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.sparse_decode import Problem, SparseDecodeArgs

FEW_GROUPS = 4
MIN_SPLIT, MIN_SPLIT_OF_FEW = 128, 64
"""The fewest keys of a split; the latter where one split of every query token takes FEW_GROUPS workgroups at most.
Below this, combining costs more than another compute unit saves, in the model of time (K26 in csrc/gfx942/PERF.md)."""
WAVES = 4


@dataclass(frozen=True)
class CdnaSparseConfig:
    """One instance of csrc/<arch>/sparse_decode.hip. Construction raises ValueError, in a sentence, if it is illegal.

    record  how a selected token is stored: a value of `records`
    rows    query rows (heads of one token) that a workgroup holds: one of `rows_of(record)`

    A subclass names the arch that it belongs to, its records as `archs.sparse_attention.RECORDS` has them, and the
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
        kv_formats = [pool.kv_format for pool in problem.pools]
        record = sparse_attention.record_of(kv_formats, problem.head_dim, cls.records) or "none"
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

    def built_from(self, heads: int) -> tuple[str, ...]:
        """Names of the instances that calls of so many heads may launch."""
        return (self.instance,)

    def tiles(self, heads: int) -> int:
        """Workgroups that share the keys of one query token."""
        return -(-heads // self.rows)

    def default_splits(self, groups: int, keys: int) -> int:
        """Splits where arguments say nothing, of tokens that select `keys` keys and take `groups` workgroups in all.

        They fill the device once, as far as each has keys enough.
        """
        least = MIN_SPLIT_OF_FEW if groups <= FEW_GROUPS else MIN_SPLIT
        return max(1, min(self.arch.compute_units // groups, keys // least))

    def spec(self, outputs: tuple[torch.Tensor, ...], args: SparseDecodeArgs) -> CallSpec:
        """The launch of sparse_decode, and of the combine behind it."""
        out, lse = outputs
        if out.numel() == 0:
            return CallSpec()
        shape = sparse_attention.shape_of(args, out)
        temporaries = list[Temporary]()
        reached = shape.q.in_whole_vectors and shape.q_rope is None
        shape, query_copies, query_notes = sparse_attention.queries(args, shape, reached)
        copies = sparse_attention.copies(args) + query_copies
        if not shape.out.in_whole_vectors:
            shape = shape._replace(out=shape.out.copied())
            temporaries.append(Temporary(OUTPUTS["out"]))
        # The kernels store lse as [tokens, heads] with -inf, and it is converted for who wants it otherwise.
        if args.plus_inf_lse or not lse.is_contiguous():
            temporaries.append(Temporary(OUTPUTS["lse"], args.plus_inf_lse))
        groups = shape.batch * self.tiles(shape.heads)
        splits = sparse_attention.splits(args, shape, lambda: self.default_splits(groups, shape.keys))
        slots, work_tiles = splits.slots(shape), splits.tiles(shape)
        if shape.plan_words:
            work_tiles = min(work_tiles, self.arch.compute_units)
        numbers = sparse_attention.numbers(args, shape, splits) | dict(
            q_token_stride=shape.q.strides[0],
            q_head_stride=shape.q.strides[1],
            grid_stride=work_tiles,
            fp4=sparse_attention.fp4_pools(tuple(args.kv_formats)),
        )
        pointers = {"q": SPARSE_INPUTS["q"], **sparse_attention.pointers(args, slots > 0)}
        grid = (work_tiles, self.tiles(shape.heads), 1)
        launch = LaunchSpec(self.instance, grid, self.threads, 0, False, "sparse_decode", numbers, pointers)
        merge = None
        if slots:
            chosen = combine.config_for(shape.combine_problem(args.head_dim_v, slots), self.arch, splits.size > 0)
            wanted = LseLayout.contiguous(shape.heads), False
            merge = combined(chosen, args, shape, shape.out, wanted, splits.partials)
        notes = [splits.note(shape, "query token"), *query_notes]
        return call_of(launch, merge, shape, slots, args.head_dim_v, copies, temporaries, notes)
