"""What a native decode call takes beside addresses: which launch, how much scratch, and the merge behind it."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NamedTuple

import torch

from mla_suite.build.params import load, reciprocal
from mla_suite.core.dispatch import keep
from mla_suite.ops.combine import config as combine_configs
from mla_suite.ops.combine import native as combine
from mla_suite.ops.decode import hopper
from mla_suite.ops.decode.config import CdnaConfig
from mla_suite.ops.decode.hopper import HopperConfig
from mla_suite.ops.plan.metadata import most_items, splits_of

SHORTEST_CUT = 256  # keys: below this, merging costs more than another compute unit saves
SMALLEST_SCALE = 1e-30  # as good as 0, where a masked score of -inf times the scale would be NaN

POINTERS = (
    *("q", "kv_cache", "seq_lens", "block_table", "kv_indptr", "kv_indices", "cu_seqlens_q", "q_descale"),
    *("kv_descale", "attn_sink", "rope_cos_sin", "plan", "out", "lse", "partial_out", "partial_lse"),
)
pack_leading = struct.Struct(f"<{len(POINTERS)}Q").pack


class Prepared(NamedTuple):
    """It follows from metadata, so equal calls share one."""

    instance: str
    grid: tuple[int, int, int]
    threads: int
    shared: int  # bytes of dynamic shared memory
    numbers: bytes  # the parameters after those that hold addresses
    boxes: tuple[hopper.Boxes | None, hopper.Boxes] | None  # of keys and queries, which sm_90 alone maps
    copies_q: bool  # the kernel cannot reach the rows of q, out or lse as they lie
    copies_out: bool
    copies_lse: bool
    slots: int  # partials of all sequences
    rows: int  # of a split
    merge: combine.Launch | None  # None when nothing is split


class Rows(NamedTuple):
    """Rows of queries or results by their metadata."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool  # the address is a multiple of 16

    @property
    def in_whole_vectors(self) -> bool:
        """Whether 16-byte accesses reach every row."""
        size = self.dtype.itemsize
        return self.aligned and self.strides[-1] == 1 and all(s * size % 16 == 0 for s in self.strides[:-1])

    def copied(self) -> Rows:
        """The same in memory of its own."""
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.append(strides[-1] * size)
        return Rows(self.dtype, self.shape, tuple(reversed(strides)), True)


@keep
def prepare(
    config: CdnaConfig | HopperConfig,
    queries: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bool],
    cache: tuple[tuple[int, ...], tuple[int, ...]],
    table: tuple[tuple[int, ...], tuple[int, ...]] | None,
    entries: int,
    batch: int,
    longest: int,
    words: int,
    sink: bool,
    result: tuple[torch.dtype, tuple[int, ...], bool],
    dense_lse: bool,
    options: tuple[float, int, int, bool, int, int],
) -> Prepared:
    """What calls with this metadata share.

    queries    of q: dtype, sizes, strides, whether its address is a multiple of 16
    cache      sizes and strides
    table      the same of the block table; None where pages come from kv_indices, which has `entries`
    longest    query tokens of the longest sequence where they are ragged, else 0
    words      of the plan, 0 for none
    result     of out: dtype, strides, whether its address is a multiple of 16
    dense_lse  whether lse is contiguous
    options    softmax_scale (not negative), max_seqlen_kv, head_dim_v, causal, num_splits, split_size
    """
    softmax_scale, max_seqlen_kv, head_dim_v, causal, num_splits, split_size = options
    q, out = Rows(*queries), Rows(result[0], (*queries[1][:-1], head_dim_v), *result[1:])
    ragged = longest > 0
    heads, q_len, page = q.shape[-2], longest if ragged else q.shape[1], cache[0][1]
    rows = heads * q_len
    tiles = config.tiles(rows)
    on_hopper = isinstance(config, HopperConfig)
    awaiting = None  # what merges while decode runs
    # parts are the partials of a sequence; one is the result itself
    if words:
        splits = parts = 1
        slots = int(most_items(words, batch))
        items = min(slots, config.arch.compute_units)
    else:
        if on_hopper:
            split_size = hopper.whole_blocks(split_size)
        bound = max_seqlen_kv or (entries if table is None else table[0][1]) * page
        by_size = int(splits_of(bound, split_size)) if split_size else 0
        splits = num_splits or by_size or split_count(config, head_dim_v, out.dtype, batch, rows, bound)
        parts, items = splits, batch * splits
        if isinstance(config, HopperConfig) and not split_size:
            estimate = hopper.Estimate(config.arch, config.source, batch, rows, -(-bound // hopper.KEYS))
            config = replace(config, exchange=estimate.exchange(splits))
            parts = splits if config.exchange == "none" else splits // 2
            awaiting = estimate.awaiting(splits, config.exchange)
        slots = batch * parts if parts > 1 else 0
    copies_q = not q.in_whole_vectors or (on_hopper and hopper.pitch(q.shape, q.strides) is None)
    q = q.copied() if copies_q else q
    # One stride leads from token to token of the results.
    copies_out = not out.in_whole_vectors or (not ragged and out.strides[0] != q_len * out.strides[1])
    copies_out |= on_hopper and not hopper.within_reach(q_len, heads, out.strides)
    out = out.copied() if copies_out else out
    page_magic, page_shift = reciprocal(page)
    numbers = dict(
        kv_page_stride=cache[1][0],
        out_token_stride=out.strides[-3],
        out_head_stride=out.strides[-2],
        batch=batch,
        heads=heads,
        q_len=q_len,
        rows=rows,
        page=page,
        page_magic=page_magic,
        page_shift=page_shift,
        num_splits=splits,
        split_size=split_size if splits > 1 and not num_splits else 0,
        causal=int(causal),
        softmax_scale=max(softmax_scale, SMALLEST_SCALE),
    )
    table_stride = 0 if table is None else table[1][0]
    boxes: tuple[hopper.Boxes | None, hopper.Boxes] | None = None
    if isinstance(config, HopperConfig):
        workers = hopper.workers(config.arch, items, tiles)
        grid, shared = (tiles, workers, 1), config.lds
        splits_magic, splits_shift = reciprocal(splits)
        keys = hopper.key_boxes(*cache, q.dtype, config.box_blocks) if config.source == "tma" else None
        boxes = keys, hopper.query_boxes(q.shape, q.strides, q.dtype, q_len)
        packed = pack_numbers(
            "decode_tma",
            hopper.LEADING,
            heads_reciprocal=(2**32 - 1) // heads + 1 if heads > 1 else 0,
            page_ids_stride=table_stride,
            page_ids_width=0 if table is None else table[0][1],
            plan_words=words,
            splits_magic=splits_magic,
            splits_shift=splits_shift,
            workers=workers,
            awaited=int(awaiting is not None),
            **numbers,
        )
    else:
        grid, shared = (items, tiles, 1), 0
        packed = pack_numbers(
            "decode",
            POINTERS,
            q_batch_stride=0 if ragged else q.strides[0],
            q_token_stride=q.strides[-3],
            q_head_stride=q.strides[-2],
            kv_token_stride=cache[1][1],
            block_table_stride=table_stride,
            workers=items,
            **numbers,
        )
    merge = None
    if slots:
        fixed, planned = split_size > 0, words > 0
        merge = combine.prepare(
            awaiting
            or combine.config_for(config.arch, head_dim_v, out.dtype, rows, batch, -(-slots // batch), fixed, planned),
            (batch, rows, heads),
            ((rows * head_dim_v, head_dim_v), (rows, 1), out.strides[-3:-1], (heads, 1)),
            True,  # scratch and results begin on 16 bytes
            out.dtype,
            heads if sink else 1,
            parts,
            (planned, False),
        )
    return Prepared(
        *(config.instance, grid, config.threads, shared, packed, boxes),
        *(copies_q, copies_out, not dense_lse, slots, rows, merge),
    )


def pack_numbers(kernel: str, leading: tuple[str, ...], **numbers: int | float) -> bytes:
    """The parameters after the `leading` ones."""
    params = load(kernel)
    if tuple(field.name for field in params.fields[: len(leading)]) != leading:
        raise RuntimeError(f"{kernel}: the parameter struct must begin with what holds addresses, in the order packed")
    return params.pack(**dict.fromkeys(leading, 0), **numbers)[8 * len(leading) :]


def split_count(
    config: CdnaConfig | HopperConfig, head_dim_v: int, out_dtype: torch.dtype, batch: int, rows: int, bound: int
) -> int:
    """Cuts per sequence where none were asked for: what combine's table says for so many rows at once, as far as there
    are keys. Without a row, by cost on sm_90, else a workgroup for every compute unit, which never rises with the
    batch, none with too few keys.
    """
    tuned = combine_configs.split_count(config.arch, head_dim_v, combine.OUT_TYPES[out_dtype][1], rows, batch)
    if tuned:
        return max(1, min(tuned, bound // SHORTEST_CUT))
    if isinstance(config, HopperConfig):
        return hopper.cuts(config.arch, config.source, batch, rows, -(-bound // hopper.KEYS))
    return max(1, min(config.arch.compute_units // (batch * config.tiles(rows)), bound // SHORTEST_CUT))
