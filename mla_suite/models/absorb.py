"""Products of every head with a matrix of its own: W_UK into the queries, W_UV into what attention gives.

torch's batched product leaves its result heads first, and a pass over it follows: a concatenation with the rotated part
into q, or a transposition for o_proj. At batch 128 and 128 heads on an H200 these passes took 39 us (Inductor's code,
which rotates q_pe in it) and 3 us beside products of 10. On CUDA GPUs bf16 and fp16 go through operators of their own,
`mla_suite_layers::absorb` and `::head_values`, whose Triton kernels write the result where the next step reads it: 10
us each. Everything else is torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mla_suite.models.operators import TAGS, have_kernels, library, on_its_device, stages
from mla_suite.models.rope import rotate

MAX_ROWS = 128  # tokens of a program
COLUMNS = 64  # latent columns that a program multiplies at a time
HEADS = 32  # heads whose q_pe a program rotates at a time
PROGRAMS = 128  # enough programs to fill the largest GPU; with fewer, each has more columns and loads ahead

ABSORBABLE = "absorption needs a plain Linear without bias: merge the adapter into it"
"""What is possible, in an error that gives the answer of `not_absorbable`."""

library.define(
    "absorb(Tensor q_nope, Tensor q_pe, Tensor w_uk, Tensor? cos_sin, Tensor? positions, bool interleaved) -> Tensor",
    tags=TAGS,
)
library.define("head_values(Tensor latents, Tensor w_uv) -> Tensor", tags=TAGS)


def absorbed(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    cos_sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    interleaved: bool = True,
) -> torch.Tensor:
    """q as a cache is read, [..., heads, latent + rope]: q_nope times its head's w_uk beside q_pe.

    q_nope [..., heads, nope], q_pe [..., heads, rope], w_uk [heads, nope, latent], one dtype, which is the result's.
    With cos_sin, fp32 [max_len, rope], and positions, int64 [tokens] over the leading dimensions, q_pe is rotated as
    `rope.rotate` does it; without, it is taken as it is. A position that cos_sin does not have: an IndexError from
    torch, NaN from the kernel.
    """
    if _has_kernel(q_nope, q_pe, w_uk):
        return torch.ops.mla_suite_layers.absorb(q_nope, q_pe, w_uk, cos_sin, positions, interleaved)
    if cos_sin is not None:
        rows = cos_sin[positions].view(*q_pe.shape[:-2], 1, q_pe.shape[-1])
        q_pe = rotate(q_pe, rows, interleaved=interleaved)
    return torch.cat((torch.einsum("...hd,hdl->...hl", q_nope, w_uk), q_pe), dim=-1)


def head_values(latents: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Attended latents [..., heads, latent] times w_uv [heads, v, latent]: values [..., heads, v]."""
    if _has_kernel(latents, w_uv):
        return torch.ops.mla_suite_layers.head_values(latents, w_uv)
    return torch.einsum("...hl,hdl->...hd", latents, w_uv)


def not_plain(projection: nn.Module) -> str | None:
    """What a projection does besides multiplying by its weight and adding its bias; None: nothing, the weight may be
    read instead of calling the module.

    Hooks that `torch.nn.modules.module` registers for all modules do not count.
    """
    if type(projection) is not nn.Linear:
        return f"is {type(projection).__name__}"
    if projection._forward_hooks or projection._forward_pre_hooks or "forward" in projection.__dict__:
        return "has a hook or a forward of its own"
    return None


def not_absorbable(projection: nn.Module) -> str | None:
    """Why `absorbed` and `head_values` over the weight of kv_b_proj would not be what the module computes, or None."""
    given = not_plain(projection)
    return "has a bias" if given is None and projection.bias is not None else given


def _has_kernel(*operands: torch.Tensor) -> bool:
    """Whether the kernels take these; Triton's matrix units want powers of two."""
    sizes = [operand.shape[-1] for operand in operands] + [operands[-1].shape[-2]]
    return have_kernels(*operands) and all(size >= 16 and size & (size - 1) == 0 for size in sizes)


def _rows(tokens: int) -> int:
    """Tokens of one program: the least power of two that holds them all, within what a matrix unit and a block take."""
    return min(MAX_ROWS, max(16, 1 << (tokens - 1).bit_length()))


def _absorb(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    interleaved: bool,
) -> torch.Tensor:
    from mla_suite.models import absorb_triton  # triton comes with torch's CUDA builds alone

    heads, nope, latent = w_uk.shape
    q = _empty_absorb(q_nope, q_pe, w_uk)
    x, pe, out = (
        q_nope.reshape(-1, heads, nope),
        q_pe.reshape(-1, heads, q_pe.shape[-1]),
        q.view(-1, heads, q.shape[-1]),
    )
    tokens = x.shape[0]
    if not tokens:
        return q
    rows = _rows(tokens)
    tiles = -(-tokens // rows)
    own = latent
    while own > COLUMNS and heads * tiles * (latent // own) < PROGRAMS:
        own //= 2
    absorb_triton.absorb_kernel[(heads * (latent // own) + min(tokens, rows), tiles)](
        x,
        pe,
        w_uk,
        None if cos_sin is None else cos_sin.contiguous(),
        None if positions is None else positions.contiguous(),
        out,
        tokens,
        heads,
        0 if cos_sin is None else cos_sin.shape[0],
        *x.stride()[:2],
        *pe.stride()[:2],
        *w_uk.stride()[:2],
        *out.stride()[:2],
        NOPE=nope,
        LATENT=latent,
        ROPE=pe.shape[-1],
        INTERLEAVED=interleaved,
        BLOCK_M=rows,
        OWN=own,
        COLUMNS=min(COLUMNS, own),
        HEADS=HEADS,
        STAGES=stages(q.device),
        num_warps=8 if rows == MAX_ROWS else 4,
    )
    return q


def _empty_absorb(q_nope: torch.Tensor, q_pe: torch.Tensor, w_uk: torch.Tensor, *_: Any) -> torch.Tensor:
    return q_nope.new_empty(*q_nope.shape[:-1], w_uk.shape[-1] + q_pe.shape[-1])


def _head_values(latents: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    from mla_suite.models import absorb_triton

    heads, v, latent = w_uv.shape
    values = _empty_values(latents, w_uv)
    x, out = latents.reshape(-1, heads, latent), values.view(-1, heads, v)
    tokens = x.shape[0]
    if not tokens:
        return values
    rows, columns, depth = _rows(tokens), min(128, v), min(64, latent)
    absorb_triton.values_kernel[(heads * (v // columns), -(-tokens // rows))](
        x,
        w_uv,
        out,
        tokens,
        *x.stride()[:2],
        *w_uv.stride()[:2],
        *out.stride()[:2],
        LATENT=latent,
        V=v,
        BLOCK_M=rows,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=8 if rows == MAX_ROWS else 4,
        num_stages=stages(latents.device),
    )
    return values


def _empty_values(latents: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    return latents.new_empty(*latents.shape[:-1], w_uv.shape[1])


library.impl("absorb", on_its_device(_absorb), "CUDA")
library.impl("head_values", on_its_device(_head_values), "CUDA")
torch.library.register_fake("mla_suite_layers::absorb", _empty_absorb, lib=library)
torch.library.register_fake("mla_suite_layers::head_values", _empty_values, lib=library)
