"""The kernels of `head_products` in Triton; each writes where the next step reads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "max_len"])
def absorb_kernel(
    q_nope,  # [tokens, heads, NOPE]
    q_pe,  # [tokens, heads, ROPE], not rotated
    w_uk,  # [heads, NOPE, LATENT]
    cos_sin,  # [max_len, ROPE] fp32, contiguous, or None: q_pe is copied
    positions,  # [tokens] int64, or None
    q,  # [tokens, heads, LATENT + ROPE]
    tokens,
    max_len,
    nope_token,
    nope_head,
    pe_token,
    pe_head,
    w_head,
    w_row,
    q_token,
    q_head,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: COLUMNS of a head's latent for ROWS tokens; that of the first columns turns q_pe too."""
    TILES: tl.constexpr = LATENT // COLUMNS
    head = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    row = row.to(tl.int64)
    inner = tl.arange(0, NOPE)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    w = tl.load(w_uk + head * w_head + inner[:, None] * w_row + column[None, :])
    x_at = q_nope + row[:, None] * nope_token + head * nope_head + inner[None, :]
    x = tl.load(x_at, mask=inside[:, None], other=0.0)
    out = q + row[:, None] * q_token + head * q_head
    tl.store(out + column[None, :], tl.dot(x, w).to(q.dtype.element_ty), mask=inside[:, None])
    if tile == 0:
        HALF: tl.constexpr = ROPE // 2
        pair = tl.arange(0, HALF)[None, :]
        whole = tl.arange(0, ROPE)[None, :]
        source = q_pe + row[:, None] * pe_token + head * pe_head
        if cos_sin is None:
            pe = tl.load(source + whole, mask=inside[:, None], other=0.0)
            tl.store(out + LATENT + whole, pe, mask=inside[:, None])
        else:
            position = tl.load(positions + row, mask=inside, other=0)[:, None]
            known = (position >= 0) & (position < max_len)
            cos = tl.load(cos_sin + position * ROPE + pair, mask=known, other=float("nan"))
            sin = tl.load(cos_sin + position * ROPE + HALF + pair, mask=known, other=float("nan"))
            if INTERLEAVED:
                pe = tl.load(source + whole, mask=inside[:, None], other=0.0).to(tl.float32)
                a, b = tl.split(tl.reshape(pe, (ROWS, HALF, 2)))
                turned = tl.interleave(a * cos - b * sin, b * cos + a * sin)
                tl.store(out + LATENT + whole, turned.to(q.dtype.element_ty), mask=inside[:, None])
            else:
                a = tl.load(source + pair, mask=inside[:, None], other=0.0).to(tl.float32)
                b = tl.load(source + HALF + pair, mask=inside[:, None], other=0.0).to(tl.float32)
                tl.store(out + LATENT + pair, (a * cos - b * sin).to(q.dtype.element_ty), mask=inside[:, None])
                tl.store(out + LATENT + HALF + pair, (b * cos + a * sin).to(q.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["tokens"])
def values_kernel(
    latents,  # [tokens, heads, LATENT]
    w_uv,  # [heads, V, LATENT]
    values,  # [tokens, heads, V]
    tokens,
    in_token,
    in_head,
    w_head,
    w_row,
    out_token,
    out_head,
    LATENT: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program: COLUMNS values of a head for ROWS tokens."""
    TILES: tl.constexpr = V // COLUMNS
    head = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    row = row.to(tl.int64)
    inner = tl.arange(0, DEPTH)
    x_at = latents + row[:, None] * in_token + head * in_head + inner[None, :]
    w_at = w_uv + head * w_head + column[None, :] * w_row + inner[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, LATENT, DEPTH):
        x = tl.load(x_at + start, mask=inside[:, None], other=0.0)
        total = tl.dot(x, tl.load(w_at + start), total)
    out = values + row[:, None] * out_token + head * out_head + column[None, :]
    tl.store(out, total.to(values.dtype.element_ty), mask=inside[:, None])
