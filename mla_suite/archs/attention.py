"""What the launches of decode and sparse_decode have in common on every arch: rows, splits, copies and the combine.

sparse_decode is described as decode of sequences of one query token each, whose keys are the selected ones. What it
alone has is in `sparse_attention.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import NamedTuple

import torch

from mla_suite.archs import combine
from mla_suite.archs.combine import OUTPUTS, CombineKernel
from mla_suite.build.params import divisor
from mla_suite.launch.spec import CallSpec, Copy, Input, LaunchSpec, Scratch, Slot, Temporary, inputs, present
from mla_suite.ops.combine import Problem as CombineProblem
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.decode import DecodeArgs
from mla_suite.ops.plan.metadata import HEADER_WORDS, most_work_tiles
from mla_suite.ops.sparse_decode import SparseDecodeArgs

MAX_ROW_TILES = 65535  # of a grid's second dimension
MIN_SCALE = 1e-30  # stands for 0, where a masked score of -inf times the scale would be NaN
WIDTHS = {576: 512, 512: 512, 320: 256, 288: 256, 160: 128}
"""Values of a row that dense decode has kernels for -> those of them that are V."""
NARROW = tuple(width for width, head_dim_v in WIDTHS.items() if head_dim_v < 512)
DECODE_INPUTS = inputs(DecodeArgs)
SPARSE_INPUTS = inputs(SparseDecodeArgs)
PARTIALS: Mapping[str, Slot] = {"partial_out": Scratch("partial_out"), "partial_lse": Scratch("partial_lse")}
NO_PARTIALS: Mapping[str, Slot] = dict.fromkeys(PARTIALS)


class Rows(NamedTuple):
    """Rows of queries or results by their metadata."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool  # the address is a multiple of 16

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Rows:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % 16 == 0)

    @property
    def in_whole_vectors(self) -> bool:
        """Whether 16-byte accesses reach every row."""
        return self.aligned and self.strides[-1] == 1 and gcd(*self.strides[:-1]) * self.dtype.itemsize % 16 == 0

    def copied(self, beside: Rows | None = None) -> Rows:
        """The same rows in contiguous memory of their own, with the values of others behind them."""
        shape = (*self.shape[:-1], self.shape[-1] + (0 if beside is None else beside.shape[-1]))
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        return Rows(self.dtype, shape, tuple(reversed(strides)), True)


class Shape(NamedTuple):
    """Sizes of a call, from metadata alone."""

    q: Rows
    q_rope: Rows | None  # of queries in two tensors, of which q is then the latent part
    out: Rows
    batch: int
    heads: int
    q_len: int  # query tokens of the longest sequence
    rows: int  # query rows of a sequence
    ragged: bool  # sequences differ in their query tokens
    page_size: int
    keys: int  # of a sequence at most, from its window's origin on; of sparse_decode in the mean
    plan_words: int  # 0 without a plan

    def combine_problem(self, head_dim_v: int, partials: int, num_splits: int = 0) -> CombineProblem:
        """What combine does with so many partials of all sequences together; `num_splits` if each has that many."""
        return CombineProblem(self.batch, self.rows, head_dim_v, num_splits, self.out.dtype, False, partials)


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

    def note(self, shape: Shape, what: str) -> str:
        """What `explain` says of them; `what` is split."""
        if shape.plan_words:
            return f"the plan splits {what}s, into at most {self.slots(shape)} partial results"
        if self.number == 1:
            return f"{what}s are not split"
        if self.partials == 1:
            return f"{self.number} splits of each {what}, merged in the kernel"
        return f"{self.number} splits of each {what}, whose {self.partials} partial results combine merges"


def combined(
    config: CombineKernel,
    args: DecodeArgs | SparseDecodeArgs,
    shape: Shape,
    out: Rows,
    lse: tuple[LseLayout, bool],
    partials: int,
    merges: bool = False,
) -> LaunchSpec:
    """The launch that combines partials into rows of `out` and an lse as `combine.launch_of` has it.
    `merges` says that a decode with a plan merges some rows itself, and marks them."""
    rows, head_dim_v = shape.rows, args.head_dim_v
    slots = DECODE_INPUTS if isinstance(args, DecodeArgs) else SPARSE_INPUTS
    indptr = Input(slots["plan"].position, first=HEADER_WORDS, length=shape.batch + 1)
    pointers = {
        **PARTIALS,
        "split_indptr": indptr if shape.plan_words else None,
        "cu_seqlens_q": slots["cu_seqlens_q"] if shape.ragged else None,
        "attn_sink": None if args.attn_sink is None else slots["attn_sink"],
        **OUTPUTS,
    }
    return combine.launch_of(
        config,
        (shape.batch, rows, shape.heads),
        ((rows * head_dim_v, head_dim_v), (rows, 1), out.strides[-3:-1]),
        lse,
        True,  # scratch and results begin on 16 bytes
        out.dtype,
        1 if args.attn_sink is None else shape.heads,
        partials,
        (combine.MAY_BE_MERGED if merges else int(shape.plan_words > 0), False),
        pointers,
    )


def call_of(
    launch: LaunchSpec,
    combine_launch: LaunchSpec | None,
    shape: Shape,
    slots: int,
    head_dim_v: int,
    copies: Sequence[Copy],
    temporaries: Sequence[Temporary],
    notes: Sequence[str],
    lse_words: int = 1,
) -> CallSpec:
    """The call of a kernel that has `slots` partials, and leaves them to a combine where there is one. `lse_words` is
    how many numbers a partial's row has in place of a log-sum-exp."""
    launches: tuple[LaunchSpec, ...] = (launch,)
    scratch = dict[str, tuple[int, ...]]()
    if combine_launch is not None:
        launches += (combine_launch,)
    if slots:
        scratch = {"partial_out": (slots, shape.rows, head_dim_v), "partial_lse": (slots, shape.rows * lse_words)}
    return CallSpec(launches, scratch, tuple(copies), tuple(temporaries), tuple(notes))


def decode_shape(args: DecodeArgs, out: torch.Tensor) -> Shape:
    """The sizes of a call of decode."""
    heads, ragged = args.q.shape[-2], args.cu_seqlens_q is not None
    sizes = args.seq_lens.shape[0], heads, args.q_len, heads * args.q_len
    plan_words = 0 if args.plan is None else args.plan.shape[0]
    queries = Rows.of(args.q), None if args.q_rope is None else Rows.of(args.q_rope)
    return Shape(*queries, Rows.of(out), *sizes, ragged, args.kv_cache.shape[1], args.max_keys, plan_words)


def decode_query_copy(args: DecodeArgs, shape: Shape) -> tuple[Rows, Copy]:
    """The queries as the kernels take them where the caller's are not so, and how they are made."""
    beside = None if shape.q_rope is None else DECODE_INPUTS["q_rope"]
    return shape.q.copied(shape.q_rope), Copy(DECODE_INPUTS["q"], args.softmax_scale < 0, beside=beside)


def parts_notes(shape: Shape, read: bool) -> list[str]:
    """What `explain` says of queries in two tensors: whether the kernel reads them where they lie."""
    if shape.q_rope is None:
        return []
    return [f"the two parts of the queries are {'read where they lie' if read else 'joined by a copy'}"]


def decode_numbers(args: DecodeArgs, shape: Shape, out: Rows, splits: Splits) -> dict[str, int | float]:
    """The parameters that the decode kernels of every arch take."""
    cp_period = args.cp_interleave * args.cp_world_size
    return dict(
        kv_page_stride=args.kv_cache.stride(0),
        out_token_stride=out.strides[-3],
        out_head_stride=out.strides[-2],
        batch=shape.batch,
        heads=shape.heads,
        q_len=shape.q_len,
        rows=shape.rows,
        page=shape.page_size,
        **divisor("page", shape.page_size),
        num_splits=splits.number,
        split_size=splits.size if splits.number > 1 and not args.num_splits else 0,
        causal=int(args.causal),
        window_left=args.window_left,
        cp_interleave=args.cp_interleave,
        cp_period=cp_period,
        **divisor("cp_period", cp_period),
        cp_offset=args.cp_interleave * args.cp_rank,
        softmax_scale=max(abs(args.softmax_scale), MIN_SCALE),
    )


def decode_pointers(args: DecodeArgs, partials: bool) -> dict[str, Slot]:
    """All arguments but q_rope, the results, and partials where there are some."""
    pointers = {**present(args, DECODE_INPUTS), **OUTPUTS, **(PARTIALS if partials else NO_PARTIALS)}
    pointers.pop("q_rope")
    return pointers


def decode_mask_copies(args: DecodeArgs) -> list[Copy]:
    """The tree mask where the kernels, which take its words side by side, need a copy of it."""
    mask = args.tree_mask
    return [] if mask is None or mask.is_contiguous() else [Copy(DECODE_INPUTS["tree_mask"])]


def decode_out_is_apart(shape: Shape) -> bool:
    """Whether results need a temporary: 16-byte stores must reach every row, and one stride every next token."""
    out = shape.out
    return not out.in_whole_vectors or (not shape.ragged and out.strides[0] != shape.q_len * out.strides[1])
