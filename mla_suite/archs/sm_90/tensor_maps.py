"""Tensor maps of decode and sparse_decode: how the copy engine (TMA) sees queries and caches."""

from __future__ import annotations

from math import prod

import torch

from mla_suite.archs.sm_90.tile import BLOCK_M, BLOCK_N
from mla_suite.launch.spec import Slot, TensorMap

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


def q_map(address: Slot, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, q_len: int) -> TensorMap:
    """The queries, as one matrix of rows that have a pitch, in boxes of half of a block's rows, [32 values][row][32].

    Rows of a box come in whole turns of the swizzle, which are eight.
    """
    row_stride = pitch(shape, strides)
    if row_stride is None:
        raise ValueError(f"decode: query rows of sizes {shape} and strides {strides} are no matrix; copy them first")
    heads, width = shape[-2:]
    rows, blocks = min(BLOCK_M, -(-heads * q_len // 8) * 8), width // 32
    return TensorMap(address, dtype, (32, prod(shape[:-1]), blocks), (row_stride * 2, 64), (32, rows, -(-blocks // 2)))


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
