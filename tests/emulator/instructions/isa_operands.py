"""Operands of vector instructions: edge values by type, registers as typed arrays, and what DPP and SDWA do to them.

"Vector ALU Operations": "SDWA", "DPP: data parallel primitives".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from isa_case import words

F32_EDGES = [
    *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x3F000000, 0x7F800000, 0xFF800000, 0x7FC00000),
    *(0x7F800001, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x4B800001, 0xC0200000),
]
F16_EDGES = [
    *(0x0000, 0x8000, 0x3C00, 0xBC00, 0x3800, 0x7C00, 0xFC00, 0x7E00),
    *(0x7C01, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x6801, 0xC100),
]
F64_EDGES = [
    *(0x0000000000000000, 0x8000000000000000, 0x3FF0000000000000, 0xBFF0000000000000),
    *(0x3FE0000000000000, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000),
    *(0x0000000000000001, 0x800FFFFFFFFFFFFF, 0x0010000000000000, 0x7FEFFFFFFFFFFFFF),
    *(0xC004000000000000, 0x41DFFFFFFFE00000, 0x41EFFFFFFFE00000, 0x4340000000000001),
]
I32_EDGES = [0, 1, 2, 3, 7, 16, 31, 32, 33, 0xFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFF8000, 0xFFFFFFFF]
I64_EDGES = [0, 1, 63, 64, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0xFFFFFFFF00000000, 0x123456789]
I16_EDGES = [0, 1, 2, 7, 15, 16, 0xFF, 0x100, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]

VIEW = {"f32": np.float32, "u32": np.uint32, "i32": np.int32, "f64": np.float64, "u64": np.uint64, "i64": np.int64}
NARROW = {"f16": np.float16, "u16": np.uint16, "i16": np.int16}
EDGES = {"f32": F32_EDGES, "f16": F16_EDGES, "f64": F64_EDGES, "u64": I64_EDGES, "i64": I64_EDGES}
EDGES |= {"u16": I16_EDGES, "i16": I16_EDGES}
REAL = {"f16", "f32", "f64"}
SIGN_BIT = {"f16": 15, "f32": 31, "f64": 63}


def is_wide(kind: str) -> bool:
    return kind in ("f64", "u64", "i64")


def draw(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    """Raw operands: half edges, half random; as registers (uint32) or pairs (uint64). The upper half of a register
    that holds 16 bits is noise."""
    edges = np.array(EDGES.get(kind, I32_EDGES), np.uint64)
    out = rng.integers(0, 1 << 64, count, dtype=np.uint64)
    if kind in REAL:  # random exponents near zero as well, so that sums and products have digits to round
        near = rng.standard_normal(count) * 2.0 ** rng.integers(-4, 12, count)
        view = {"f32": np.float32, "f64": np.float64, "f16": np.float16}[kind]
        raw = near.astype(view).view(f"u{np.dtype(view).itemsize}").astype(np.uint64)
        out = np.where(rng.random(count) < 0.7, raw, out)
    out = np.where(rng.random(count) < 0.5, edges[rng.integers(0, len(edges), count)], out)
    if is_wide(kind):
        return out
    out32 = (out & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    if kind in NARROW:
        out32 = (out32 & np.uint32(0xFFFF)) | words(rng, count) << np.uint32(16)
    return out32


def operands(rng: np.random.Generator, kinds: Sequence[str], rows: int) -> list[np.ndarray]:
    """[rows, 64] per source: the product of the edges where two sources allow it, then draws."""
    count = rows * 64
    out = [draw(rng, kind, count) for kind in kinds]
    if len(kinds) <= 2:
        edges = [EDGES.get(kind, I32_EDGES) for kind in kinds]
        grid = np.stack([g.ravel() for g in np.meshgrid(*(np.array(e, np.uint64) for e in edges), indexing="ij")])
        room = min(grid.shape[1], count - 64)
        for source, values in zip(out, grid, strict=True):
            source[:room] = values[:room].astype(source.dtype)
    return [source.reshape(rows, 64) for source in out]


def typed(raw: np.ndarray, kind: str) -> np.ndarray:
    if kind in NARROW:
        return (raw & np.uint32(0xFFFF)).astype(np.uint16).view(NARROW[kind])
    return np.ascontiguousarray(raw).view(VIEW[kind])


def raw_of(value: np.ndarray, kind: str) -> np.ndarray:
    if kind in NARROW:
        return np.ascontiguousarray(np.asarray(value, NARROW[kind])).view(np.uint16).astype(np.uint32)
    unsigned = np.uint64 if is_wide(kind) else np.uint32
    return np.ascontiguousarray(np.asarray(value, VIEW[kind])).view(unsigned)


def flushed(value: np.ndarray) -> np.ndarray:
    """Denormals become zeros of the same sign."""
    tiny = np.finfo(value.dtype).tiny
    return np.where(np.abs(value) < tiny, np.copysign(np.zeros_like(value), value), value)


def same(got: np.ndarray, want: np.ndarray, kind: str, ulps: int = 0, zeros: bool = False) -> np.ndarray:
    """Where raw results agree: equal bits, or both NaN for a real type (payloads are not specified)."""
    equal = got == want
    if kind in REAL:
        g, w = typed(got, kind), typed(want, kind)
        equal |= np.isnan(g) & np.isnan(w)
        if kind == "f16":
            equal &= (got >> np.uint32(16)) == (want >> np.uint32(16))
        if ulps:
            near = np.abs(got.astype(np.int64) - want.astype(np.int64)) <= ulps
            equal |= near & np.isfinite(g) & np.isfinite(w)
        if zeros:
            equal |= (g == 0) & (w == 0)
    return equal


def pieces(raw: np.ndarray) -> np.ndarray:
    """Registers of rows of operands: [words, rows, 64]."""
    if raw.dtype == np.uint64:
        return np.stack([raw & np.uint64(0xFFFFFFFF), raw >> np.uint64(32)]).astype(np.uint32)
    return raw[None]


DPP = {
    "quad_perm:[1,0,3,2]": lambda lane: lane ^ 1,
    "quad_perm:[3,3,0,1]": lambda lane: (lane & ~3) | np.array([3, 3, 0, 1])[lane & 3],
    "row_shl:1": lambda lane: np.where(lane % 16 + 1 < 16, lane + 1, -1),
    "row_shl:9": lambda lane: np.where(lane % 16 + 9 < 16, lane + 9, -1),
    "row_shr:1": lambda lane: np.where(lane % 16 >= 1, lane - 1, -1),
    "row_shr:15": lambda lane: np.where(lane % 16 >= 15, lane - 15, -1),
    "row_ror:4": lambda lane: (lane & ~15) | (lane - 4 & 15),
    "row_ror:13": lambda lane: (lane & ~15) | (lane - 13 & 15),
    "row_mirror": lambda lane: (lane & ~15) | 15 - lane % 16,
    "row_half_mirror": lambda lane: (lane & ~7) | 7 - lane % 8,
    "row_newbcast:0": lambda lane: lane & ~15,
    "row_newbcast:11": lambda lane: (lane & ~15) | 11,
    "row_bcast:15": lambda lane: np.where(lane >= 16, (lane & ~15) - 1, -1),
    "row_bcast:31": lambda lane: np.where(lane >= 32, 31, -1),
    "wave_shl:1": lambda lane: np.where(lane < 63, lane + 1, -1),
    "wave_shr:1": lambda lane: np.where(lane > 0, lane - 1, -1),
    "wave_rol:1": lambda lane: (lane + 1) % 64,
    "wave_ror:1": lambda lane: (lane - 1) % 64,
}
SDWA = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")


def sdwa_pick(raw: np.ndarray, select: str, extend: bool) -> np.ndarray:
    if select == "DWORD":
        return raw
    width = 8 if select.startswith("BYTE") else 16
    part = raw >> np.uint32(width * int(select[-1])) & np.uint32((1 << width) - 1)
    if extend:
        part = (part.astype(np.int32) << (32 - width) >> (32 - width)).view(np.uint32)
    return part


def sdwa_place(old: np.ndarray, raw: np.ndarray, select: str, unused: str) -> np.ndarray:
    if select == "DWORD":
        return raw
    width = 8 if select.startswith("BYTE") else 16
    shift = width * int(select[-1])
    mask = np.uint32(((1 << width) - 1) << shift)
    part = raw << np.uint32(shift) & mask
    if unused == "UNUSED_PRESERVE":
        return (old & ~mask) | part
    if unused == "UNUSED_SEXT":
        signed = (part >> np.uint32(shift)).astype(np.int32) << (32 - width) >> (32 - width)
        return part | ((signed >> 31).view(np.uint32) & np.uint32(0xFFFFFFFF << (shift + width) & 0xFFFFFFFF))
    return part
