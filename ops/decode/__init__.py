"""decode: attention of a few query tokens per sequence over a paged latent cache."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import torch

from mla_suite.core import dispatch, eager
from mla_suite.core.op import Op
from mla_suite.core.prepared import ceil_div, rounded_up
from mla_suite.core.register import register
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.decode import compare, reference, samples, validate_data
from mla_suite.ops.decode.arguments import MAX_TREE, PRECISIONS, Q_DTYPES, Q_FP8, DecodeArgs, check
from mla_suite.ops.plan import longest_counted
from mla_suite.ops.plan.window import most_keys

__all__ = [
    "DECODE",
    "MAX_TREE",
    "PRECISIONS",
    "Q_DTYPES",
    "Q_FP8",
    "DecodeArgs",
    "Problem",
    "decode",
]


class Problem(NamedTuple):
    """The properties a choice of decode kernel may depend on. In batch-invariant mode batch and context are 0."""

    batch: int
    heads: int
    q_len: int  # max_seqlen_q when ragged
    context: int  # keys per sequence, as `context_from` says: a bound or a mean, never a length read from the device
    context_from: str
    page_size: int
    head_dim: int
    head_dim_v: int
    q_dtype: torch.dtype
    kv_format: str
    alignment: int  # largest power of two up to 16 that divides the cache's address and block stride, in bytes
    rope: int  # values of a row that rope_cos_sin rotates, 0 without it
    planned: bool
    num_splits: int
    split_size: int
    window: bool  # window_left is given
    tree: bool  # tree_mask is given
    precision: str

    def notes(self) -> tuple[str, ...]:
        """Returns the sentences `explain` adds."""
        if self.split_size > 0:
            return (f"batch-invariant (split_size {self.split_size}): the choice sees neither batch nor context",)
        return (f"context {self.context} keys per sequence, from {self.context_from}",)


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    kv_descale: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    rope_cos_sin: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    cp_tot_seq_lens: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    q_rope: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    max_seqlen_q: int = 1,
    max_seqlen_kv: int = 0,
    head_dim_v: int = 512,
    causal: bool = True,
    kv_format: str = "bf16",
    num_splits: int = 0,
    split_size: int = 0,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    window_left: int = -1,
    precision: str = "full",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the newest query tokens of each sequence to its cached keys; V is the first values of each key row.

    q             [batch, q_len, heads, head_dim], or [tokens, heads, head_dim] with cu_seqlens_q; bfloat16, float16,
                  float32 or float8
    kv_cache      [num_pages, page_size, width] in `kv_format`; token t of a sequence lies in its page t // page_size,
                  at t % page_size
    seq_lens      [batch] int32, cached keys of each sequence, those of the query tokens included
    block_table   [batch, width] int32 page ids, entries past a sequence's pages or before its window are never read; or
    kv_indptr     [batch + 1] int32 and kv_indices [n] int32: sequence b has pages kv_indices[kv_indptr[b]...]
    cu_seqlens_q  [batch + 1] int32: sequence b has query tokens cu_seqlens_q[b]..cu_seqlens_q[b + 1], at most
                  max_seqlen_q. Tokens behind the last are of no sequence, and their out and lse are not computed
    q_descale, kv_descale   [] or [1] fp32, multiply to dequantise queries of any type and fp8 caches, in fp32: finite,
                  0 or more; None is 1. Others are refused on the CPU and in debug mode, like other wrong values; else
                  results are NaN or meaningless
    attn_sink     [heads] fp32 logits: adds exp(sink) to the denominator of `out`, never to `lse`
    rope_cos_sin  [max_len, rope] fp32 = cos | sin: the cache holds un-rotated k_pe (the last rope values of a row, 64
                  as a rule, paired i with i + rope / 2), and row j is rotated to position j as it is read, in fp32,
                  then rounded to a cache's type of 16 bits, so results are those of a cache of rotated keys; q is
                  rotated already
    plan          from `mla_suite.plan`, made for these lengths or others: it decides speed and where sequences are
                  split, and changes results by rounding alone
    cp_tot_seq_lens  [batch] int32, with cp_world_size: keys of each sequence on all ranks together. Needed where a
                  causal sequence may have several query tokens; one query token sees all of a rank's keys
    tree_mask     [batch, q_len] int64, [tokens] with cu_seqlens_q: a tree of at most 64 drafts takes the place of the
                  causal limit. Query token i sees query token j's key where bit j of its word is set, and all earlier
                  keys. A chain has the words 1, 3, 7, ... Not with window_left or cp_world_size
    q_rope        [batch, q_len, heads, head_dim - head_dim_v], or [tokens, ...] like q, in q's dtype: the last values
                  of each query row, of which q then has the first head_dim_v alone. Both may be strided, as what
                  absorption and rotation leave is. `explain` says whether a native kernel reads them where they lie
    softmax_scale multiplies q . k
    max_seqlen_kv an upper bound of seq_lens, which helps to choose the kernel; 0 if unknown
    head_dim_v    values of V; a row has head_dim
    causal        query token i of n sees keys up to seq_lens - n + i; otherwise all keys
    kv_format     a name of `python -m mla_suite formats`
    num_splits    > 0: the number of equal splits of each sequence. With a plan it repeats what the plan was made with
    split_size    > 0: the most keys of a split, as `plan` says. Results are then batch-invariant among calls of one
                  max_seqlen_q. With a plan it repeats what the plan was made with
    cp_world_size, cp_rank, cp_interleave  with cp_world_size > 1, kv_cache, block_table and seq_lens are those of rank
                  cp_rank, which has the keys at global positions p with p // cp_interleave % cp_world_size == cp_rank,
                  in order and without gaps. The causal limit is on global positions; `combine` merges the results
    window_left   >= 0: keys left of a query token, without its own, that it sees (a sliding window); -1 for all.
                  Earlier keys are neither read nor counted
    precision     'full', or 'fp8': scores of float8 queries and rows may be summed by tensor cores that multiply fp8,
                  which keep 13 bits below the largest term of a sum. It is for speed, and does nothing where no kernel
                  gains by it; `explain` says whether one does. Random values' scores are then off by up to 2^-10 of
                  the largest sum of a row's first products, and no score by more than 7.3 % of it

    -> out [..., heads, head_dim_v] in q's dtype (bfloat16 for fp8), lse [..., heads] fp32 natural log.

    A query token that sees no key gives out 0 and lse -inf, whatever the sink. ValueError where partial results
    would take more than 8 GiB on a GPU.
    `torch.ops.mla_suite.decode.out(..., out=, lse=)` writes into the caller's tensors. Its lse may have any strides, as
    a view of [batch, heads, q_len] has, and with plus_inf_lse=True a query token that sees no key gives lse +inf.

    >>> q = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)
    >>> kv_cache = torch.randn(4, 64, 576, dtype=torch.bfloat16)
    >>> seq_lens = torch.tensor([100, 7], dtype=torch.int32)
    >>> block_table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    >>> out, lse = decode(q, kv_cache, seq_lens, block_table, softmax_scale=192**-0.5)
    >>> out.shape, lse.shape
    (torch.Size([2, 1, 16, 512]), torch.Size([2, 1, 16]))
    """
    tensors = (
        *(q, kv_cache, seq_lens, block_table, kv_indptr, kv_indices, cu_seqlens_q),
        *(q_descale, kv_descale, attn_sink, rope_cos_sin, plan, cp_tot_seq_lens, tree_mask, q_rope),
    )
    options = (
        *(softmax_scale, max_seqlen_q, max_seqlen_kv, head_dim_v, causal, kv_format, num_splits, split_size),
        *(cp_world_size, cp_rank, cp_interleave, window_left, precision),
    )
    return eager.call(DECODE.functional, tensors, options)


def describe(args: DecodeArgs) -> Problem:
    batch, page_size = args.seq_lens.shape[0], args.kv_cache.shape[1]
    if args.split_size > 0:
        batch, context, context_from = 0, 0, "nothing: batch-invariant"
    elif args.max_seqlen_kv > 0:
        context, context_from = args.max_seqlen_kv, "max_seqlen_kv"
    elif args.block_table is not None:
        context, context_from = args.block_table.shape[1] * page_size, "block_table width x page_size"
    else:
        pages = 0 if args.kv_indices is None else args.kv_indices.shape[0]
        context, context_from = pages * page_size // max(batch, 1), "kv_indices per sequence x page_size"
    if args.window_left >= 0 and args.split_size == 0:
        context, context_from = most_keys(context, args.q_len, args.window_left), "window_left"
    return Problem(
        batch=batch,
        heads=args.q.shape[-2],
        q_len=args.q_len,
        context=context,
        context_from=context_from,
        page_size=page_size,
        head_dim=args.head_dim,
        head_dim_v=args.head_dim_v,
        q_dtype=args.q.dtype,
        kv_format=args.kv_format,
        alignment=caches.alignment(args.kv_cache),
        rope=0 if args.rope_cos_sin is None else args.rope_cos_sin.shape[1],
        planned=args.plan is not None,
        num_splits=args.num_splits,
        split_size=args.split_size,
        window=args.window_left >= 0,
        tree=args.tree_mask is not None,
        precision=args.precision,
    )


_OPTIONS = [entry.name for entry in fields(DecodeArgs) if entry.kw_only]
_LONGEST, _SPLIT_SIZE = _OPTIONS.index("max_seqlen_kv"), _OPTIONS.index("split_size")


def rounded(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """max_seqlen_kv rounded up, and behind the options the entries of kv_indices: as many whole pages for each
    sequence, rounded up, or 0 where max_seqlen_kv stands for them."""
    longest, split_size, seq_lens, pages = options[_LONGEST], options[_SPLIT_SIZE], tensors[2], tensors[5]
    if pages is None and longest.__class__ is int and not longest:
        return options
    listed = 0
    if longest.__class__ is int and longest and split_size.__class__ is int:
        longest = longest_counted(longest, split_size)
    elif isinstance(pages, torch.Tensor) and isinstance(seq_lens, torch.Tensor):
        batch = max(seq_lens.numel(), 1)
        listed = rounded_up(ceil_div(pages.numel(), batch)) * batch
    counted = *options[:_LONGEST], longest, *options[_LONGEST + 1 :]
    return counted if pages is None else (*counted, listed)


DECODE = register(
    Op(
        name="decode",
        results="(Tensor out, Tensor lse)",
        Args=DecodeArgs,
        check=check,
        describe=describe,
        validate=validate_data.validate,
        backends=dispatch.backends("decode", reference.run),
        samples=samples.samples,
        compare=compare.compare,
        pages=compare.pages,
        outputs=("out", "lse"),
        out_only=("plus_inf_lse",),
        strided=("lse",),
        rounded=rounded,
        sized=("kv_indices",),
    )
)
