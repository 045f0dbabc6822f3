"""The kernel of `qkv_down_proj` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def latents_kernel(
    parts,  # [PARTS, tokens, QUERY + LATENT + ROPE], what the product over each part of K gave
    q_weight,  # [QUERY]
    kv_weight,  # [LATENT]
    q,  # [tokens, QUERY]
    kv_c,  # [tokens, LATENT]
    k_pe,  # [tokens, ROPE]
    part_stride,
    row_stride,
    q_eps,
    kv_eps,
    PARTS: tl.constexpr,
    QUERY: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    """One program: a token's queries, or its latents and k_pe."""
    token = tl.program_id(0).to(tl.int64)
    row = parts + token * row_stride
    if tl.program_id(1) == 0:
        _store_normed(_added(row, part_stride, PARTS, QUERY), q_weight, q + token * QUERY, q_eps, QUERY)
    else:
        latent = _added(row + QUERY, part_stride, PARTS, LATENT)
        _store_normed(latent, kv_weight, kv_c + token * LATENT, kv_eps, LATENT)
        at = tl.arange(0, triton.next_power_of_2(ROPE))
        rope = _added(row + QUERY + LATENT, part_stride, PARTS, ROPE)
        tl.store(k_pe + token * ROPE + at, rope.to(k_pe.dtype.element_ty), mask=at < ROPE)


@triton.jit
def _added(row, part_stride, PARTS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, triton.next_power_of_2(SIZE))
    total = tl.load(row + at, mask=at < SIZE, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(row + part * part_stride + at, mask=at < SIZE, other=0.0).to(tl.float32)
    return total


@triton.jit
def _store_normed(total, weight, out, eps, SIZE: tl.constexpr):
    """Rounded as a product is, then where `LatentNorm` rounds."""
    at = tl.arange(0, triton.next_power_of_2(SIZE))
    values = total.to(out.dtype.element_ty).to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values) / SIZE + eps)
    factor = tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
    made = scaled.to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + at, made.to(out.dtype.element_ty), mask=at < SIZE)
