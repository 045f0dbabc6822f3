"""What a native sparse_decode call takes beside addresses: which launch, how much scratch, and the merge behind it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch

from mla_suite.build.params import load, reciprocal
from mla_suite.ops.combine import native as combine
from mla_suite.ops.decode.hopper import Boxes, pitch, query_boxes, within_reach, workers
from mla_suite.ops.decode.prepare import SMALLEST_SCALE, Rows, pack_numbers
from mla_suite.ops.plan.metadata import most_items, splits_of
from mla_suite.ops.sparse_decode import hopper
from mla_suite.ops.sparse_decode.config import MOST_POOLS, SparseConfig
from mla_suite.ops.sparse_decode.hopper import HopperSparseConfig

SHORTEST_CUT = 128  # keys: below this, merging costs more than another compute unit saves

_POINTERS = ("attn_sink", "plan", "out", "lse", "partial_out", "partial_lse")
LEADING = {"sparse_decode": ("q", *_POINTERS), "sparse_decode_tma": (*hopper.MAP, *_POINTERS)}
"""Kernel's parameters -> those that are made anew for every call, before the pools'."""
POOL_POINTERS = ("cache", "indices", "indptr", "lengths")
_pack_leading = {kernel: struct.Struct(f"<{len(names)}Q").pack for kernel, names in LEADING.items()}
pack_pool = struct.Struct(f"<{len(POOL_POINTERS)}Q").pack


class Prepared(NamedTuple):
    """It follows from metadata alone."""

    instance: str
    grid: tuple[int, int, int]
    threads: int
    shared: int  # bytes of dynamic shared memory
    pack_leading: Callable[..., bytes]  # (the map of the queries or their address, addresses of _POINTERS)
    numbers: tuple[bytes, ...]  # the parameters between addresses: before the first pool's, then behind each pool's
    boxes: Boxes | None  # of queries, which sm_90 alone maps
    copies_q: bool  # the kernel cannot reach the rows of q, indices or lengths, out or lse as they lie
    copies_selection: bool
    copies_out: bool
    copies_lse: bool
    slots: int  # splits with partials
    rows: int  # of a split
    merge: combine.Launch | None  # None when nothing is split


def prepare(
    config: SparseConfig | HopperSparseConfig,
    outputs: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    kv_caches: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    indptrs: Sequence[torch.Tensor | None],
    topk_lengths: Sequence[torch.Tensor | None],
    attn_sink: torch.Tensor | None,
    plan: torch.Tensor | None,
    *,
    softmax_scale: float,
    num_splits: int,
    split_size: int,
) -> Prepared:
    """What calls with this metadata share; softmax_scale is not negative, the result not empty."""
    queries, copies_q = _rows(q)
    if isinstance(config, HopperSparseConfig) and pitch(queries.shape, queries.strides) is None:
        queries, copies_q = queries.copied(), True
    out, copies_out = _rows(outputs[0])
    if isinstance(config, HopperSparseConfig) and not within_reach(1, out.shape[1], out.strides):
        out, copies_out = out.copied(), True
    tokens, heads, head_dim_v = out.shape
    tiles = config.tiles(heads)
    if plan is not None:
        splits, slots = 1, int(most_items(plan.shape[0], tokens))
        items = slots
    else:
        splits = num_splits or _splits(config, tokens, heads, indices, indptrs, split_size)
        items = tokens * splits
        slots = items if splits > 1 else 0
    boxes = None
    if isinstance(config, HopperSparseConfig):
        kernel, shared, groups = "sparse_decode_tma", config.lds, workers(config.arch, items, tiles)
        grid = tiles, groups, 1
        boxes = query_boxes(queries.shape, queries.strides, queries.dtype, 1)
        own: dict[str, int] = {}
    else:
        kernel, shared, groups = "sparse_decode", 0, items if plan is None else min(items, config.arch.compute_units)
        grid = groups, tiles, 1
        own = {"q_token_stride": queries.strides[0], "q_head_stride": queries.strides[1]}
    pools = [_pool(q, *pool) for pool in zip(kv_caches, indices, topk_lengths, strict=True)]
    numbers = _numbers(
        kernel,
        pools,
        **own,
        out_token_stride=out.strides[0],
        out_head_stride=out.strides[1],
        tokens=tokens,
        heads=heads,
        num_splits=splits,
        split_size=split_size if splits > 1 and not num_splits else 0,
        workers=groups,
        softmax_scale=max(softmax_scale, SMALLEST_SCALE),
    )
    merge = None
    if slots:
        fixed, planned = split_size > 0, plan is not None
        merge = combine.prepare(
            combine.config_for(config.arch, head_dim_v, out.dtype, heads, tokens, -(-slots // tokens), fixed, planned),
            (tokens, heads, heads),
            ((heads * head_dim_v, head_dim_v), (heads, 1), out.strides[:2], (heads, 1)),
            True,  # scratch and results begin on 16 bytes
            out.dtype,
            1 if attn_sink is None else heads,
            splits,
            (planned, False),
        )
    copies_selection = any(_apart(index, 1) is None for index in indices) or not all(
        lengths is None or lengths.is_contiguous() for lengths in topk_lengths
    )
    return Prepared(
        *(config.instance, grid, config.threads, shared, _pack_leading[kernel], numbers, boxes),
        *(copies_q, copies_selection, copies_out, not outputs[1].is_contiguous(), slots, heads, merge),
    )


def _rows(tensor: torch.Tensor) -> tuple[Rows, bool]:
    """[..., heads, width] as [tokens, heads, width], and whether the kernels take a copy, whose rows these then are."""
    apart, *within = _apart(tensor, 2), *tensor.stride()[-2:]
    shape = (prod(tensor.shape[:-2]), *tensor.shape[-2:])
    rows = Rows(tensor.dtype, shape, (apart or 0, *within), tensor.data_ptr() % 16 == 0)
    return (rows, False) if apart is not None and rows.in_whole_vectors else (rows.copied(), True)


def _apart(tensor: torch.Tensor, kept: int) -> int | None:
    """Elements from each query token to the next, all dimensions before the last `kept`; None where they vary."""
    sizes, strides = tensor.shape[: tensor.dim() - kept], tensor.stride()[: tensor.dim() - kept]
    if not sizes:
        return 0  # ragged indices
    if len(sizes) == 1 or sizes[1] == 1:
        return strides[0]
    return strides[1] if sizes[0] == 1 or strides[0] == sizes[1] * strides[1] else None


def _pool(q: torch.Tensor, kv_cache: torch.Tensor, index: torch.Tensor, lengths: torch.Tensor | None) -> dict[str, int]:
    """One pool's numbers among the parameters, without its own."""
    pages, page, _ = kv_cache.shape
    per_sequence = lengths is not None and q.dim() == 4 and lengths.dim() == 1
    page_magic, page_shift = reciprocal(max(page, 1))
    apart = _apart(index, 1)
    return {
        "page_bytes": kv_cache.stride(0) * kv_cache.element_size(),
        "index_stride": index.shape[-1] if apart is None else apart,
        "slots": pages * page,
        "page": page,
        "page_magic": page_magic,
        "page_shift": page_shift,
        "topk": index.shape[-1],
        "tokens_per_length": q.shape[1] if per_sequence else 1,
    }


def _numbers(kernel: str, pools: Sequence[dict[str, int]], **others: int | float) -> tuple[bytes, ...]:
    """The parameters that are no addresses, cut where those of the pools lie."""
    numbers = dict.fromkeys([f"{name}_{i}" for i in range(MOST_POOLS) for name in (*POOL_POINTERS, *pools[0])], 0)
    numbers |= {f"{name}_{i}": number for i, pool in enumerate(pools) for name, number in pool.items()}
    leading = LEADING[kernel]
    packed = pack_numbers(kernel, leading, **numbers, **others, pools=len(pools))
    offsets = load(kernel).offsets
    pieces, begin = [], 0
    for i in range(len(pools)):
        at = [offsets[f"{name}_{i}"] for name in POOL_POINTERS]
        if at != list(range(at[0], at[0] + 8 * len(at), 8)):
            raise RuntimeError(f"{kernel}: a pool's addresses must lie side by side, in the order packed")
        pieces.append(packed[begin : at[0] - 8 * len(leading)])
        begin = at[-1] + 8 - 8 * len(leading)
    return (*pieces, packed[begin:])


def _splits(
    config: SparseConfig | HopperSparseConfig,
    tokens: int,
    heads: int,
    indices: Sequence[torch.Tensor],
    indptrs: Sequence[torch.Tensor | None],
    split_size: int,
) -> int:
    """Cuts per query token where no number was asked for: by cost on sm_90, else a workgroup for every compute unit,
    none with too few keys.

    In batch-invariant mode as many as the widths of dense indices need; of ragged indices nothing on the host bounds
    one token's keys, so they are not cut.
    """
    if split_size:
        ragged = any(indptr is not None for indptr in indptrs)
        return 1 if ragged else int(splits_of(sum(index.shape[-1] for index in indices), split_size))
    keys = sum(index.numel() for index in indices) // tokens
    if isinstance(config, HopperSparseConfig):
        return hopper.splits(config, tokens, heads, keys)
    return max(1, min(config.arch.compute_units // (tokens * config.tiles(heads)), keys // SHORTEST_CUT))
