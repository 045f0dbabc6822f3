"""Triton functions for one block of keys: the rope part of the scores, and the state of the softmax; their tiles and
the type of their products.

Keys are cached rotated, or un-rotated and then rotated as they are read."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mla_suite.kv_formats import get_kv_format

DOT_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Tile(NamedTuple):
    """How much one program holds. Its warps share a [rows, 512] fp32 accumulator: rows x 16 / warps registers each."""

    rows: int
    keys: int
    warps: int
    stages: int


HELD_BY = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e8m0": torch.bfloat16}
"""Encodings of values -> the dtype that holds them, but for e4m3 and e2m1, which every dtype of DOT_TYPES holds."""


@lru_cache(maxsize=256)
def dot_dtype(q_dtype: torch.dtype, kv_formats: tuple[str, ...]) -> torch.dtype:
    """The dtype of both matrix products' operands, a key of DOT_TYPES: it holds the queries, float8 ones as bf16, and
    the rows, those of scaled values as bf16. So 16-bit queries are multiplied as fp32 with rows of more bits or range.
    """
    dtype = q_dtype if q_dtype in DOT_TYPES else torch.bfloat16
    for fmt in map(get_kv_format, kv_formats):
        encodings = {field.encoding for field in fmt.value_fields} if fmt.scale_rule is None else {"bf16"}
        for encoding in encodings & HELD_BY.keys():
            dtype = torch.promote_types(dtype, HELD_BY[encoding])
    return dtype


@triton.jit
def rope_queries(q_row, rope_cos_sin, live, LATENT: tl.constexpr, ROPE: tl.constexpr, DOT: tl.constexpr):
    """The rope part of the queries: whole, and again; or, where keys are rotated as they are read, in two halves."""
    SIZE: tl.constexpr = ROPE if rope_cos_sin is None else ROPE // 2
    column = LATENT + tl.arange(0, SIZE)
    q_low = tl.load(q_row[:, None] + column[None, :], mask=live[:, None], other=0.0).to(DOT)
    q_high = q_low
    if rope_cos_sin is not None:
        q_high = tl.load(q_row[:, None] + SIZE + column[None, :], mask=live[:, None], other=0.0).to(DOT)
    return q_low, q_high


@triton.jit
def rope_scores(
    scores, q_low, q_high, kv_row, rope_cos_sin, key, inside, LATENT: tl.constexpr, ROPE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """scores plus the rope part's share; un-rotated keys are rotated by their position, in halves as in NeoX."""
    if rope_cos_sin is None:
        column = LATENT + tl.arange(0, ROPE)
        rope = tl.load(kv_row[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_low, tl.trans(rope.to(DOT)), scores, input_precision="ieee")
    else:
        HALF: tl.constexpr = ROPE // 2
        pair = tl.arange(0, HALF)
        pair_at = kv_row[:, None] + LATENT + pair[None, :]
        low = tl.load(pair_at, mask=inside[:, None], other=0.0).to(tl.float32)
        high = tl.load(pair_at + HALF, mask=inside[:, None], other=0.0).to(tl.float32)
        angle = rope_cos_sin + key[:, None] * ROPE + pair[None, :]
        cos = tl.load(angle, mask=inside[:, None], other=0.0)
        sin = tl.load(angle + HALF, mask=inside[:, None], other=0.0)
        KEPT: tl.constexpr = kv_row.dtype.element_ty
        ROUNDED: tl.constexpr = KEPT if KEPT.primitive_bitwidth == 16 else DOT  # as in a cache of rotated keys
        # One product after the other: both halves at once take 4 KiB more of shared memory.
        turned = (low * cos - high * sin).to(ROUNDED).to(DOT)
        scores = tl.dot(q_low, tl.trans(turned), scores, input_precision="ieee")
        turned = (high * cos + low * sin).to(ROUNDED).to(DOT)
        scores = tl.dot(q_high, tl.trans(turned), scores, input_precision="ieee")
    return scores


@triton.jit
def softmax_step(scores, m_i, l_i):
    """(m_i, l_i, alpha, p) after a block's scores, which are logarithms to the base 2."""
    before = m_i
    m_i = tl.maximum(before, tl.max(scores, 1))
    shift = tl.where(m_i == -float("inf"), 0.0, m_i)  # of a row that has seen nothing
    p = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(before - shift)
    return m_i, l_i * alpha + tl.sum(p, 1), alpha, p


@triton.jit
def natural_lse(m_i, l_i):
    """The natural logarithm of a row's sum; -inf where it saw nothing, and NaN stays NaN."""
    LOG2E: tl.constexpr = 1.4426950408889634
    lse = tl.where(l_i > 0.0, m_i / LOG2E + tl.log(l_i), -float("inf"))
    return tl.where(l_i != l_i, l_i, lse)
