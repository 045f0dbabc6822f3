"""Rows into a KV cache in Triton: any declared kv_format, by its scale rule.

fp8, fp4 and bf16 are encoded by integer arithmetic on fp32 bits, so every GPU writes the reference's bytes, whatever
formats it has instructions for; NaN is stored as the positive one of its encoding.
"""

from __future__ import annotations

import functools
import struct

import triton
import triton.language as tl

from mla_suite.kv_formats import FP8_LARGEST, KVFormat, get_kv_format
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats.declare import LEAST_POWER_OF_TWO
from mla_suite.ops.sparse_decode.triton_rows import ENCODINGS, decoded


def fp32_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


OCP_LARGEST_BITS = tl.constexpr(fp32_bits(FP8_LARGEST["e4m3fn"]))
FNUZ_LARGEST_BITS = tl.constexpr(fp32_bits(FP8_LARGEST["e4m3fnuz"]))
VALUES = ENCODINGS - {"e8m0", "pad"}  # of latents and rope values


def unstored(kv_format: str) -> str:
    """What of a kv_format `store_columns` does not store, in a sentence; empty where it stores all of it."""
    if unknown := caches.unknown(kv_format, ENCODINGS):
        return unknown
    fmt = get_kv_format(kv_format)
    given, rule = f"kv_format {fmt.name} has", fmt.scale_rule
    if others := {field.encoding for field in fmt.value_fields} - VALUES:
        return f"{given} values in {', '.join(sorted(others))}; Triton's kernels store {', '.join(sorted(VALUES))}"
    if not all(field.aligned for field in fmt.fields):
        return f"{given} fields that lie off their elements; Triton's kernels store whole ones"
    if rule is None:
        return ""
    if rule.tile & (rule.tile - 1):
        return f"{given} a scale for {rule.tile} values; Triton's kernels take powers of two"
    whole = fmt.head_dim if fmt.seamless else fmt.latent
    if fmt.scaled != whole:
        return f"{given} scales for {fmt.scaled} of {whole} values; Triton's kernels store all or none"
    # Values are divided by the scale before it is encoded, so its encoding must hold it; scales of any bits are rounded
    # to e4m3 before.
    encoding, powers = fmt.by_name["scale"].encoding, rule.power_of_two
    if encoding not in (("fp32", "bf16", "e8m0") if powers else ("fp32", "e4m3fn")):
        kind = "powers of two" if powers else "scales of any bits"
        taken = "fp32, powers of two in bf16 or e8m0, others in e4m3fn"
        return f"{given} {kind} in {encoding}; Triton's kernels store {taken}"
    if powers and rule.smallest < LEAST_POWER_OF_TWO:
        least = f"{LEAST_POWER_OF_TWO:.3g}"
        return f"{given} powers of two from {rule.smallest:.3g} on; Triton's kernels store them from {least} on"
    return ""


@functools.lru_cache(maxsize=256)
def chunks(head_dim: int, written: KVFormat, read: KVFormat | None = None) -> tuple[int, ...]:
    """Columns of a row as pieces first, count, first, count, ...: powers of two, each in one written field.

    A piece of scaled values holds whole tiles. As far as that allows, it lies in one field that is read, too.
    """
    inner = set() if written.seamless else {written.latent}
    if (
        read is not None
        and not read.seamless
        and (written.scale_rule is None or read.latent % written.scale_rule.tile == 0)
    ):
        inner.add(read.latent)
    found: list[int] = []
    for first, end in zip((0, *sorted(inner)), (*sorted(inner), head_dim), strict=True):
        while first < end:
            count = 1 << (end - first).bit_length() - 1
            found += (first, count)
            first += count
    return tuple(found)


@triton.jit
def store_columns(
    place, block, at, valid, values, FIRST: tl.constexpr, COUNT: tl.constexpr, FAST: tl.constexpr = False
):  # fmt: skip
    """Write fp32 columns FIRST .. FIRST + COUNT of tokens `at` of blocks that begin at byte pointers `block`.

    The columns lie in one field, and are whole tiles where they are scaled. FAST is for hardware that converts OCP's
    e4m3 and multiplies and adds in one rounding, which Triton's interpreter does not.
    """
    LATENT: tl.constexpr = place.record.latent_count
    if FIRST < LATENT:
        SCALED: tl.constexpr = place.record.scale_count * place.record.scale_tile
        if FIRST < SCALED:
            values = stored_scales(place, block, at, valid, values, FIRST, COUNT, FAST)
        field = block + place.page * place.record.latent_per_block + at * place.record.latent_stride
        field += place.record.latent_offset
        store_encoded(field, FIRST, COUNT, values, valid, place.record.latent_encoding, FAST)
    else:
        field = block + place.page * place.record.rope_per_block + at * place.record.rope_stride
        field += place.record.rope_offset
        store_encoded(field, FIRST - LATENT, COUNT, values, valid, place.record.rope_encoding)


@triton.jit
def store_pad(place, block, at, valid):
    """Write the padding of a token's record as zero."""
    if place.record.pad_count > 0:
        field = block + place.page * place.record.pad_per_block + at * place.record.pad_stride
        column = tl.arange(0, triton.next_power_of_2(place.record.pad_count))
        inside = valid[:, None] & (column < place.record.pad_count)[None, :]
        zero = tl.zeros([at.shape[0], column.shape[0]], tl.uint8)
        tl.store((field + place.record.pad_offset)[:, None] + column[None, :], zero, mask=inside)


@triton.jit
def stored_scales(
    place, block, at, valid, values, FIRST: tl.constexpr, COUNT: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Write the scales of the tiles of `values` [tokens, COUNT], and return the values divided by what was stored."""
    TILE: tl.constexpr = place.record.scale_tile
    ENCODING: tl.constexpr = place.record.scale_encoding
    tiles = tl.reshape(values, [values.shape[0] * (COUNT // TILE), TILE])
    scale = tile_scales(
        tiles, place.record.scale_divisor, place.record.scale_smallest_bits, place.record.scale_power_of_two
    )
    if ENCODING == "e4m3fn":
        scale = decoded(encode_e4m3(scale, False), ENCODING)
    if place.record.scale_power_of_two:
        # The reciprocal of a power of two is exact, and so is the product; that of a NaN is not formed.
        bits = scale.to(tl.int32, bitcast=True)
        inverse = tl.where(scale == scale, 0x7F000000 - bits, bits).to(tl.float32, bitcast=True)
        tiles = tiles * inverse[:, None]
    elif FAST and ENCODING == "e4m3fn":
        # A scale has 4 significant bits, so no quotient lies within a 30th of an ulp of a tie: one step of Newton's
        # from the rounded reciprocal gives the rounded quotient, for 3 instructions in place of a division's 10.
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None] + tl.zeros_like(tiles)
        whole = scale[:, None] + tl.zeros_like(tiles)
        quotient = tiles * inverse
        tiles = tl.fma(tl.fma(-quotient, whole, tiles), inverse, quotient)
    else:
        tiles = tl.div_rn(tiles, scale[:, None] + tl.zeros_like(tiles))
    field = block + place.page * place.record.scale_per_block + at * place.record.scale_stride
    field += place.record.scale_offset
    scales = tl.reshape(scale, [values.shape[0], COUNT // TILE])
    store_encoded(field, FIRST // TILE, COUNT // TILE, scales, valid, ENCODING)
    return tl.reshape(tiles, [values.shape[0], COUNT])


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
def store_encoded(
    field, FIRST: tl.constexpr, COUNT: tl.constexpr, values, valid, ENCODING: tl.constexpr, FAST: tl.constexpr = False
):  # fmt: skip
    """`values` as elements FIRST .. FIRST + COUNT of fields at byte pointers `field` [tokens], to nearest even."""
    if ENCODING == "e2m1":
        low, high = tl.split(tl.reshape(encode_e2m1(values), [values.shape[0], COUNT // 2, 2]))
        target = field[:, None] + (tl.arange(0, COUNT // 2) + FIRST // 2)[None, :]
        tl.store(target, low | (high << 4), mask=valid[:, None])
    else:
        column = (tl.arange(0, COUNT) + FIRST)[None, :]
        if ENCODING == "fp32":
            tl.store(field.to(tl.pointer_type(tl.float32))[:, None] + column, values, mask=valid[:, None])
        elif ENCODING == "fp16":
            tl.store(
                field.to(tl.pointer_type(tl.float16))[:, None] + column, values.to(tl.float16), mask=valid[:, None]
            )
        elif ENCODING == "bf16":
            tl.store(field.to(tl.pointer_type(tl.int16))[:, None] + column, encode_bf16(values), mask=valid[:, None])
        elif ENCODING == "e8m0":
            exponent = values.to(tl.int32, bitcast=True) >> 23  # of a positive power of two, or of NaN
            tl.store(field[:, None] + column, exponent.to(tl.uint8), mask=valid[:, None])
        elif FAST and ENCODING == "e4m3fn":
            code = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            tl.store(field[:, None] + column, code, mask=valid[:, None])
        else:
            tl.static_assert(ENCODING == "e4m3fn" or ENCODING == "e4m3fnuz", "an encoding without a store")
            tl.store(field[:, None] + column, encode_e4m3(values, ENCODING == "e4m3fnuz"), mask=valid[:, None])


@triton.jit
def encode_bf16(values):
    """bf16 bits of fp32 values."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def encode_e4m3(values, FNUZ: tl.constexpr):
    """e4m3 bytes of fp32 values: saturating, subnormals included. FNUZ has exponents one higher and no -0."""
    bits = values.to(tl.int32, bitcast=True)
    code = magnitude_code(bits, 8 if FNUZ else 7, 3, FNUZ_LARGEST_BITS if FNUZ else OCP_LARGEST_BITS)
    sign = (bits >> 24) & 0x80
    if FNUZ:
        sign = tl.where(code == 0, 0, sign)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, 0x80 if FNUZ else 0x7F, code | sign).to(tl.uint8)


@triton.jit
def encode_e2m1(values):
    """e2m1 codes of fp32 values, one a byte: saturating; NaN, which it has not, is 0."""
    bits = values.to(tl.int32, bitcast=True)
    code = magnitude_code(bits, 1, 1, 0x40C00000)  # the largest is 6
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, 0, code | ((bits >> 28) & 8)).to(tl.uint8)


@triton.jit
def magnitude_code(bits, BIAS: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr):
    """Exponent and mantissa, of a small float with these properties, of the magnitude of fp32 `bits`."""
    UNIT_BITS: tl.constexpr = (127 + 24 - MANTISSA - BIAS) << 23  # the power of two whose fp32 ulp is the smallest step
    DROPPED: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(bits & 0x7FFFFFFF, LARGEST)
    unit = tl.full(bits.shape, UNIT_BITS, tl.int32).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True) - UNIT_BITS
    half = (1 << (DROPPED - 1)) - 1
    large = ((size + half + ((size >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    return tl.where(size < ((128 - BIAS) << 23), small, large)
