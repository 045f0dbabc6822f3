"""Tensor maps of decode and sparse_decode: how the copy engine (TMA) sees queries and caches."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from mla_suite.archs.attention import Rows, Shape
from mla_suite.archs.sm_90.tile import BLOCK_M, BLOCK_N
from mla_suite.launch.spec import Input, Slot, TensorMap

MAX_OUT_SPAN = 2**35  # elements from a sequence's first result to its last: 32 bits count 16-byte vectors


def kv_map(
    address: Slot, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, box_blocks: int
) -> TensorMap:
    """The cache in boxes of 32 keys of a page, [box_blocks of 64 values][key][64], as a stage holds them.

    Rows that are not whole blocks of 64 values are one block of the map, in boxes of which the last is cut off.
    """
    pages, page, width = shape
    # A stride along a dimension of one page means nothing.
    page_stride = strides[0] if pages > 1 else page * width
    values, blocks = (64, width // 64) if width % 64 == 0 else (width, 1)
    size = dtype.itemsize
    return TensorMap(
        address,
        dtype,
        (values, page, blocks, max(pages, 1)),
        (width * size, 64 * size, page_stride * size),
        (64, BLOCK_N, box_blocks, 1),
    )


def q_map(address: Slot, queries: Rows, q_len: int) -> TensorMap:
    """The queries, as one matrix of rows that have a pitch, in boxes of half of a block's rows, [32 values][row][32].

    Rows of a box come in whole turns of the swizzle, which are eight.
    """
    row_stride = pitch(queries.shape, queries.strides)
    if row_stride is None:
        where = f"sizes {queries.shape} and strides {queries.strides}"
        raise ValueError(f"decode: query rows of {where} are no matrix; copy them first")
    heads, width = queries.shape[-2:]
    blocks, row_bytes = width // 32, row_stride * 2
    sizes, box = (32, prod(queries.shape[:-1]), 1, blocks), (32, _rows_of_box(heads * q_len), 1, -(-blocks // 2))
    return TensorMap(address, queries.dtype, sizes, (row_bytes, row_bytes, 64), box)


def q_part_maps(slots: Mapping[str, Input], shape: Shape, taken: bool) -> dict[str, TensorMap | None]:
    """The maps of queries in two tensors; none where they are one, and where the kernel, as `taken` says, or the copy
    engine needs them joined. `slots` are the operator's arguments."""
    if shape.q_rope is None or not taken or shape.q.dtype.itemsize != 2:
        return {}
    latent, rope = (
        _q_part_map(slots["q"], shape.q, shape.q_len),
        _q_part_map(slots["q_rope"], shape.q_rope, shape.q_len),
    )
    return {} if latent is None or rope is None else {"q_map": latent, "q_rope_map": rope}


def _q_part_map(address: Slot, part: Rows, q_len: int) -> TensorMap | None:
    """The latent or the rope part of queries in two tensors, by head and token, in boxes of 32 values of a block's
    rows; None where the copy engine cannot bring those."""
    heads, width = part.shape[-2:]
    box, head_stride = box_by_token(heads, q_len), part.strides[-2] if heads > 1 else width
    tokens, token_stride = prod(part.shape[:-2]), pitch((*part.shape[:-2], width), (*part.strides[:-2], 1))
    if box is None or not part.in_whole_vectors or head_stride == 0 or token_stride is None or width % 32:
        return None
    strides = head_stride * 2, token_stride * 2, 64
    return TensorMap(address, part.dtype, (32, heads, tokens, width // 32), strides, (32, *box, 1))


def box_by_token(heads: int, q_len: int) -> tuple[int, int] | None:
    """Heads and query tokens of a block's rows; None where it begins or ends within the heads of one of several."""
    rows = _rows_of_box(heads * q_len)
    if q_len == 1:
        return rows, 1
    whole = heads % BLOCK_M == 0 or (BLOCK_M % heads == 0 and rows % heads == 0)
    return (min(heads, BLOCK_M), max(rows // heads, 1)) if whole else None


def _rows_of_box(rows: int) -> int:
    """Rows of a block in whole turns of the swizzle, of a sequence with so many."""
    return min(BLOCK_M, -(-rows // 8) * 8)


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
