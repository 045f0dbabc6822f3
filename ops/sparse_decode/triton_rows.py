"""Rows of a KV cache in Triton: any declared kv_format, gathered and dequantised.

fp8 and fp4 values are decoded by integer arithmetic, so every GPU reads all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

_COMPILES = triton.knobs.runtime.interpret or tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
TOO_OLD = None if _COMPILES else f"triton {triton.__version__} cannot compile it; it takes 3.6, as torch 2.10 brings"
"""Why kernels that take a record are not for this Triton.

Before 3.6 its compiler takes constants within a tuple argument for None, once a loop uses them.
"""
ENCODINGS = frozenset(
    {"bf16", "fp16", "fp32", "e4m3fn", "e4m3fnuz", "e8m0", "e2m1", "pad"}
)  # that `load_encoded` reads


class Record(NamedTuple):
    """Where a format keeps a token's values, and its scale rule, as constants of the kernel; see `kv_formats.declare`.

    Columns 0 .. latent_count of a row are the latent field, those after it the rope field. A seamless row is one field.
    """

    latent_count: Any
    latent_encoding: Any
    latent_offset: Any
    latent_stride: Any
    latent_per_block: Any
    rope_encoding: Any
    rope_offset: Any
    rope_stride: Any
    rope_per_block: Any
    scale_count: Any
    scale_encoding: Any
    scale_offset: Any
    scale_stride: Any
    scale_per_block: Any
    scale_tile: Any
    scale_divisor: Any
    scale_smallest_bits: Any
    scale_power_of_two: Any
    pad_count: Any
    pad_offset: Any
    pad_stride: Any
    pad_per_block: Any


@functools.lru_cache(maxsize=256)
def record(kv_format: str, head_dim: int) -> Record:
    """The kv_format's fields as constants of the kernel; a seamless row as one field of head_dim values."""
    fmt = caches.sized_to(get_kv_format(kv_format), head_dim)
    constants = fmt.constants()
    encodings = {field.name: field.encoding for field in fmt.fields}

    def value(name: str) -> Any:
        part, _, what = name.partition("_")
        found = encodings.get(part, "") if what == "encoding" else constants.get(f"KV_{name.upper()}", 0)
        return tl.constexpr(found)

    return Record(*(value(name) for name in Record._fields))


def unread(kv_format: str, head_dim: int, pieces: Sequence[int]) -> str:
    """What of a kv_format `row_columns` does not read, in a sentence; empty where it reads all of it.

    pieces  of a row that are read at once: first column, count, first column, count, ...
    """
    if unknown := caches.unknown(kv_format, ENCODINGS):
        return unknown
    fmt = caches.sized_to(get_kv_format(kv_format), head_dim)
    given = f"kv_format {fmt.name} has"
    if not all(field.aligned for field in fmt.fields):
        return f"{given} fields that lie off their elements; Triton's kernels read whole ones"
    if fmt.scaled not in (0, fmt.latent):
        return f"{given} scales for {fmt.scaled} of {fmt.latent} values; Triton's kernels read all or none"
    tile = 0 if fmt.scale_rule is None else fmt.scale_rule.tile
    for first, end in ((first, first + count) for first, count in zip(pieces[::2], pieces[1::2], strict=True)):
        within = f"columns {first} to {end - 1} that Triton's kernel reads at once"
        if first < fmt.scaled and (tile & (tile - 1) or (first % tile and first // tile < (end - 1) // tile)):
            return f"{given} a scale for {tile} values, which do not divide {within}"
        if fmt.by_name["latent"].encoding == "e2m1" and first < fmt.latent < end:
            return f"{given} {fmt.latent} values of 4 bits, of which {within} are a part"
    if fmt.rope and fmt.by_name["rope"].encoding == "e2m1":
        return f"{given} rope values of 4 bits in a field of their own; Triton's kernels read none"
    return ""


@triton.jit
def row_columns(
    pool, block, at, valid,
    FIRST: tl.constexpr, COUNT: tl.constexpr, AS_KEYS: tl.constexpr = True, FAST: tl.constexpr = False,
):  # fmt: skip
    """fp32 columns FIRST .. FIRST + COUNT of the rows of tokens `at` of blocks that begin at byte pointers `block`.

    Those of a record with scales are rounded to bf16 where they are wanted AS_KEYS (cache.as_keys). FAST is for
    hardware that converts OCP's e4m3.
    """
    LATENT: tl.constexpr = pool.record.latent_count
    column = tl.arange(0, COUNT) + FIRST
    if FIRST < LATENT:
        field = block + pool.page * pool.record.latent_per_block + at * pool.record.latent_stride
        wanted = valid[:, None]
        if FIRST + COUNT > LATENT:
            wanted = wanted & (column < LATENT)[None, :]
        row = load_encoded(field + pool.record.latent_offset, FIRST, COUNT, wanted, pool.record.latent_encoding, FAST)
        if pool.record.scale_count > 0:
            row = scaled(row, pool, block, at, valid, FIRST, COUNT)
            if AS_KEYS:
                row = rounded_to_bf16(row)
    if FIRST + COUNT > LATENT:
        field = block + pool.page * pool.record.rope_per_block + at * pool.record.rope_stride
        wanted = valid[:, None] & (column >= LATENT)[None, :]
        rope = load_encoded(field + pool.record.rope_offset, FIRST - LATENT, COUNT, wanted, pool.record.rope_encoding)
        if AS_KEYS and pool.record.scale_count > 0 and pool.record.rope_encoding != "bf16":
            rope = rounded_to_bf16(rope)
        row = tl.where((column >= LATENT)[None, :], rope, row) if FIRST < LATENT else rope
    return row


@triton.jit
def scaled(row, pool, block, at, valid, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """`row` with each tile of its latent part multiplied by its scale. Columns within one tile read its scale."""
    TILE: tl.constexpr = pool.record.scale_tile if pool.record.scale_tile < COUNT else COUNT
    FIRST_TILE: tl.constexpr = FIRST // pool.record.scale_tile
    tile = tl.arange(0, COUNT // TILE) + FIRST_TILE
    wanted = valid[:, None] & (tile < pool.record.scale_count)[None, :]
    field = block + pool.page * pool.record.scale_per_block + at * pool.record.scale_stride
    field += pool.record.scale_offset
    scale = load_encoded(field, FIRST_TILE, COUNT // TILE, wanted, pool.record.scale_encoding)
    tiles = tl.reshape(row, [row.shape[0], COUNT // TILE, TILE])
    return tl.reshape(tiles * scale[:, :, None], [row.shape[0], COUNT])


@triton.jit
def rounded_to_bf16(values):
    """fp32 values to nearest even by integers, since Triton's interpreter truncates; a NaN stays as it is."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(values == values, rounded, values)


@triton.jit
def load_encoded(
    field, FIRST: tl.constexpr, COUNT: tl.constexpr, wanted, ENCODING: tl.constexpr, FAST: tl.constexpr = False
):  # fmt: skip
    """fp32 elements FIRST .. FIRST + COUNT [keys, COUNT] of fields that begin at byte pointers `field` [keys].

    0 where not wanted. FIRST may lie before the field where nothing of what precedes it is wanted.
    """
    if ENCODING == "e2m1":
        tl.static_assert(wanted.shape[1] == 1, "two values share a byte")
        both = tl.load(field[:, None] + (tl.arange(0, COUNT // 2) + FIRST // 2)[None, :], mask=wanted, other=0)
        codes = tl.join(both & 15, both >> 4)
        return decoded(tl.reshape(codes, [both.shape[0], COUNT]), ENCODING)
    if ENCODING == "fp32":
        field = field.to(tl.pointer_type(tl.float32))
    elif ENCODING == "bf16":
        field = field.to(tl.pointer_type(tl.bfloat16))
    elif ENCODING == "fp16":
        field = field.to(tl.pointer_type(tl.float16))
    stored = tl.load(field[:, None] + (tl.arange(0, COUNT) + FIRST)[None, :], mask=wanted, other=0)
    if FAST and ENCODING == "e4m3fn":
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return decoded(stored, ENCODING)


@triton.jit
def decoded(stored, ENCODING: tl.constexpr):
    """fp32 values of stored elements: bytes, floats of 16 or 32 bits, or e2m1's codes of 4 bits in bytes."""
    if ENCODING == "e8m0":
        code = stored.to(tl.int32)
        bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23))
        values = bits.to(tl.float32, bitcast=True)
    elif ENCODING == "e4m3fn" or ENCODING == "e4m3fnuz":
        # e4m3's fields at fp32's places are the value but for the exponent's bias, subnormals included
        BIAS: tl.constexpr = 8 if ENCODING == "e4m3fnuz" else 7
        code = stored.to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        nan = code == 0x80 if ENCODING == "e4m3fnuz" else (code & 0x7F) == 0x7F
        values = tl.where(nan, float("nan"), bits.to(tl.float32, bitcast=True) * 2.0 ** (127 - BIAS))
    elif ENCODING == "e2m1":
        code = stored.to(tl.int32)
        values = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126
    else:
        values = stored.to(tl.float32)
    return values
