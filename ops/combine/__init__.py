"""combine: merge the partial attention results of splits into one result."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch

from mla_suite.core import checks, dispatch, eager
from mla_suite.core.op import Op, Output
from mla_suite.core.register import register
from mla_suite.ops.combine import compare, reference, samples

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class CombineArgs:
    """The arguments of `combine`, documented there, in the schema's order; the last two are those of `combine.out`."""

    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    split_indptr: torch.Tensor | None = None
    attn_sink: torch.Tensor | None = None
    _: KW_ONLY
    num_splits: int = 0
    out_dtype: torch.dtype | None = None
    skip_single: bool = False
    plus_inf_lse: bool = False


class Problem(NamedTuple):
    """The properties a choice of combine kernel may depend on."""

    batch: int
    rows: int
    head_dim_v: int
    num_splits: int  # per sequence; 0 when split_indptr says it
    out_dtype: torch.dtype
    skip_single: bool
    splits: int  # of the whole batch; with split_indptr, as many as partial_out has room for
    plus_inf_lse: bool = False

    @property
    def mean_splits(self) -> int:
        """Splits of a sequence, in the mean, rounded up."""
        return self.num_splits or -(-self.splits // max(self.batch, 1))

    @property
    def uniform_splits(self) -> int:
        """Splits of every sequence where all are merged and have equally many; else 0."""
        return 0 if self.skip_single else self.num_splits


def combine(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    split_indptr: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    *,
    num_splits: int = 0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the splits of each sequence by their log-sum-exp.

    partial_out   [splits, rows, head_dim_v] fp32, the normalised output of each split; a sequence's splits are adjacent
    partial_lse   [splits, rows] fp32, natural log
    split_indptr  [batch + 1] int32, sequence b owns splits split_indptr[b]..split_indptr[b + 1]; or
    num_splits    splits per sequence, the same for all
    attn_sink     [heads] fp32 logits, rows = q_len x heads: adds exp(sink) to the denominator of `out`, never to `lse`
    out_dtype     bfloat16, float16 or float32

    -> out [batch, rows, head_dim_v] out_dtype, lse [batch, rows] fp32 natural log.

    A split whose lse is -inf, or whose weight rounds to zero in fp32, counts for nothing, whatever it holds; so does
    one of lse +inf and all zeros, as FlashMLA marks a row without keys. A sequence with no split, or only splits of
    lse -inf and such marked ones, gives out 0 and lse -inf. A NaN lse, or NaN in a split of nonzero weight, gives NaN.
    A sink of +inf gives out 0 unless an lse is NaN.
    `torch.ops.mla_suite.combine.out(..., skip_single=True, out=, lse=)` leaves the rows of sequences with exactly one
    split untouched, for producers that wrote them already. Its lse may have any strides, and with plus_inf_lse=True it
    is +inf where it would be -inf.
    """
    tensors = partial_out, partial_lse, split_indptr, attn_sink
    # AOTInductor of torch 2.11 and older passes a dtype on by another numbering, and None as it is: bfloat16.
    return eager.call(COMBINE.functional, tensors, (num_splits, None if out_dtype is torch.bfloat16 else out_dtype))


def check(args: CombineArgs) -> tuple[Output, ...]:
    checks.tensor("combine", "partial_out", args.partial_out, rank=3, dtypes=checks.FLOAT32)
    checks.tensor("combine", "partial_lse", args.partial_lse, rank=2, dtypes=checks.FLOAT32, like=args.partial_out)
    splits, rows, head_dim_v = args.partial_out.shape
    checks.shape("combine", "partial_lse", args.partial_lse, (splits, rows), "[splits, rows]")
    out_dtype = args.out_dtype or torch.bfloat16
    if out_dtype not in OUT_DTYPES:
        checks.fail("combine", "out_dtype", f"is {out_dtype}", f"it takes {checks.dtype_names(OUT_DTYPES)}", TypeError)
    if (args.split_indptr is None) != bool(args.num_splits != 0):
        given = "are both missing" if args.split_indptr is None else "are both given"
        checks.fail("combine", "split_indptr and num_splits", given, "pass exactly one of the two")
    if args.split_indptr is not None:
        checks.tensor("combine", "split_indptr", args.split_indptr, rank=1, dtypes=checks.INDEX, like=args.partial_out)
        if args.split_indptr.shape[0] < 1:
            checks.fail("combine", "split_indptr", "is empty", "it takes [batch + 1], so at least one value")
        batch = args.split_indptr.shape[0] - 1
    else:
        if args.num_splits < 1 or splits % args.num_splits != 0:
            checks.fail(
                "combine", "num_splits", f"is {args.num_splits}", f"it must divide the {splits} splits of partial_out"
            )
        batch = splits // args.num_splits
    if args.attn_sink is not None:
        checks.tensor("combine", "attn_sink", args.attn_sink, rank=1, dtypes=checks.FLOAT32, like=args.partial_out)
        if args.attn_sink.shape[0] < 1 or rows % args.attn_sink.shape[0] != 0:
            given = f"has {args.attn_sink.shape[0]} heads"
            checks.fail("combine", "attn_sink", given, f"its heads must divide the {rows} rows of partial_out")
    return Output((batch, rows, head_dim_v), out_dtype), Output((batch, rows), torch.float32)


def describe(args: CombineArgs) -> Problem:
    splits, rows, head_dim_v = args.partial_out.shape
    batch = args.split_indptr.shape[0] - 1 if args.split_indptr is not None else splits // args.num_splits
    out_dtype = args.out_dtype or torch.bfloat16
    return Problem(batch, rows, head_dim_v, args.num_splits, out_dtype, args.skip_single, splits, args.plus_inf_lse)


def validate(args: CombineArgs) -> None:
    if args.split_indptr is not None:
        bounds = args.split_indptr.tolist()
        if bounds[0] < 0 or bounds != sorted(bounds) or bounds[-1] > args.partial_out.shape[0]:
            possible = f"it must rise, from 0 or more to at most the {args.partial_out.shape[0]} splits of partial_out"
            checks.fail("combine", "split_indptr", f"is {bounds}", possible)


COMBINE = register(
    Op(
        name="combine",
        results="(Tensor out, Tensor lse)",
        Args=CombineArgs,
        check=check,
        describe=describe,
        validate=validate,
        backends=dispatch.backends("combine", reference.run),
        samples=samples.samples,
        compare=compare.compare,
        outputs=("out", "lse"),
        out_only=("skip_single", "plus_inf_lse"),
        strided=("lse",),
    )
)
