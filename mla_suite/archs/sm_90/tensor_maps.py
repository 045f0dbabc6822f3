"""Tensor maps of decode and sparse_decode: how the copy engine (TMA) sees queries and caches."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

from mla_suite.archs.common.decode import POINTERS
from mla_suite.archs.sm_90.tile import BLOCK_M, BLOCK_N
from mla_suite.build.params import load, packer
from mla_suite.core.dispatch import bounded
from mla_suite.launch import tensor_map

MAX_OUT_SPAN = 2**35  # elements from a sequence's first result to its last: 32 bits count 16-byte vectors

_MAPS = tuple(f"{what}_map_{word}" for what in ("kv", "q") for word in range(tensor_map.WORDS))
_POINTERS = (
    *("q", "kv_cache", "seq_lens", "page_ids", "kv_indptr", "cu_seqlens_q", "q_descale", "kv_descale"),
    *("attn_sink", "plan", "cp_tot_seq_lens", "out", "lse", "partial_out", "partial_lse"),
)
LEADING = (*_MAPS, *_POINTERS)
"""The parameters that are made anew for every call: they hold addresses."""
_pack_leading, _pack_address = packer(len(LEADING)).pack, packer(1).pack
COS_SIN = POINTERS.index("rope_cos_sin")
_NO_MAP = (0,) * tensor_map.WORDS


class TensorMapDesc(NamedTuple):
    """The contents of a tensor map beside the address."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def decode_packer(keys: TensorMapDesc | None, queries: TensorMapDesc | None) -> Callable[..., bytes]:
    """(*addresses in decode's order) -> the parameters LEADING; keys or queries are None where they are not mapped.

    A cache without pages has no address; nothing of it is read, but a map needs one. Maps are kept by address: a key of
    everything they depend on would take 0.4 us more to look up.
    """
    key_maps: dict[int, tuple[int, ...]] = {}
    query_maps: dict[int, tuple[int, ...]] = {}

    def pack_leading(
        q: int, kv_cache: int, seq_lens: int, block_table: int, kv_indptr: int, kv_indices: int, cu_seqlens_q: int,
        q_descale: int, kv_descale: int, attn_sink: int, _rope_cos_sin: int, plan: int, cp_tot_seq_lens: int,
        *outputs: int,
    ) -> bytes:  # fmt: skip
        kv_words = _NO_MAP
        if keys is not None:
            kv_words = key_maps.get(kv_cache or q) or _cached_map(key_maps, kv_cache or q, keys)
        q_words = _NO_MAP
        if queries is not None:
            q_words = query_maps.get(q) or _cached_map(query_maps, q, queries)
        pages = block_table or kv_indices
        inputs = q, kv_cache, seq_lens, pages, kv_indptr, cu_seqlens_q, q_descale, kv_descale, attn_sink, plan
        return _pack_leading(*kv_words, *q_words, *inputs, cp_tot_seq_lens, *outputs)

    return pack_leading


def with_cos_sin(pack_leading: Callable[..., bytes], numbers: bytes) -> Callable[..., bytes]:
    """(*addresses in decode's order) -> all parameters: rope_cos_sin is an address among the numbers behind LEADING.

    There it lies behind all that other instances read, whose machine code names offsets.
    """
    at = load("decode_tma").offsets["rope_cos_sin"] - 8 * len(LEADING)
    before, after = numbers[:at], numbers[at + 8 :]

    def pack(*addresses: int) -> bytes:
        return pack_leading(*addresses) + before + _pack_address(addresses[COS_SIN]) + after

    return pack


def _cached_map(maps: dict[int, tuple[int, ...]], address: int, contents: TensorMapDesc) -> tuple[int, ...]:
    """The map at an address, kept in `maps`."""
    words = bounded(maps)[address] = tensor_map.swizzled(address, *contents)
    return words


def kv_map(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, box_blocks: int) -> TensorMapDesc:
    """The cache in boxes of 32 keys of a page, [box_blocks of 64 values][key][64], as a stage holds them."""
    pages, page, width = shape
    # A stride along a dimension of one page means nothing.
    page_stride = strides[0] if pages > 1 else page * width
    blocks = width // 64
    return TensorMapDesc(
        dtype, (64, page, blocks, max(pages, 1)), (width * 2, 128, page_stride * 2), (64, BLOCK_N, box_blocks, 1)
    )


def q_map(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, q_len: int) -> TensorMapDesc:
    """The queries, as one matrix of rows that have a pitch, in boxes of half of a block's rows, [32 values][row][32].

    Rows of a box come in whole turns of the swizzle, which are eight.
    """
    row_stride = pitch(shape, strides)
    if row_stride is None:
        raise ValueError(f"decode: query rows of sizes {shape} and strides {strides} are no matrix; copy them first")
    heads, width = shape[-2:]
    rows, blocks = min(BLOCK_M, -(-heads * q_len // 8) * 8), width // 32
    return TensorMapDesc(dtype, (32, prod(shape[:-1]), blocks), (row_stride * 2, 64), (32, rows, blocks // 2))


def within_span(q_len: int, heads: int, strides: tuple[int, ...]) -> bool:
    """Whether the kernels find all results of a sequence from its first, by strides of [..., tokens, heads, values]."""
    return (q_len - 1) * strides[-3] + (heads - 1) * strides[-2] < MAX_OUT_SPAN


def pitch(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Elements from each row of the queries to the next, heads, tokens and sequences alike; None where they vary."""
    row_stride, rows = 0, 1
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size > 1 and (stride == 0 or stride != (row_stride * rows if row_stride else stride)):
            return None
        row_stride, rows = row_stride or (stride if size > 1 else 0), rows * size
    return row_stride or shape[-1]
