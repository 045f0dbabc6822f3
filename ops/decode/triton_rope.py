"""The rope part of scores in Triton, with keys cached as they were rotated, or not and turned as they are read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_queries(q_row, rope_cos_sin, live, LATENT: tl.constexpr, ROPE: tl.constexpr, DOT: tl.constexpr):
    """The rope part of the queries: whole, and again; or, where keys are turned as they are read, in two halves."""
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
    """scores plus the rope part's share; un-rotated keys are turned by their position, in halves as in NeoX."""
    if rope_cos_sin is None:
        column = LATENT + tl.arange(0, ROPE)
        rope = tl.load(kv_row[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_low, tl.trans(rope.to(DOT)), scores, input_precision="ieee")
    else:
        HALF: tl.constexpr = ROPE // 2
        pair = tl.arange(0, HALF)
        place = kv_row[:, None] + LATENT + pair[None, :]
        low = tl.load(place, mask=inside[:, None], other=0.0).to(tl.float32)
        high = tl.load(place + HALF, mask=inside[:, None], other=0.0).to(tl.float32)
        angle = rope_cos_sin + key[:, None] * ROPE + pair[None, :]
        cos = tl.load(angle, mask=inside[:, None], other=0.0)
        sin = tl.load(angle + HALF, mask=inside[:, None], other=0.0)
        scores = tl.dot(q_low, tl.trans((low * cos - high * sin).to(DOT)), scores, input_precision="ieee")
        scores = tl.dot(q_high, tl.trans((high * cos + low * sin).to(DOT)), scores, input_precision="ieee")
    return scores
