"""append_kv in Triton, for GPUs without a kernel of our own: rows are rotated, quantised and written."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mla_suite.archs import ArchSpec
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.append_kv.triton_rows import chunks, encode_bf16, store_columns, store_pad, unstored
from mla_suite.ops.sparse_decode.triton_rows import TOO_OLD, Record, record

LATER = 256  # slots looked at together in the search for a later token with the same slot
SINGLE_TOKENS = 2048  # up to this number, a program writes one token
GROUP = 8  # tokens of a program beyond it, which share the search


class Place(NamedTuple):
    """A cache as the kernel writes it."""

    page: Any  # a constant
    record: Record


@triton.jit(do_not_specialize=["tokens", "slots"])  # one binary for all of them
def append_kv_kernel(
    kv_c,  # [tokens, latent]
    k_pe,  # [tokens, rope]
    kv_cache,  # blocks of `page` records, as bytes
    slot_mapping,  # [tokens] int32 or int64
    kv_descale,  # [1] fp32, or None
    cos_sin,  # [max_len, rope], or None
    positions,  # [tokens] int32 or int64, or None
    tokens,
    slots,  # pages x page
    kv_c_stride,
    k_pe_stride,
    cos_sin_stride,
    block_bytes,
    place,
    INTERLEAVED: tl.constexpr,
    LATENT: tl.constexpr,  # columns of kv_c; the others of a row are k_pe
    ROPE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_NUMBERS: tl.constexpr,
    ROUNDS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr = LATER,
):
    """One program writes the records of GROUP tokens, but of those whose slot a later token has."""
    first = tl.program_id(0).to(tl.int64) * GROUP
    token = first + tl.arange(0, GROUP)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1).to(tl.int64)
    later = tl.zeros([GROUP], tl.int32)
    for start in range(first + 1, tokens, BLOCK):
        other = start + tl.arange(0, BLOCK)
        taken = tl.load(slot_mapping + other, mask=other < tokens, other=-1).to(tl.int64)
        same = (taken[None, :] == slot[:, None]) & (other[None, :] > token[:, None])
        later += tl.max(same.to(tl.int32), 1)
    valid = (slot >= 0) & (slot < slots) & (later == 0)
    slot = tl.where(valid, slot, 0)
    token = tl.where(valid, token, 0)
    block = kv_cache.to(tl.pointer_type(tl.uint8)) + slot // place.page * block_bytes
    at = slot % place.page
    for i in tl.static_range(0, CHUNK_NUMBERS, 2):
        row = new_columns(
            kv_c + token * kv_c_stride, k_pe + token * k_pe_stride, cos_sin, positions, token, cos_sin_stride, valid,
            CHUNKS[i], CHUNKS[i + 1], LATENT, ROPE, INTERLEAVED, ROUNDS,
        )  # fmt: skip
        if kv_descale is not None:
            row = tl.div_rn(row, tl.load(kv_descale) + tl.zeros_like(row))
        store_columns(place, block, at, valid, row, CHUNKS[i], CHUNKS[i + 1])
    store_pad(place, block, at, valid)


@triton.jit
def new_columns(
    latents, ropes, cos_sin, positions, token, cos_sin_stride, valid,
    FIRST: tl.constexpr, COUNT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """fp32 columns FIRST .. FIRST + COUNT of the rows of tokens: kv_c and the rotated k_pe behind it."""
    column = tl.arange(0, COUNT) + FIRST
    wanted = valid[:, None] & (column < LATENT)[None, :]
    row = tl.load(latents[:, None] + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    if FIRST + COUNT > LATENT:
        wanted = valid[:, None] & (column >= LATENT)[None, :]
        if cos_sin is None:
            rope = tl.load(ropes[:, None] + (column - LATENT)[None, :], mask=wanted, other=0.0).to(tl.float32)
        else:
            angle = cos_sin + tl.load(positions + token, mask=valid, other=0).to(tl.int64) * cos_sin_stride
            rope = rotated(ropes, angle, column - LATENT, wanted, ROPE, INTERLEAVED, ROUNDS)
        row = tl.where((column >= LATENT)[None, :], rope, row)
    return row


@triton.jit
def rotated(
    source, angle, column, wanted, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """fp32 elements `column` of the rope parts at `source` [tokens], each pair rotated by its angle.

    With ROUNDS the pair's first value is multiplied and added in one rounding, and the sum rounded to its type. fp64
    holds such a product, in Triton's interpreter as well.
    """
    HALF: tl.constexpr = ROPE // 2
    if INTERLEAVED:
        pair, second, other = column // 2, column % 2 == 1, column ^ 1
    else:
        second = column >= HALF
        pair = tl.where(second, column - HALF, column)
        other = tl.where(second, column - HALF, column + HALF)
    mine = tl.load(source[:, None] + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    partner = tl.load(source[:, None] + other[None, :], mask=wanted, other=0.0).to(tl.float32)
    cos = tl.load(angle[:, None] + pair[None, :], mask=wanted, other=0.0).to(tl.float32)
    sin = tl.load(angle[:, None] + HALF + pair[None, :], mask=wanted, other=0.0).to(tl.float32)
    if ROUNDS:
        first = tl.where(second[None, :], partner, mine).to(tl.float64)
        kept = tl.where(second[None, :], mine * cos, partner * sin).to(tl.float64)
        rotated = first * tl.where(second[None, :], sin, cos).to(tl.float64)
        exact = tl.where(second[None, :], rotated + kept, rotated - kept).to(tl.float32)
        if source.dtype.element_ty == tl.bfloat16:  # by bits, since Triton's interpreter cuts
            return ((encode_bf16(exact).to(tl.int32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)
        return exact.to(source.dtype.element_ty).to(tl.float32)
    rotated, others = mine * cos, partner * sin
    # Not by -partner: Triton negates as 0 - x, which is +0 where x is.
    return tl.where(second[None, :], rotated + others, rotated - others)


@functools.lru_cache(maxsize=256)
def constants(kv_format: str, latent: int, rope: int, page: int) -> dict[str, Any]:
    """The constants that follow from the format and the widths."""
    fmt = get_kv_format(kv_format)
    found = chunks(latent + rope, fmt)
    place = Place(tl.constexpr(page), record(kv_format, latent + rope))
    rounds = fmt.sized(latent, rope).rounds_rotated
    return dict(place=place, CHUNKS=found, CHUNK_NUMBERS=len(found), LATENT=latent, ROPE=rope, ROUNDS=rounds)


def supports(problem: Any, arch: ArchSpec | None) -> Supported | Unsupported:
    if why := TOO_OLD or unstored(problem.kv_format):
        return Unsupported(why)
    return Supported(None, f"Triton, one program for {1 if problem.tokens <= SINGLE_TOKENS else GROUP} tokens")


def run(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    kv_cache = caches.as_bytes(args.kv_cache)
    tokens, latent = args.kv_c.shape
    pages, page, _ = kv_cache.shape
    if tokens == 0 or pages * page == 0:
        return
    group = 1 if tokens <= SINGLE_TOKENS else GROUP
    append_kv_kernel[(triton.cdiv(tokens, group),)](
        args.kv_c,
        args.k_pe,
        kv_cache,
        args.slot_mapping,
        args.kv_descale,
        args.cos_sin,
        args.positions,
        tokens,
        pages * page,
        args.kv_c.stride(0),
        args.k_pe.stride(0),
        args.cos_sin.stride(0) if args.cos_sin is not None else 0,
        kv_cache.stride(0) * kv_cache.element_size(),
        INTERLEAVED=args.interleaved,
        **constants(args.kv_format, latent, args.k_pe.shape[1], page),
        GROUP=group,
        num_warps=1 if group == 1 else 4,
        # a fused multiply-add would round a rotation once where the definition rounds twice
        enable_fp_fusion=False,
    )
