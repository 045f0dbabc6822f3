"""Checks of the values inside decode's tensors: they read device data, so they run on the CPU and in debug mode."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from mla_suite.core import checks
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.decode.reference import keys_of_rank, pages_read
from mla_suite.ops.plan import check_lengths, check_plan


def validate(args: Any) -> None:
    caches.check_base(get_kv_format(args.kv_format), args.kv_cache, op="decode", argument="kv_cache")
    check_lengths("decode", args.seq_lens, args.max_seqlen_kv)
    check_descale("decode", "q_descale", args.q_descale)
    check_descale("decode", "kv_descale", args.kv_descale)
    if args.cu_seqlens_q is not None:
        _check_queries(args.cu_seqlens_q, args.q.shape[0], args.max_seqlen_q)
    pages, page_size, _ = args.kv_cache.shape
    first = pages_read(args)[0] if page_size else torch.zeros_like(args.seq_lens)
    if args.block_table is not None:
        check_table(args.block_table, args.seq_lens, pages, page_size, first)
    elif args.kv_indptr is not None and args.kv_indices is not None:
        _check_ragged(args, first, pages, page_size)
    if args.rope_cos_sin is not None and args.seq_lens.numel():
        positions, longest = args.rope_cos_sin.shape[0], int(args.seq_lens.max())
        if longest > positions:
            possible = f"the longest sequence has {longest} keys"
            checks.fail("decode", "rope_cos_sin", f"has {positions} positions", possible)
    if args.cp_tot_seq_lens is not None:
        _check_ranks(args)
    if args.plan is not None:
        check_plan("decode", args.plan, args.seq_lens.shape[0], "seq_lens has", args.num_splits, args.split_size)


def _check_ranks(args: Any) -> None:
    """A rank's lengths follow from those of all ranks, so a pair that does not fit is of two different steps."""
    check_lengths("decode", args.cp_tot_seq_lens, 0, "cp_tot_seq_lens")
    own = keys_of_rank(args.cp_tot_seq_lens, args.cp_world_size, args.cp_rank, args.cp_interleave)
    wrong = (own != args.seq_lens).nonzero()
    if wrong.numel():
        b = int(wrong[0])
        whose = f"rank {args.cp_rank} of {args.cp_world_size}"
        possible = f"{whose} has {int(own[b])} of {int(args.cp_tot_seq_lens[b])} keys"
        checks.fail("decode", f"seq_lens[{b}]", f"is {int(args.seq_lens[b])}", possible)


def check_descale(op: str, name: str, factor: torch.Tensor | None) -> None:
    """Kernels look for the largest score before they multiply, and mask scores with -inf."""
    value = 0.0 if factor is None else float(factor)
    if not 0.0 <= value < math.inf:
        checks.fail(op, name, f"is {value:g}", "it takes a finite number, 0 or more")


def _check_queries(cu_seqlens_q: torch.Tensor, tokens: int, max_seqlen_q: int) -> None:
    bounds = cu_seqlens_q.tolist()
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > tokens:
        possible = f"it must rise from 0 to at most the {tokens} tokens of q"
        checks.fail("decode", "cu_seqlens_q", f"is {bounds}", possible)
    longest = max((end - first for first, end in itertools.pairwise(bounds)), default=0)
    if longest > max_seqlen_q:
        checks.fail("decode", "max_seqlen_q", f"is {max_seqlen_q}", f"a sequence has {longest} query tokens: pass that")


def check_table(
    block_table: torch.Tensor, seq_lens: torch.Tensor, pages: int, page_size: int, first: torch.Tensor
) -> None:
    """Refuse lengths that do not fit block_table, and page ids from entry `first` [batch] on that the cache lacks."""
    width, end = block_table.shape[1], _used(seq_lens, page_size)
    possible = f"block_table has {width} pages of {page_size} each: give longer rows"
    _check_fit(seq_lens, end, torch.full_like(end, width), possible)
    entry = torch.arange(width, device=end.device)
    present = (entry >= first[:, None]) & (entry < end[:, None])
    wrong = (present & ((block_table < 0) | (block_table >= pages))).nonzero()
    if wrong.numel():
        b, column = wrong[0].tolist()
        given = f"is page {int(block_table[b, column])}"
        checks.fail("decode", f"block_table[{b}, {column}]", given, f"kv_cache has {pages} pages")


def _check_ragged(args: Any, first: torch.Tensor, pages: int, page_size: int) -> None:
    kv_indptr, kv_indices, end = args.kv_indptr, args.kv_indices, _used(args.seq_lens, page_size)
    count = kv_indptr.diff()
    if int(kv_indptr[0]) < 0 or bool((count < 0).any()) or int(kv_indptr[-1]) > kv_indices.shape[0]:
        possible = f"it must rise, from 0 or more to at most the {kv_indices.shape[0]} entries of kv_indices"
        checks.fail("decode", "kv_indptr", f"is {kv_indptr.tolist()}", possible)
    _check_fit(args.seq_lens, end, count, f"kv_indptr gives it too few pages of {page_size}")
    present = torch.zeros(kv_indices.shape[0], dtype=torch.bool, device=end.device)
    for at, first_read, end_read in zip(kv_indptr.tolist(), first.tolist(), end.tolist(), strict=False):
        present[at + first_read : at + end_read] = True
    wrong = (present & ((kv_indices < 0) | (kv_indices >= pages))).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        checks.fail("decode", f"kv_indices[{at}]", f"is page {int(kv_indices[at])}", f"kv_cache has {pages} pages")


def _used(seq_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages that each sequence has keys in."""
    return (seq_lens.long() + page_size - 1) // page_size if page_size else seq_lens.long()


def _check_fit(seq_lens: torch.Tensor, used: torch.Tensor, room: torch.Tensor, possible: str) -> None:
    wrong = (used > room).nonzero()
    if wrong.numel():
        b = int(wrong[0])
        checks.fail("decode", f"seq_lens[{b}]", f"is {int(seq_lens[b])}", possible)
