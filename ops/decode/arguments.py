"""The arguments of decode, and what is asked of them before anything is written."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeVar, cast

import torch

from mla_suite.core import checks
from mla_suite.core.op import Output
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.plan import check_splits, check_window, check_words
from mla_suite.ops.plan.metadata import OPEN
from mla_suite.ops.plan.window import most_keys

Q_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
MAX_TREE = 64  # query tokens of a sequence whose tree a word of 64 bits describes
MAX_CP_PERIOD = 2**30  # keys; the kernels divide by it in 31 bits
Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *Q_FP8)
PRECISIONS = ("full", "fp8")


_Args = TypeVar("_Args", bound="QueryParts")


class QueryParts:
    """What records of arguments have in common whose queries may be two tensors."""

    q: torch.Tensor
    q_rope: torch.Tensor | None

    def joined(self: _Args) -> _Args:
        """The arguments with the queries in one tensor."""
        if self.q_rope is None:
            return self
        whole: _Args = replace(cast(Any, self), q=torch.cat((self.q, self.q_rope), dim=-1), q_rope=None)
        return whole

    @property
    def head_dim(self) -> int:
        """Values of a query row, in one tensor or in two."""
        return self.q.shape[-1] + (0 if self.q_rope is None else self.q_rope.shape[-1])


@dataclass(frozen=True)
class DecodeArgs(QueryParts):
    """The arguments of `decode`, documented there, in the schema's order; the last is that of `decode.out`."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    kv_descale: torch.Tensor | None = None
    attn_sink: torch.Tensor | None = None
    rope_cos_sin: torch.Tensor | None = None
    plan: torch.Tensor | None = None
    cp_tot_seq_lens: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    q_rope: torch.Tensor | None = None
    _: KW_ONLY
    softmax_scale: float
    max_seqlen_q: int = 1
    max_seqlen_kv: int = 0
    head_dim_v: int = 512
    causal: bool = True
    kv_format: str = "bf16"
    num_splits: int = 0
    split_size: int = 0
    cp_world_size: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1
    window_left: int = -1
    precision: str = "full"
    plus_inf_lse: bool = False

    @property
    def q_len(self) -> int:
        """Query tokens of a sequence, of the longest where they differ."""
        return self.q.shape[1] if self.cu_seqlens_q is None else self.max_seqlen_q

    @property
    def max_keys(self) -> int:
        """Keys that a sequence has at most by the metadata alone, from its window's origin on."""
        pages = 0 if self.kv_indices is None else self.kv_indices.shape[0]
        pages = pages if self.block_table is None else self.block_table.shape[1]
        return most_keys(self.max_seqlen_kv or pages * self.kv_cache.shape[1], self.q_len, self.window_left)


def check(args: DecodeArgs) -> tuple[Output, ...]:
    fmt = get_kv_format(args.kv_format)
    ragged = args.cu_seqlens_q is not None
    names = "[tokens, heads, head_dim] with cu_seqlens_q" if ragged else "[batch, q_len, heads, head_dim]"
    checks.tensor("decode", "q", args.q, rank=3 if ragged else 4, dtypes=Q_DTYPES, names=names)
    if args.q_rope is not None:
        check_parts("decode", args.q, args.q_rope, args.head_dim_v)
    heads, head_dim = args.q.shape[-2], args.head_dim
    caches.check(fmt, args.kv_cache, head_dim, op="decode", argument="kv_cache", like=args.q)
    checks.tensor("decode", "seq_lens", args.seq_lens, rank=1, dtypes=checks.INDEX, like=args.q)
    batch = args.seq_lens.shape[0]
    if args.cu_seqlens_q is None:
        if args.q.shape[0] != batch:
            possible = f"seq_lens has {batch} sequences: it takes [{batch}, q_len, heads, head_dim]"
            checks.fail("decode", "q", f"has shape {tuple(args.q.shape)}", possible)
        if args.max_seqlen_q != 1 and args.max_seqlen_q != args.q.shape[1]:
            possible = f"q has {args.q.shape[1]} query tokens per sequence"
            checks.fail("decode", "max_seqlen_q", f"is {args.max_seqlen_q}", possible)
    else:
        checks.field("decode", args, "cu_seqlens_q", checks.INDEX, sizes=(batch + 1,), names="[batch + 1]", like=args.q)
        if args.max_seqlen_q < 1:
            checks.fail("decode", "max_seqlen_q", f"is {args.max_seqlen_q}", "pass the most query tokens of a sequence")
    _check_pages(args, batch)
    if args.head_dim_v < 1 or args.head_dim_v > head_dim:
        checks.fail("decode", "head_dim_v", f"is {args.head_dim_v}", f"it takes 1..{head_dim}, the head_dim of q")
    caches.check_single(args.q_descale, args.q, op="decode", argument="q_descale")
    caches.check_descale(fmt, args.kv_descale, args.q, op="decode", argument="kv_descale")
    checks.field("decode", args, "attn_sink", checks.FLOAT32, sizes=(heads,), names="[heads]", like=args.q)
    if args.rope_cos_sin is not None:
        checks.tensor("decode", "rope_cos_sin", args.rope_cos_sin, rank=2, dtypes=checks.FLOAT32, like=args.q)
        rope = args.rope_cos_sin.shape[1]
        if rope % 2 != 0 or rope > head_dim or (rope != fmt.rope and not fmt.dense):
            given = f"has shape {tuple(args.rope_cos_sin.shape)}"
            checks.fail("decode", "rope_cos_sin", given, f"it takes [max_len, {fmt.rope}]: cosines, then sines")
        if args.rope_cos_sin.shape[0] > 1 and args.rope_cos_sin.stride(0) != rope:
            given = f"has strides {args.rope_cos_sin.stride()}"
            checks.fail("decode", "rope_cos_sin", given, "its rows must lie side by side: call .contiguous()")
    if args.plan is not None:
        check_words("decode", args.plan, batch, args.q)
    if args.max_seqlen_kv < 0 or args.max_seqlen_kv > OPEN:
        possible = f"it takes the longest length, at most {OPEN}, or 0 when unknown"
        checks.fail("decode", "max_seqlen_kv", f"is {args.max_seqlen_kv}", possible)
    checks.scale("decode", args.softmax_scale)
    check_splits("decode", args.num_splits, args.split_size)
    _check_ranks(args, batch)
    check_window("decode", args.window_left)
    if args.precision not in PRECISIONS:
        checks.fail("decode", "precision", f"is {args.precision!r}", "it takes 'full', or 'fp8' for sums in fewer bits")
    if args.tree_mask is not None:
        _check_tree(args, args.tree_mask, batch)
    dtype = torch.bfloat16 if args.q.dtype in Q_FP8 else args.q.dtype
    return Output((*args.q.shape[:-1], args.head_dim_v), dtype), Output(tuple(args.q.shape[:-1]), torch.float32)


def _check_ranks(args: DecodeArgs, batch: int) -> None:
    world, rank, interleave = args.cp_world_size, args.cp_rank, args.cp_interleave
    if world < 1:
        checks.fail("decode", "cp_world_size", f"is {world}", "it takes the number of ranks, 1 or more")
    if rank < 0 or rank >= world:
        checks.fail("decode", "cp_rank", f"is {rank}", f"it takes 0 to {world - 1}, below cp_world_size")
    if interleave < 1 or interleave * world > MAX_CP_PERIOD:
        possible = f"it takes 1 or more keys, with all {world} ranks at most {MAX_CP_PERIOD}"
        checks.fail("decode", "cp_interleave", f"is {interleave}", possible)
    checks.field("decode", args, "cp_tot_seq_lens", checks.INDEX, sizes=(batch,), names="[batch]", like=args.q)
    if world == 1:
        return
    if args.cp_tot_seq_lens is None and args.causal and checks.certain(args.q_len > 1):
        possible = f"{args.q_len} causal query tokens need the keys of each sequence on all {world} ranks"
        checks.fail("decode", "cp_tot_seq_lens", "is missing", possible)
    if args.rope_cos_sin is not None:
        possible = "local positions are not the sequence's: cache rotated keys"
        checks.fail("decode", "rope_cos_sin", f"is given with cp_world_size {world}", possible)
    if args.attn_sink is not None:
        possible = "every rank would add it: give it to the combine that merges the ranks"
        checks.fail("decode", "attn_sink", f"is given with cp_world_size {world}", possible)
    if args.window_left >= 0:
        possible = "a window's keys lie on few ranks: attend on the ranks that have them, or with one rank"
        checks.fail("decode", "window_left", f"is {args.window_left} with cp_world_size {world}", possible)


def check_parts(op: str, q: torch.Tensor, q_rope: torch.Tensor, head_dim_v: int) -> None:
    """Queries in two tensors."""
    names = f"{list(q.shape[:-1])} and the rope part, beside q"
    checks.tensor(op, "q_rope", q_rope, rank=q.dim(), dtypes=(q.dtype,), like=q, names=names)
    if q_rope.shape[:-1] != q.shape[:-1] or checks.certain(q_rope.shape[-1] == 0):
        checks.fail(op, "q_rope", f"has shape {tuple(q_rope.shape)}", f"it takes {names}")
    if q.shape[-1] != head_dim_v:
        possible = f"beside q_rope it takes the first head_dim_v = {head_dim_v} values of each row"
        checks.fail(op, "q", f"has rows of {q.shape[-1]} values", possible)


def _check_tree(args: DecodeArgs, tree_mask: torch.Tensor, batch: int) -> None:
    ragged = args.cu_seqlens_q is not None
    shape, words = ((args.q.shape[0],), "[tokens]") if ragged else ((batch, args.q.shape[1]), "[batch, q_len]")
    checks.tensor("decode", "tree_mask", tree_mask, sizes=shape, dtypes=(torch.int64,), like=args.q, names=words)
    if checks.certain(args.q_len > MAX_TREE):
        given = f"is given for {args.q_len} query tokens of a sequence"
        checks.fail("decode", "tree_mask", given, f"a word has bits for {MAX_TREE}")
    if not args.causal:
        checks.fail("decode", "tree_mask", "is given with causal=False", "it takes the place of the causal limit")
    for name, both in (("window_left", args.window_left >= 0), ("cp_world_size", args.cp_world_size > 1)):
        if both:
            possible = "the position of a draft does not follow from its place in a tree: pass one of the two"
            checks.fail("decode", "tree_mask", f"is given with {name} {getattr(args, name)}", possible)


def _check_pages(args: DecodeArgs, batch: int) -> None:
    if (args.kv_indptr is None) != (args.kv_indices is None):
        missing, given = ("kv_indptr", "kv_indices") if args.kv_indptr is None else ("kv_indices", "kv_indptr")
        checks.fail("decode", missing, f"is missing although {given} is given", "pass both, or block_table alone")
    if (args.block_table is None) == (args.kv_indices is None):
        given = "is missing" if args.block_table is None else "is given beside kv_indices"
        checks.fail("decode", "block_table", given, "pass exactly one of block_table or (kv_indptr, kv_indices)")
    if args.block_table is not None:
        names = "[batch, width]"
        checks.tensor("decode", "block_table", args.block_table, rank=2, dtypes=checks.INDEX, like=args.q, names=names)
        if args.block_table.shape[0] != batch:
            given = f"has shape {tuple(args.block_table.shape)}"
            checks.fail("decode", "block_table", given, f"seq_lens has {batch} sequences: it takes [{batch}, width]")
    checks.field("decode", args, "kv_indptr", checks.INDEX, sizes=(batch + 1,), names="[batch + 1]", like=args.q)
    checks.field("decode", args, "kv_indices", checks.INDEX, rank=1, like=args.q)
