"""The kernels of `absorb` in Triton; each writes where the next step reads."""

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
    heads,
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
    BLOCK_M: tl.constexpr,
    OWN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The first heads x LATENT / OWN programs: OWN columns of a head's latent for BLOCK_M tokens, COLUMNS at a time.

    Then a program for each token rotates its heads' q_pe, HEADS at a time: it waits for one load after another, beside
    the others.
    """
    SHARES: tl.constexpr = LATENT // OWN
    program = tl.program_id(0)
    if program < heads * SHARES:
        head = (program // SHARES).to(tl.int64)
        begin = program % SHARES * OWN
        row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = row < tokens
        row = row.to(tl.int64)[:, None]
        inner = tl.arange(0, NOPE)
        column = tl.arange(0, COLUMNS)
        x = tl.load(q_nope + row * nope_token + head * nope_head + inner[None, :], mask=inside[:, None], other=0.0)
        w = w_uk + head * w_head + inner[:, None] * w_row + column[None, :]
        out = q + row * q_token + head * q_head + column[None, :]
        for at in tl.range(begin, begin + OWN, COLUMNS, num_stages=STAGES):
            tl.store(out + at, tl.dot(x, tl.load(w + at)).to(q.dtype.element_ty), mask=inside[:, None])
    else:
        token = (tl.program_id(1) * BLOCK_M + program - heads * SHARES).to(tl.int64)
        if token < tokens:
            HALF: tl.constexpr = ROPE // 2
            pair = tl.arange(0, HALF)[None, :]
            whole = tl.arange(0, ROPE)[None, :]
            source = q_pe + token * pe_token
            out = q + token * q_token + LATENT
            if cos_sin is not None:
                position = tl.load(positions + token)
                known = (position >= 0) & (position < max_len)
                cos = tl.load(cos_sin + position * ROPE + pair, mask=known, other=float("nan"))
                sin = tl.load(cos_sin + position * ROPE + HALF + pair, mask=known, other=float("nan"))
            for first in range(0, heads, HEADS):
                head = first + tl.arange(0, HEADS)[:, None]
                there = head < heads
                mine, into = source + head * pe_head, out + head * q_head
                if cos_sin is None:
                    tl.store(into + whole, tl.load(mine + whole, mask=there), mask=there)
                elif INTERLEAVED:
                    pe = tl.load(mine + whole, mask=there).to(tl.float32)
                    a, b = tl.split(tl.reshape(pe, (HEADS, HALF, 2)))
                    rotated = tl.interleave(a * cos - b * sin, b * cos + a * sin)
                    tl.store(into + whole, rotated.to(q.dtype.element_ty), mask=there)
                else:
                    a = tl.load(mine + pair, mask=there).to(tl.float32)
                    b = tl.load(mine + HALF + pair, mask=there).to(tl.float32)
                    tl.store(into + pair, (a * cos - b * sin).to(q.dtype.element_ty), mask=there)
                    tl.store(into + HALF + pair, (b * cos + a * sin).to(q.dtype.element_ty), mask=there)


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
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program: COLUMNS values of a head for BLOCK_M tokens."""
    TILES: tl.constexpr = V // COLUMNS
    head = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < tokens
    row = row.to(tl.int64)
    inner = tl.arange(0, DEPTH)
    x_at = latents + row[:, None] * in_token + head * in_head + inner[None, :]
    w_at = w_uv + head * w_head + column[None, :] * w_row + inner[:, None]
    total = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for start in range(0, LATENT, DEPTH):
        x = tl.load(x_at + start, mask=inside[:, None], other=0.0)
        total = tl.dot(x, tl.load(w_at + start), total)
    out = values + row[:, None] * out_token + head * out_head + column[None, :]
    tl.store(out, total.to(values.dtype.element_ty), mask=inside[:, None])
