"""Launching decode: what all archs share. An arch says which kernel, how many splits and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.common import combine, decode_table
from mla_suite.archs.common.attention import (
    MIN_SCALE,
    Rows,
    combined_buffers,
    contiguous_outputs,
    copy_back,
    written_buffers,
)
from mla_suite.archs.common.combine import AnyCombineConfig, CombineLaunch
from mla_suite.build.params import reciprocal
from mla_suite.core.dispatch import Launch
from mla_suite.launch import Buffer, bind
from mla_suite.launch.driver import Start
from mla_suite.launch.scratch import take
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.decode import DecodeArgs
from mla_suite.ops.plan.metadata import HEADER_WORDS, most_work_tiles

NO_MASK = "window_left or tree_mask; its kernels mask nothing but the causal limit"
MIN_SPLIT = 256  # keys: below this, combining costs more than another compute unit saves

POINTERS = (
    *("q", "kv_cache", "seq_lens", "block_table", "kv_indptr", "kv_indices", "cu_seqlens_q", "q_descale"),
    *("kv_descale", "attn_sink", "rope_cos_sin", "plan", "cp_tot_seq_lens", "out", "lse", "partial_out", "partial_lse"),
)
INPUTS = POINTERS[: POINTERS.index("out")]


class DecodeConfig(Protocol):
    """The configuration of a decode kernel."""

    @property
    def arch(self) -> ArchSpec: ...
    @property
    def instance(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def tiles(self, rows: int) -> int: ...


class Shape(NamedTuple):
    """Sizes of a call, from metadata alone."""

    q: Rows
    out: Rows
    batch: int
    heads: int
    q_len: int  # query tokens of the longest sequence
    ragged: bool  # sequences differ in their query tokens
    page_size: int
    bound: int  # keys that a sequence has at most
    plan_words: int  # 0 without a plan

    @property
    def rows(self) -> int:
        """Query rows of a sequence."""
        return self.heads * self.q_len


def shape_of(args: DecodeArgs, q: torch.Tensor, out: torch.Tensor) -> Shape:
    """The sizes of a call with queries `q`, which may be a negated copy of the argument."""
    ragged, page_size = args.cu_seqlens_q is not None, args.kv_cache.shape[1]
    pages = args.block_table.shape[1] if args.block_table is not None else _entries(args)
    return Shape(
        Rows.of(q),
        Rows.of(out),
        args.seq_lens.shape[0],
        q.shape[-2],
        args.max_seqlen_q if ragged else q.shape[1],
        ragged,
        page_size,
        args.max_seqlen_kv or pages * page_size,
        0 if args.plan is None else args.plan.shape[0],
    )


def _entries(args: DecodeArgs) -> int:
    return 0 if args.kv_indices is None else args.kv_indices.shape[0]


class Splits(NamedTuple):
    """How the keys of sequences are split.

    number    equal splits per sequence; 1 with a plan, which has its own
    partials  partial results per sequence; 1 is the result itself
    size      keys of a split in batch-invariant mode, else 0
    """

    number: int
    partials: int
    size: int

    def slots(self, shape: Shape) -> int:
        """Partial results of all sequences together."""
        if shape.plan_words:
            return int(most_work_tiles(shape.plan_words, shape.batch))
        return shape.batch * self.partials if self.partials > 1 else 0

    def tiles(self, shape: Shape) -> int:
        """Work tiles that a launch walks."""
        return self.slots(shape) if shape.plan_words else shape.batch * self.number

    def note(self, shape: Shape) -> str:
        """Returns what `explain` says of them."""
        if shape.plan_words:
            return f"the plan splits sequences, into at most {self.slots(shape)} partial results"
        if self.number == 1:
            return "sequences are not split"
        if self.partials == 1:
            return f"{self.number} splits of each sequence, merged in the kernel"
        return f"{self.number} splits of each sequence, whose {self.partials} partial results combine merges"


def numbers_of(args: DecodeArgs, shape: Shape, out: Rows, splits: Splits) -> dict[str, int | float]:
    """The parameters that the kernels of every arch take."""
    page_reciprocal, page_shift = reciprocal(shape.page_size)
    cp_period = args.cp_interleave * args.cp_world_size
    cp_period_reciprocal, cp_period_shift = reciprocal(cp_period)
    return dict(
        kv_page_stride=args.kv_cache.stride(0),
        out_token_stride=out.strides[-3],
        out_head_stride=out.strides[-2],
        batch=shape.batch,
        heads=shape.heads,
        q_len=shape.q_len,
        rows=shape.rows,
        page=shape.page_size,
        page_reciprocal=page_reciprocal,
        page_shift=page_shift,
        num_splits=splits.number,
        split_size=splits.size if splits.number > 1 and not args.num_splits else 0,
        causal=int(args.causal),
        cp_interleave=args.cp_interleave,
        cp_period=cp_period,
        cp_period_reciprocal=cp_period_reciprocal,
        cp_period_shift=cp_period_shift,
        cp_offset=args.cp_interleave * args.cp_rank,
        softmax_scale=max(abs(args.softmax_scale), MIN_SCALE),
    )


def combine_launch(
    config: AnyCombineConfig,
    args: DecodeArgs,
    shape: Shape,
    out: Rows,
    lse: tuple[LseLayout, bool],
    partials: int,
    merges: bool = False,
) -> CombineLaunch:
    """The launch that combines the partials of decode into rows of `out` and an lse as `combine.prepare` has it.
    `merges` says that a decode with a plan merges some rows itself, and marks them."""
    rows, head_dim_v = shape.rows, args.head_dim_v
    return combine.prepare(
        config,
        (shape.batch, rows, shape.heads),
        ((rows * head_dim_v, head_dim_v), (rows, 1), out.strides[-3:-1]),
        lse,
        True,  # scratch and results begin on 16 bytes
        out.dtype,
        1 if args.attn_sink is None else shape.heads,
        partials,
        (combine.MAY_BE_MERGED if merges else int(shape.plan_words > 0), False),
    )


def copies_out(shape: Shape) -> bool:
    """Whether results need a temporary: 16-byte stores must reach every row, and one stride every next token."""
    out = shape.out
    return not out.in_whole_vectors or (not shape.ragged and out.strides[0] != shape.q_len * out.strides[1])


def default_splits(config: DecodeConfig, args: DecodeArgs, shape: Shape) -> int:
    """Splits per sequence where neither arguments nor a table say: the device filled once, MIN_SPLIT keys at least."""
    tuned = tuned_splits(config.arch, args, shape)
    if tuned:
        return tuned
    return max(1, min(config.arch.compute_units // (shape.batch * config.tiles(shape.rows)), shape.bound // MIN_SPLIT))


def tuned_splits(arch: ArchSpec, args: DecodeArgs, shape: Shape) -> int:
    """Splits of each sequence that the arch's tuned table says, as far as there are keys; 0 where it says nothing."""
    row = decode_table.row_for(
        arch, args.q.dtype, args.kv_format, shape.heads, shape.q_len, shape.batch, shape.bound, args.split_size > 0
    )
    tuned = 0 if row is None else int(row.values["num_splits"])
    return max(1, min(tuned, shape.bound // MIN_SPLIT)) if tuned else 0


def negated(q: torch.Tensor) -> torch.Tensor:
    """The queries that the kernels take for a negative softmax_scale, beside its absolute value: they find the largest
    score before they scale it. No q_descale is negative."""
    return -q if q.element_size() > 1 else (-q.float()).to(q.dtype)


class Prepared(NamedTuple):
    """One launch of decode and the combine behind it, without addresses."""

    config: DecodeConfig
    grid: tuple[int, int, int]
    shared: int  # bytes of dynamic shared memory
    overlap: bool  # the kernel may begin before the one ahead of it on the stream ends
    numbers: bytes  # the parameters after those that hold addresses
    copies_q: bool  # whether the kernel cannot reach the rows of q or out as they lie, or write lse as it is wanted
    copies_out: bool
    copies_lse: bool
    slots: int  # partials of all sequences
    rows: int  # query rows of a split
    combine: CombineLaunch | None  # None when nothing is split


def launch_of(prepared: Prepared, args: DecodeArgs, pack_leading: Callable[..., bytes]) -> Launch:
    """The launch of decode.

    pack_leading  (*addresses in the order of POINTERS) -> the parameters that hold addresses
    """
    config, slots, rows, batch = prepared.config, prepared.slots, prepared.rows, args.seq_lens.shape[0]
    named = partial(_buffers, slots, rows)
    launched = args.q, prepared.grid, config.threads, prepared.shared
    enqueue = bind("decode", config.instance, *launched, named, overlap=prepared.overlap)
    numbers, copies_q, plus_inf_lse = prepared.numbers, prepared.copies_q, args.plus_inf_lse
    negative = args.softmax_scale < 0
    copies = prepared.copies_out, prepared.copies_lse
    copied = any(copies)
    partial_values = slots * rows * args.head_dim_v
    scratch_values = partial_values + slots * rows
    combined: CombineLaunch | None = prepared.combine
    enqueue_combine: Start | None = None
    combine_numbers, pack_combine = b"", combine.pack_pointers
    if combined is not None:
        enqueue_combine = combine.bind_launch(combined, args.q, partial(combined_buffers, slots, rows))
        combine_numbers = combined.numbers

    def launch(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
        tensors = tensors[:-1]  # no kernel here takes a tree_mask
        q, _, _, _, _, _, cu_seqlens_q, _, _, attn_sink, _, plan, _ = tensors
        if negative:
            q = negated(q)
            tensors = q, *tensors[1:]
        if copies_q:
            q = q.clone(memory_format=torch.contiguous_format)
            tensors = q, *tensors[1:]
        out, lse = contiguous_outputs(outputs, copies) if copied else outputs
        inputs_at = []
        for tensor in tensors:
            inputs_at.append(0 if tensor is None else tensor.data_ptr())
        out_at, lse_at = out.data_ptr(), lse.data_ptr()
        if enqueue_combine is None:
            enqueue(pack_leading(*inputs_at, out_at, lse_at, 0, 0) + numbers, (tensors, (out, lse), None))
        else:
            scratch = take(q.device, scratch_values)
            partial_at = scratch.data_ptr()
            partial_lse_at = partial_at + 4 * partial_values
            leading = pack_leading(*inputs_at, out_at, lse_at, partial_at, partial_lse_at)
            enqueue(leading + numbers, (tensors, (out, lse), scratch))
            indptr_at = inputs_at[11] and inputs_at[11] + 4 * HEADER_WORDS
            leading = pack_combine(partial_at, partial_lse_at, indptr_at, inputs_at[6], inputs_at[9], out_at, lse_at)
            enqueue_combine(leading + combine_numbers, (batch, cu_seqlens_q, attn_sink, plan, (out, lse), scratch))
        if copied:
            copy_back(outputs, (out, lse), plus_inf_lse)

    return launch


def _buffers(
    slots: int,
    rows: int,
    inputs: tuple[torch.Tensor | None, ...],
    results: tuple[torch.Tensor, torch.Tensor],
    scratch: torch.Tensor | None,
) -> Iterator[Buffer]:
    """The tensors that the kernel touches; inputs in the order of INPUTS."""
    yield from (Buffer(name, tensor, "r") for name, tensor in zip(INPUTS, inputs, strict=True) if tensor is not None)
    yield from written_buffers(slots, rows, results, scratch)
