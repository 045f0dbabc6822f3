"""The definition of decode, in fp32: one sequence at a time, its keys in blocks, its splits merged by combine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from mla_suite import kv_formats
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.combine import CombineArgs
from mla_suite.ops.combine.reference import run as combine
from mla_suite.ops.plan.metadata import OPEN, Plan
from mla_suite.ops.plan.reference import equal_chunk, split_keys
from mla_suite.ops.plan.window import first_key, origin

BLOCK = 1024  # keys gathered at once: 2.4 MB of fp32 rows, which stay in a core's cache between the two products


def keys_of_rank(lens: torch.Tensor, world_size: int, rank: int, interleave: int) -> torch.Tensor:
    """Number of the rank's keys among the first `lens` keys of a sequence, none of a negative number.

    The key at global position p belongs to rank p // interleave % world_size. Any shape; lens' dtype.
    """
    period = world_size * interleave
    lens = lens.clamp(min=0)
    rest = (lens % period - rank * interleave).clamp(0, interleave)
    return lens // period * interleave + rest


def pages_read(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """First and end of the entries of each sequence's page list that are read: [batch] int64 each."""
    page, lens = args.kv_cache.shape[1], args.seq_lens.long()
    q_lens = args.q.shape[1] if args.cu_seqlens_q is None else args.cu_seqlens_q.diff()
    return first_key(lens, q_lens, args.window_left) // page, -(-lens // page)


def run(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    """Fill out and lse; given a third output for sum(p |v|), that too, and all in its dtype instead of fp32."""
    out, lse, *magnitude = outputs
    args = args.joined()
    dtype = magnitude[0].dtype if magnitude else torch.float32
    width = args.head_dim_v * (1 + len(magnitude))
    heads, page = args.q.shape[-2], args.kv_cache.shape[1]
    kv_format = kv_formats.get_kv_format(args.kv_format)
    lens = args.seq_lens.tolist()
    q_lens = args.q.shape[1] if args.cu_seqlens_q is None else args.cu_seqlens_q.diff()
    firsts = first_key(args.seq_lens, q_lens, args.window_left)
    origins = origin(firsts)
    splits = (
        Plan.read(args.plan).splits()
        if args.plan is not None
        else _splits(args.seq_lens - origins, args.num_splits, args.split_size)
    )
    bounds = args.cu_seqlens_q.tolist() if args.cu_seqlens_q is not None else None
    indptr = args.kv_indptr.tolist() if args.kv_indptr is not None else None
    totals = args.cp_tot_seq_lens.tolist() if args.cp_tot_seq_lens is not None else None
    for b, (length, first_seen, start) in enumerate(zip(lens, firsts.tolist(), origins.tolist(), strict=True)):
        at = b if bounds is None else slice(bounds[b], bounds[b + 1])
        queries = args.q[at].to(dtype) * args.softmax_scale  # [q_len, heads, head_dim]
        if args.q_descale is not None:
            queries = queries * args.q_descale
        q_len = queries.shape[0]
        used = -(-length // page)
        if args.block_table is not None:
            pages = args.block_table[b, :used].long()
        else:
            assert args.kv_indices is not None  # `specify` asks for one of the two
            assert indptr is not None
            pages = args.kv_indices[indptr[b] : indptr[b] + used].long()

        def rows_of(first: int, end: int, pages: torch.Tensor = pages) -> torch.Tensor:
            positions = torch.arange(first, end, device=args.q.device)
            slots = pages[positions // page] * page + positions % page
            rows = caches.gather(kv_format, args.kv_cache, slots, descale=args.kv_descale)
            rows = caches.as_keys(kv_format, rows)
            if args.rope_cos_sin is not None:
                rows = rotated(rows, args.rope_cos_sin[first:end], args.kv_cache.dtype)
            return rows

        # Query token i of q_len sees the keys up to its own, which is the sequence's key total - q_len + i.
        visible = torch.full((q_len,), length, device=args.q.device)
        own = (length if totals is None else totals[b]) - torch.arange(q_len, 0, -1, device=args.q.device)
        if args.causal and args.tree_mask is None:
            visible = own + 1
            if totals is not None:
                visible = keys_of_rank(visible, args.cp_world_size, args.cp_rank, args.cp_interleave)
        window = own - args.window_left if args.window_left >= 0 else None
        tree = None if args.tree_mask is None else args.tree_mask[at]
        seen = partial(sees, visible, window, tree, length - q_len, heads)

        # An empty split weighs nothing; one is kept so that a sequence without keys has a result.
        moved = [(max(first + start, first_seen), min(end + start, length)) for first, end in splits[b]]
        spans = [(first, end) for first, end in moved if first < end] or [(0, 0)]
        partial_out = queries.new_empty((len(spans), q_len * heads, width))
        partial_lse = queries.new_empty((len(spans), q_len * heads))
        for split, (first, end) in enumerate(spans):
            blocks = ((key, rows_of(key, min(key + BLOCK, end)).to(dtype)) for key in range(first, end, BLOCK))
            partial_out[split], partial_lse[split] = attend(
                queries.flatten(0, 1), blocks, seen, args.head_dim_v, magnitude=bool(magnitude)
            )

        combined = out.new_empty((1, q_len * heads, width)), lse.new_empty((1, q_len * heads))
        partials = partial_out, partial_lse, None, args.attn_sink  # held by nobody once they are combined
        options = dict(num_splits=len(spans), out_dtype=out.dtype, plus_inf_lse=args.plus_inf_lse)
        combine(None, combined, CombineArgs(*partials, **options))
        del partials
        for result, part in zip((out, *magnitude), combined[0].split(args.head_dim_v, dim=-1), strict=True):
            result[at] = part.view(q_len, heads, args.head_dim_v)
        lse[at] = combined[1].view(q_len, heads)


def attend(
    queries: torch.Tensor,
    blocks: Iterable[tuple[int, torch.Tensor]],
    seen: Callable[[torch.Tensor], torch.Tensor],
    head_dim_v: int,
    *,
    magnitude: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k) v and its log-sum-exp over keys that come in blocks.

    queries [rows, head_dim], scaled; blocks of (position of the first key, [keys, head_dim]); seen(positions [keys])
    says in [rows, keys] which rows see which.

    -> out [rows, head_dim_v], 0 where nothing is seen, with `magnitude` softmax(q k) |v| behind it; lse [rows], there
    -inf.
    """
    rows = queries.shape[0]
    m_i = queries.new_full((rows,), -torch.inf)
    l_i = queries.new_zeros(rows)
    out = queries.new_zeros((rows, head_dim_v * (1 + magnitude)))
    for first, keys in blocks:
        scores = queries @ keys.T
        positions = torch.arange(first, first + keys.shape[0], device=keys.device)
        scores.masked_fill_(~seen(positions), -torch.inf)
        m_before, m_i = m_i, torch.maximum(m_i, scores.amax(dim=1))
        shift = m_i.masked_fill(m_i == -torch.inf, 0.0)  # of a row that has seen nothing
        p = scores.sub_(shift[:, None]).exp_()
        alpha = torch.exp(m_before - shift)
        l_i = l_i * alpha + p.sum(dim=1)
        values = keys[:, :head_dim_v]
        values = torch.cat((values, values.abs()), dim=1) if magnitude else values
        out = torch.addmm(out.mul_(alpha[:, None]), p, values)
        del keys, values, scores, p  # before the next block is gathered
    saw_any = m_i != -torch.inf
    out = torch.where(saw_any[:, None], out / l_i[:, None], 0.0)
    return out, torch.where(saw_any, m_i + l_i.log(), -torch.inf)


def sees(
    visible: torch.Tensor,
    window: torch.Tensor | None,
    tree: torch.Tensor | None,
    drafts_from: int,
    heads: int,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Which keys of a sequence its query rows see, as [q_len * heads, keys].

    visible [q_len]: keys at lower positions are seen; window [q_len]: from this position on; tree [q_len] int64: of the
    keys at drafts_from + j those whose bit j is set. positions [keys].
    """
    seen = positions < visible[:, None]
    if window is not None:
        seen &= positions >= window[:, None]
    if tree is not None:
        draft = positions - drafts_from
        seen &= (draft < 0) | ((tree[:, None] >> draft.clamp(0, 63)) & 1).bool()
    return seen.repeat_interleave(heads, dim=0)


def rotated(rows: torch.Tensor, cos_sin: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """rows [keys, head_dim] whose last values, as two halves, are rotated by cos_sin [keys, rope] = cos | sin.

    They are rounded to a `stored` type of 16 bits, as those of a cache of rotated keys are.
    """
    cos, sin = cos_sin.float().chunk(2, dim=-1)
    latent, rope = rows.split((rows.shape[1] - cos_sin.shape[1], cos_sin.shape[1]), dim=1)
    low, high = rope.chunk(2, dim=1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=1)
    return torch.cat((latent, rotated.to(stored).float() if stored.itemsize == 2 else rotated), dim=1)


def _splits(seq_lens: torch.Tensor, num_splits: int, split_size: int) -> Sequence[Sequence[tuple[int, int]]]:
    """(first_key, end_key) of each split of each sequence, without a plan."""
    lens: list[int] = seq_lens.tolist()
    if num_splits > 0:
        chunks: list[int] = equal_chunk(seq_lens.long(), num_splits).tolist()
        # Only splits with keys count, even where more were asked for.
        counts = [min(num_splits, -(-length // chunk)) for length, chunk in zip(lens, chunks, strict=True)]
        return [[(s * chunk, (s + 1) * chunk) for s in range(n)] for n, chunk in zip(counts, chunks, strict=True)]
    if split_size > 0:
        sizes: list[int] = split_keys(seq_lens, split_size).tolist()
        return [
            [(key, key + size) for key in range(0, max(length, 1), size)]
            for length, size in zip(lens, sizes, strict=True)
        ]
    return [[(0, OPEN)]] * len(lens)
