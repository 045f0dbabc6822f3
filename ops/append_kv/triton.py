"""append_kv in Triton, for GPUs without a kernel of our own.

fp8 and bf16 are encoded by integer arithmetic on fp32 bits, so every GPU writes the reference's bytes, whatever formats
it has instructions for; NaN is stored as the positive one of its encoding.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
import triton
import triton.language as tl

from mla_suite.archs import ArchSpec
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import FP8_LARGEST, get_kv_format


def fp32_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


OCP_LARGEST_BITS = tl.constexpr(fp32_bits(FP8_LARGEST["e4m3fn"]))
FNUZ_LARGEST_BITS = tl.constexpr(fp32_bits(FP8_LARGEST["e4m3fnuz"]))
ENCODINGS = frozenset({"bf16", "fp16", "fp32", "e4m3fn", "e4m3fnuz", "e8m0", "pad"})  # that `store_encoded` writes
LATER = 256  # slots looked at together in the search for a later token with the same slot


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
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LATENT_ENCODING: tl.constexpr,
    ROPE_ENCODING: tl.constexpr,
    SCALE_ENCODING: tl.constexpr,
    KV_LATENT_COUNT: tl.constexpr,
    KV_LATENT_OFFSET: tl.constexpr,
    KV_LATENT_STRIDE: tl.constexpr,
    KV_LATENT_PER_BLOCK: tl.constexpr,
    KV_ROPE_COUNT: tl.constexpr = 0,
    KV_ROPE_OFFSET: tl.constexpr = 0,
    KV_ROPE_STRIDE: tl.constexpr = 0,
    KV_ROPE_PER_BLOCK: tl.constexpr = 0,
    KV_SCALE_OFFSET: tl.constexpr = 0,
    KV_SCALE_STRIDE: tl.constexpr = 0,
    KV_SCALE_PER_BLOCK: tl.constexpr = 0,
    KV_SCALE_COUNT: tl.constexpr = 0,
    KV_SCALE_TILE: tl.constexpr = 0,
    KV_SCALE_DIVISOR: tl.constexpr = 1,
    KV_SCALE_SMALLEST_BITS: tl.constexpr = 0,
    KV_SCALE_POWER_OF_TWO: tl.constexpr = 0,
    KV_PAD_COUNT: tl.constexpr = 0,
    KV_PAD_OFFSET: tl.constexpr = 0,
    KV_PAD_STRIDE: tl.constexpr = 0,
    KV_PAD_PER_BLOCK: tl.constexpr = 0,
    BLOCK: tl.constexpr = LATER,
):
    """One program writes the record of one token, unless a later token has the same slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0 or slot >= slots:
        return
    duplicates = 0
    for start in range(token + 1, tokens, BLOCK):
        other = start + tl.arange(0, BLOCK)
        taken = tl.load(slot_mapping + other, mask=other < tokens, other=-1).to(tl.int64)
        duplicates += tl.sum((taken == slot).to(tl.int32), 0)
    if duplicates > 0:
        return
    block = kv_cache.to(tl.pointer_type(tl.uint8)) + slot // PAGE * block_bytes
    at = slot % PAGE

    TILE: tl.constexpr = KV_SCALE_TILE if KV_SCALE_COUNT else triton.next_power_of_2(KV_LATENT_COUNT)
    TILES: tl.constexpr = triton.next_power_of_2(KV_SCALE_COUNT) if KV_SCALE_COUNT else 1
    tile = tl.arange(0, TILES)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = column < KV_LATENT_COUNT
    latent = tl.load(kv_c + token * kv_c_stride + column, mask=inside, other=0.0).to(tl.float32)
    if KV_SCALE_COUNT:
        scale = tile_scales(latent, KV_SCALE_DIVISOR, KV_SCALE_SMALLEST_BITS, KV_SCALE_POWER_OF_TWO)
        latent = tl.div_rn(latent, scale[:, None] + tl.zeros_like(latent))
        field = block + PAGE * KV_SCALE_PER_BLOCK + at * KV_SCALE_STRIDE + KV_SCALE_OFFSET
        store_encoded(field, tile, scale, tile < KV_SCALE_COUNT, SCALE_ENCODING)
    elif kv_descale is not None:
        latent = tl.div_rn(latent, tl.load(kv_descale) + tl.zeros_like(latent))
    field = block + PAGE * KV_LATENT_PER_BLOCK + at * KV_LATENT_STRIDE + KV_LATENT_OFFSET
    store_encoded(field, column, latent, inside, LATENT_ENCODING)

    if KV_ROPE_COUNT:
        field = block + PAGE * KV_ROPE_PER_BLOCK + at * KV_ROPE_STRIDE + KV_ROPE_OFFSET
        source = k_pe + token * k_pe_stride
        if cos_sin is None:
            column = tl.arange(0, triton.next_power_of_2(KV_ROPE_COUNT))
            inside = column < KV_ROPE_COUNT
            rope = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
            store_rope(field, column, rope, inside, kv_descale, ROPE_ENCODING)
        else:
            HALF: tl.constexpr = KV_ROPE_COUNT // 2
            pair = tl.arange(0, triton.next_power_of_2(HALF))
            inside = pair < HALF
            low = 2 * pair if INTERLEAVED else pair
            high = low + 1 if INTERLEAVED else low + HALF
            a = tl.load(source + low, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(source + high, mask=inside, other=0.0).to(tl.float32)
            angle = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride + pair
            cos = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(angle + HALF, mask=inside, other=0.0).to(tl.float32)
            store_rope(field, low, a * cos - b * sin, inside, kv_descale, ROPE_ENCODING)
            store_rope(field, high, b * cos + a * sin, inside, kv_descale, ROPE_ENCODING)
    if KV_PAD_COUNT:
        field = block + PAGE * KV_PAD_PER_BLOCK + at * KV_PAD_STRIDE + KV_PAD_OFFSET
        column = tl.arange(0, triton.next_power_of_2(KV_PAD_COUNT))
        tl.store(field + column, tl.zeros_like(column).to(tl.uint8), mask=column < KV_PAD_COUNT)


@triton.jit
def tile_scales(
    values, DIVISOR: tl.constexpr, MIN_BITS: tl.constexpr, POWER_OF_TWO: tl.constexpr
):  # fmt: skip
    """fp32 scale of each row of `values`, by the kv_format's rule; NaN for a row that holds NaN or inf."""
    # As integers, magnitudes are in order and NaN is above infinity, so a maximum cannot lose it.
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    amax = largest.to(tl.float32, bitcast=True)
    bits = tl.div_rn(amax, tl.full(amax.shape, DIVISOR, tl.float32)).to(tl.int32, bitcast=True)
    bits = tl.maximum(bits, MIN_BITS)
    if POWER_OF_TWO:
        bits = (bits + 0x7FFFFF) & 0x7F800000  # up to the next exponent unless the mantissa is zero
    bits = tl.where(largest < 0x7F800000, bits, 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_rope(field, column, values, inside, kv_descale, ENCODING: tl.constexpr):
    if kv_descale is not None:
        values = tl.div_rn(values, tl.load(kv_descale) + tl.zeros_like(values))
    store_encoded(field, column, values, inside, ENCODING)


@triton.jit
def store_encoded(field, column, values, inside, ENCODING: tl.constexpr):
    """Element `column` of a field that begins at byte pointer `field`: fp32 `values`, rounded to nearest even."""
    if ENCODING == "fp32":
        tl.store(field.to(tl.pointer_type(tl.float32)) + column, values, mask=inside)
    elif ENCODING == "fp16":
        tl.store(field.to(tl.pointer_type(tl.float16)) + column, values.to(tl.float16), mask=inside)
    elif ENCODING == "bf16":
        tl.store(field.to(tl.pointer_type(tl.int16)) + column, encode_bf16(values), mask=inside)
    elif ENCODING == "e8m0":
        exponent = values.to(tl.int32, bitcast=True) >> 23  # of a positive power of two, or of NaN
        tl.store(field + column, exponent.to(tl.uint8), mask=inside)
    else:
        tl.static_assert(ENCODING == "e4m3fn" or ENCODING == "e4m3fnuz", "an encoding without a store")
        tl.store(field + column, encode_e4m3(values, ENCODING == "e4m3fnuz"), mask=inside)


@triton.jit
def encode_bf16(values):
    """bf16 bits of fp32 values."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def encode_e4m3(values, FNUZ: tl.constexpr):
    """e4m3 bytes of fp32 values: saturating, subnormals included. FNUZ has exponents one higher and no -0."""
    BIAS: tl.constexpr = 8 if FNUZ else 7
    LARGEST: tl.constexpr = FNUZ_LARGEST_BITS if FNUZ else OCP_LARGEST_BITS
    UNIT_BITS: tl.constexpr = (127 + 21 - BIAS) << 23  # the power of two whose fp32 ulp is e4m3's smallest step
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    nan = size > 0x7F800000
    size = tl.minimum(size, LARGEST)
    unit = tl.full(values.shape, UNIT_BITS, tl.int32).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True) - UNIT_BITS
    large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    code = tl.where(size < ((128 - BIAS) << 23), small, large)
    sign = (bits >> 24) & 0x80
    if FNUZ:
        sign = tl.where(code == 0, 0, sign)
    return tl.where(nan, 0x80 if FNUZ else 0x7F, code | sign).to(tl.uint8)


@functools.lru_cache(maxsize=256)
def constants(kv_format: str, latent: int, rope: int) -> dict[str, Any]:
    """The kv_format's constants and encodings, as the kernel names them."""
    kind = get_kv_format(kv_format).sized(latent, rope)
    encodings = {field.name: field.encoding for field in kind.fields}
    names = ("KV_LATENT", "KV_ROPE", "KV_SCALE", "KV_PAD")
    found: dict[str, Any] = {name: value for name, value in kind.constants().items() if name.startswith(names)}
    for field in ("latent", "rope", "scale"):
        found[f"{field.upper()}_ENCODING"] = encodings.get(field, "")
    return found


def supports(problem: Any, arch: ArchSpec | None) -> Supported | Unsupported:
    kind = get_kv_format(problem.kv_format)
    unknown = kind.encodings - ENCODINGS
    if unknown:
        given = f"kv_format {problem.kv_format} holds {', '.join(sorted(unknown))}"
        return Unsupported(f"{given}; it takes {', '.join(sorted(ENCODINGS))}")
    if kind.scaled > kind.latent:
        return Unsupported(f"kv_format {problem.kv_format} scales its rope values too; it stores them as they are")
    return Supported(None, "Triton, one program per token")


def run(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    kv_cache = args.kv_cache
    tokens, latent = args.kv_c.shape
    pages, page, _ = kv_cache.shape
    if tokens == 0 or pages * page == 0:
        return
    if kv_cache.element_size() == 1:  # Triton has no e4m3fnuz on every GPU, and the kernel writes bytes
        kv_cache = kv_cache.view(torch.uint8)
    append_kv_kernel[(tokens,)](
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
        PAGE=page,
        INTERLEAVED=args.interleaved,
        **constants(args.kv_format, latent, args.k_pe.shape[1]),
        num_warps=1,
        # a fused multiply-add would round the rotation once where the definition rounds twice
        enable_fp_fusion=False,
    )
