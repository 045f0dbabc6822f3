"""sparse_decode: attention over selected tokens of any number of KV pools, under one softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import starmap
from typing import NamedTuple, TypeAlias

import torch

from mla_suite.core import checks, dispatch, eager
from mla_suite.core.op import Op, Output
from mla_suite.core.register import register, register_overload
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.decode.arguments import Q_DTYPES, Q_FP8, QueryParts, check_parts
from mla_suite.ops.decode.validate_data import check_descale
from mla_suite.ops.plan import check_plan, check_splits, check_words
from mla_suite.ops.plan.metadata import splits_of
from mla_suite.ops.sparse_decode import compare, reference, samples
from mla_suite.ops.sparse_decode.max_logits import with_max_logits

_Optional: TypeAlias = Sequence[torch.Tensor | None] | None


@dataclass(frozen=True)
class SparseDecodeArgs(QueryParts):
    """The arguments of `sparse_decode`, documented there, in the schema's order; the last is for its overloads."""

    q: torch.Tensor
    kv_caches: Sequence[torch.Tensor]
    indices: Sequence[torch.Tensor]
    indptrs: Sequence[torch.Tensor | None] | None = None
    topk_lengths: Sequence[torch.Tensor | None] | None = None
    attn_sink: torch.Tensor | None = None
    plan: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    kv_descale: torch.Tensor | None = None
    q_rope: torch.Tensor | None = None
    _: KW_ONLY
    kv_formats: Sequence[str]
    softmax_scale: float
    head_dim_v: int = 512
    num_splits: int = 0
    split_size: int = 0
    plus_inf_lse: bool = False


class Pool(NamedTuple):
    """The properties of one pool that a choice of sparse_decode kernel may depend on."""

    kv_format: str
    alignment: int  # largest power of two up to 16 that divides the cache's address and block stride, in bytes


class Problem(NamedTuple):
    """The properties a choice of sparse_decode kernel may depend on."""

    heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    pools: tuple[Pool, ...]


def sparse_decode(
    q: torch.Tensor,
    kv_caches: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    indptrs: Sequence[torch.Tensor | None] | None = None,
    topk_lengths: Sequence[torch.Tensor | None] | None = None,
    attn_sink: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    kv_descale: torch.Tensor | None = None,
    q_rope: torch.Tensor | None = None,
    *,
    kv_formats: Sequence[str],
    softmax_scale: float,
    head_dim_v: int = 512,
    num_splits: int = 0,
    split_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each query token to the tokens that `indices` select from `kv_caches`, one softmax over all of them.

    q             [batch, q_len, heads, head_dim] or [tokens, heads, head_dim]; bfloat16, float16, float32 or
                  float8
    kv_caches     per pool: [num_pages, page_size, width] in its kv_format; pools differ freely in all of these
    indices       per pool, int32, page id * page_size + offset: dense [batch, q_len, topk] or [tokens, topk], or
                  ragged [n]
    indptrs       per pool: int32 [query tokens + 1] for ragged indices, token t selects indptr[t]..indptr[t + 1];
                  None for dense ones
    topk_lengths  per pool, for dense indices: int32 [batch], [batch, q_len] or [tokens]: only that many of the topk
                  count; None: all
    attn_sink     [heads] fp32 logits: adds exp(sink) to the denominator of `out`, never to `lse`
    plan          from `mla_suite.plan` with the selected keys of each query token as seq_lens, for kernels that share
                  their work out; changes no result beyond rounding
    q_descale     [] or [1] fp32, multiplies float8 queries to dequantise them
    kv_descale    [] or [1] fp32, multiplies the rows of all pools, whose kv_formats are then fp8 or fp8_fnuz: e4m3
                  and no scales; None is 1, here and above
    q_rope        the last head_dim - head_dim_v values of each query row, as in `decode`
    kv_formats    per pool: a name of `python -m mla_suite formats`
    softmax_scale multiplies q . k
    head_dim_v    V is the first head_dim_v values of a row
    num_splits    forced splits per query token; 0 leaves it to the kernel
    split_size    the most keys of a split in batch-invariant mode, as `plan` says; 0 is off

    -> out [..., heads, head_dim_v] in q's dtype (bfloat16 for float8), lse [..., heads] fp32 natural log, of the keys
    alone.

    An index that is negative or past its pool selects nothing; an index given twice is two keys. What is not selected
    is never read into a result. A query token with no key gives out 0 and lse -inf, whatever the sink. ValueError where
    partial results would take more than 8 GiB on a GPU.
    """
    try:
        if isinstance(kv_formats, str):
            raise TypeError  # its letters would count as names
        pools, names = len(kv_caches), tuple(kv_formats)
    except TypeError:
        given = f"are a {type(kv_caches).__name__} and a {type(kv_formats).__name__}"
        checks.fail("sparse_decode", "kv_caches and kv_formats", given, "each is a list, one entry per pool", TypeError)
    indptrs = [None] * pools if indptrs is None else indptrs
    topk_lengths = [None] * pools if topk_lengths is None else topk_lengths
    tensors = q, kv_caches, indices, indptrs, topk_lengths, attn_sink, plan, q_descale, kv_descale, q_rope
    return eager.call(SPARSE_DECODE.functional, tensors, (names, softmax_scale, head_dim_v, num_splits, split_size))


def _per_pool(kv_caches: Sequence[torch.Tensor], given: _Optional) -> Sequence[torch.Tensor | None]:
    """As `sparse_decode` passes it on; that spells it out, since every call of it would pay for two frames."""
    return [None] * len(kv_caches) if given is None else given


def check(args: SparseDecodeArgs) -> tuple[Output, ...]:
    indptrs, topk_lengths = _per_pool(args.kv_caches, args.indptrs), _per_pool(args.kv_caches, args.topk_lengths)
    names = "[tokens, heads, head_dim] or [batch, q_len, heads, head_dim]"
    checks.tensor("sparse_decode", "q", args.q, rank=(3, 4), dtypes=Q_DTYPES, names=names)
    if args.q_rope is not None:
        check_parts("sparse_decode", args.q, args.q_rope, args.head_dim_v)
    heads, head_dim = args.q.shape[-2], args.head_dim
    if len(args.kv_caches) == 0:
        checks.fail("sparse_decode", "kv_caches", "is empty", "it takes one cache per pool, at least one")
    lists = {"indices": args.indices, "indptrs": indptrs, "topk_lengths": topk_lengths, "kv_formats": args.kv_formats}
    for argument, given in lists.items():
        if len(given) != len(args.kv_caches):
            possible = f"it takes one for each of the {len(args.kv_caches)} kv_caches"
            checks.fail("sparse_decode", argument, f"has {len(given)} entries", possible)
    for i, (cache, name) in enumerate(zip(args.kv_caches, args.kv_formats, strict=True)):
        fmt = get_kv_format(name)
        argument = f"kv_caches[{i}]"
        caches.check(fmt, cache, head_dim, op="sparse_decode", argument=argument, like=args.q)
        _check_selection(args.q, i, args.indices[i], indptrs[i], topk_lengths[i])
    checks.field("sparse_decode", args, "attn_sink", checks.FLOAT32, sizes=(heads,), names="[heads]", like=args.q)
    if args.plan is not None:
        check_words("sparse_decode", args.plan, _tokens(args.q), args.q)
    _check_descales(args)
    if args.head_dim_v < 1 or args.head_dim_v > head_dim:
        checks.fail("sparse_decode", "head_dim_v", f"is {args.head_dim_v}", f"V is a part of a row: 1..{head_dim}")
    checks.scale("sparse_decode", args.softmax_scale)
    check_splits("sparse_decode", args.num_splits, args.split_size)
    dtype = torch.bfloat16 if args.q.dtype in Q_FP8 else args.q.dtype
    return Output((*args.q.shape[:-1], args.head_dim_v), dtype), Output(tuple(args.q.shape[:-1]), torch.float32)


def _check_descales(args: SparseDecodeArgs) -> None:
    if args.q_descale is not None and args.q.dtype not in Q_FP8:
        given = f"is given with queries of {str(args.q.dtype).removeprefix('torch.')}"
        checks.fail("sparse_decode", "q_descale", given, "it multiplies float8 ones: pass None")
    caches.check_single(args.q_descale, args.q, op="sparse_decode", argument="q_descale")
    for name in args.kv_formats:
        caches.check_descale(get_kv_format(name), args.kv_descale, args.q, op="sparse_decode", argument="kv_descale")


def _tokens(q: torch.Tensor) -> int | torch.SymInt:
    return q.shape[0] * q.shape[1] if q.dim() == 4 else q.shape[0]


def _check_selection(
    q: torch.Tensor, i: int, index: torch.Tensor, indptr: torch.Tensor | None, lengths: torch.Tensor | None
) -> None:
    """One pool's indices: ragged with an indptr per query token, or dense with optional lengths."""
    argument = f"indices[{i}]"
    tokens = q.shape[:-2]
    index_like_q = partial(checks.tensor, "sparse_decode", dtypes=checks.INDEX, like=q)
    if indptr is not None:
        index_like_q(argument, index, rank=1)
        index_like_q(f"indptrs[{i}]", indptr, sizes=(_tokens(q) + 1,), names="[query tokens + 1]")
        if lengths is not None:
            possible = "indptr says how many keys a token has: pass None"
            checks.fail("sparse_decode", f"topk_lengths[{i}]", f"is given with indptrs[{i}]", possible)
        return
    if index.dim() == 1:
        possible = "ragged indices need their indptr, dense ones have a dimension per query dimension and topk"
        checks.fail("sparse_decode", argument, f"has shape {tuple(index.shape)} and indptrs[{i}] is None", possible)
    names = "[batch, q_len, topk]" if q.dim() == 4 else "[tokens, topk]"
    index_like_q(argument, index, sizes=(*tokens, index.shape[-1]), names=names)
    if lengths is not None:
        argument = f"topk_lengths[{i}]"
        index_like_q(argument, lengths, rank=(1, q.dim() - 2))
        names = "[batch] or [batch, q_len]" if q.dim() == 4 else "[tokens]"
        checks.shape("sparse_decode", argument, lengths, tokens[: lengths.dim()], names)


def describe(args: SparseDecodeArgs) -> Problem:
    pools = zip(args.kv_formats, map(caches.alignment, args.kv_caches), strict=True)
    return Problem(args.q.shape[-2], args.head_dim, args.head_dim_v, args.q.dtype, tuple(starmap(Pool, pools)))


def splits_by_size(args: SparseDecodeArgs) -> int:
    """Splits per query token in batch-invariant mode: as many as the widths of dense indices need.

    Nothing on the host bounds one token's keys in ragged indices, so they are not split.
    """
    ragged = any(indptr is not None for indptr in args.indptrs or ())
    width = sum(index.shape[-1] for index in args.indices)
    return 1 if ragged else int(splits_of(width, args.split_size, args.attn_sink is not None))


def validate(args: SparseDecodeArgs) -> None:
    indptrs, topk_lengths = _per_pool(args.kv_caches, args.indptrs), _per_pool(args.kv_caches, args.topk_lengths)
    for i, (cache, name) in enumerate(zip(args.kv_caches, args.kv_formats, strict=True)):
        caches.check_base(get_kv_format(name), cache, op="sparse_decode", argument=f"kv_caches[{i}]")
        indptr, lengths, index = indptrs[i], topk_lengths[i], args.indices[i]
        if indptr is not None:
            steps = indptr.diff()
            if int(indptr[0]) < 0 or int(indptr[-1]) > index.shape[0] or bool((steps < 0).any()):
                given = f"goes from {int(indptr[0])} to {int(indptr[-1])}, smallest step {int(steps.min())}"
                possible = f"it must rise within the {index.shape[0]} entries of indices[{i}]"
                checks.fail("sparse_decode", f"indptrs[{i}]", given, possible)
        if lengths is not None and lengths.numel():
            least, most = (int(value) for value in lengths.aminmax())
            if least < 0 or most > index.shape[-1]:
                possible = f"indices[{i}] has {index.shape[-1]} entries per query token"
                checks.fail("sparse_decode", f"topk_lengths[{i}]", f"holds lengths {least}..{most}", possible)
    check_descale("sparse_decode", "q_descale", args.q_descale)
    check_descale("sparse_decode", "kv_descale", args.kv_descale)
    if args.plan is not None:
        check_plan(
            "sparse_decode", args.plan, int(_tokens(args.q)), "q's query tokens are", args.num_splits, args.split_size
        )


SPARSE_DECODE = register(
    Op(
        name="sparse_decode",
        results="(Tensor out, Tensor lse)",
        Args=SparseDecodeArgs,
        check=check,
        describe=describe,
        validate=validate,
        backends=dispatch.backends("sparse_decode", reference.run),
        samples=samples.samples,
        compare=compare.compare,
        pages=compare.pages,
        outputs=("out", "lse"),
        out_only=("plus_inf_lse",),
        strided=("lse",),
    )
)


def _check_max_logits(args: SparseDecodeArgs) -> tuple[Output, ...]:
    out, lse = check(args)
    if any(indptr is not None for indptr in args.indptrs or ()):
        possible = "it takes dense indices, -1 where a query token selects less: pass None"
        checks.fail("sparse_decode.max_logits", "indptrs", "are given", possible)
    return out, lse, lse


SPARSE_DECODE_MAX_LOGITS = register_overload(
    replace(
        SPARSE_DECODE,
        name="sparse_decode.max_logits",
        results="(Tensor out, Tensor lse, Tensor max_logits)",
        check=_check_max_logits,
        backends=tuple(map(with_max_logits, SPARSE_DECODE.backends)),
        outputs=(),
        out_only=(),
    )
)
"""Returns the largest scaled score of every row too, without the sink, and has the options of `sparse_decode.out`."""
