"""Integer vector instructions. "Instructions": VOP1, VOP2 and VOP3A/VOP3B."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from isa_case import Case, Custom, active, in_registers, random_mask, register, rows_from, words
from isa_vector import Vector

U, L = np.uint32, np.uint64


def wide(x: np.ndarray) -> np.ndarray:
    """The number itself, in 64 bits."""
    return x.astype(np.int64)


def low(x: np.ndarray) -> np.ndarray:
    """The low 32 bits."""
    return (x.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)


def unsigned24(x: np.ndarray) -> np.ndarray:
    return wide(x) & 0xFFFFFF


def signed24(x: np.ndarray) -> np.ndarray:
    return (unsigned24(x) ^ 0x800000) - 0x800000


def bits_of(x: np.ndarray) -> np.ndarray:
    """[..., 32] of 0 and 1, bit 0 first."""
    return wide(x)[..., None] >> np.arange(32) & 1


def from_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.int64) << np.arange(32)).sum(-1).astype(np.uint32)


def highest(x: np.ndarray) -> np.ndarray:
    """Position of the most significant one of a non-negative number below 2^32; -1 without any."""
    return np.where(x > 0, np.floor(np.log2(np.maximum(x, 1).astype(np.float64))).astype(np.int64), -1)


def leading_zeros(x: np.ndarray) -> np.ndarray:
    return low(np.where(wide(x) > 0, 31 - highest(wide(x)), -1))


def trailing_zeros(x: np.ndarray) -> np.ndarray:
    return low(np.where(wide(x) > 0, highest(wide(x) & -wide(x)), -1))


def sign_run(x: np.ndarray) -> np.ndarray:
    """V_FFBH_I32: how many bits from the top equal the sign, counted to the first that does not; -1 if all do."""
    y = wide(x)
    return leading_zeros(np.where(y < 0, ~y, y).astype(U))


def perm(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """V_PERM_B32: bytes of {a, b} with b below; 8..11 repeat the sign of byte 1, 3, 5, 7; 12 is 0x00, above 0xff."""
    pair = a.astype(L) << L(32) | b.astype(L)
    out = np.zeros_like(a)
    for i in range(4):
        choice = wide(selector) >> 8 * i & 255
        byte = wide(pair >> (np.minimum(choice, 7).astype(L) * L(8))) & 255
        word = np.clip(choice - 8, 0, 3)
        sign = wide(pair >> (word.astype(L) * L(16) + L(15))) & 1
        byte = np.where(choice < 8, byte, np.where(choice < 12, sign * 255, np.where(choice == 12, 0, 255)))
        out |= low(byte) << U(8 * i)
    return out


def field(value: np.ndarray, offset: np.ndarray, width: np.ndarray, signed: bool = False) -> np.ndarray:
    """V_BFE: bits of a value from an offset on; the top bit of a signed field counts negative."""
    inside = wide(value) >> wide(offset) % 32 & (1 << wide(width) % 32) - 1
    top = np.where(wide(width) % 32 > 0, 1 << np.maximum(wide(width) % 32, 1) - 1, 0) if signed else 0
    return low((inside ^ top) - top)


def aligned(a: np.ndarray, b: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """V_ALIGN: the low word of {a, b}, b below, from a bit on."""
    return ((a.astype(L) << L(32) | b.astype(L)) >> shift.astype(L) & L(0xFFFFFFFF)).astype(U)


def middle(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.sort(np.stack([a, b, c]), axis=0)[1]


def bitop3(table: int) -> object:
    """CDNA4 "V_BITOP3": the result bit for inputs a, b, c is bit 4a + 2b + c of the table."""

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return from_bits(table >> (4 * bits_of(a) + 2 * bits_of(b) + bits_of(c)) & 1)

    return function


def selectors(sources: list[np.ndarray]) -> list[np.ndarray]:
    """Byte selectors of v_perm within 0..15, where every value means something else."""
    return [sources[0], sources[1], sources[2] & U(0x0F0F0F0F)]


V1, V2 = "vop1", "vop2"
register(
    Vector("v_mov_b32", "u32 -> u32", lambda a: a, V1, exact=True),
    Vector("v_not_b32", "u32 -> u32", lambda a: ~a, V1),
    Vector("v_bfrev_b32", "u32 -> u32", lambda a: from_bits(bits_of(a)[..., ::-1]), V1),
    Vector("v_ffbh_u32", "u32 -> u32", leading_zeros, V1),
    Vector("v_ffbl_b32", "u32 -> u32", trailing_zeros, V1),
    Vector("v_ffbh_i32", "i32 -> u32", sign_run, V1),
    Vector("v_add_u32", "u32 u32 -> u32", lambda a, b: low(wide(a) + wide(b)), V2),
    Vector("v_sub_u32", "u32 u32 -> u32", lambda a, b: low(wide(a) - wide(b)), V2),
    Vector("v_subrev_u32", "u32 u32 -> u32", lambda a, b: low(wide(b) - wide(a)), V2),
    Vector("v_add_i32", "i32 i32 -> u32", lambda a, b: low(wide(a) + wide(b))),
    Vector("v_sub_i32", "i32 i32 -> u32", lambda a, b: low(wide(a) - wide(b))),
    Vector("v_and_b32", "u32 u32 -> u32", lambda a, b: a & b, V2),
    Vector("v_or_b32", "u32 u32 -> u32", lambda a, b: a | b, V2),
    Vector("v_xor_b32", "u32 u32 -> u32", lambda a, b: a ^ b, V2),
    Vector("v_xnor_b32", "u32 u32 -> u32", lambda a, b: ~(a ^ b), V2),
    Vector("v_lshlrev_b32", "u32 u32 -> u32", lambda a, b: low(wide(b) << (wide(a) % 32)), V2),
    Vector("v_lshrrev_b32", "u32 u32 -> u32", lambda a, b: low(wide(b) >> (wide(a) % 32)), V2),
    Vector("v_ashrrev_i32", "u32 i32 -> u32", lambda a, b: low(wide(b) >> (wide(a) % 32)), V2),
    Vector("v_min_u32", "u32 u32 -> u32", np.minimum, V2),
    Vector("v_max_u32", "u32 u32 -> u32", np.maximum, V2),
    Vector("v_min_i32", "i32 i32 -> i32", np.minimum, V2),
    Vector("v_max_i32", "i32 i32 -> i32", np.maximum, V2),
    Vector("v_min3_u32", "u32 u32 u32 -> u32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    Vector("v_max3_u32", "u32 u32 u32 -> u32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    Vector("v_min3_i32", "i32 i32 i32 -> i32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    Vector("v_max3_i32", "i32 i32 i32 -> i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    Vector("v_med3_i32", "i32 i32 i32 -> i32", middle),
    Vector("v_med3_u32", "u32 u32 u32 -> u32", middle),
    Vector("v_lshl_add_u32", "u32 u32 u32 -> u32", lambda a, b, c: low((wide(a) << wide(b) % 32) + wide(c))),
    Vector("v_add_lshl_u32", "u32 u32 u32 -> u32", lambda a, b, c: low(wide(low(wide(a) + wide(b))) << wide(c) % 32)),
    Vector("v_lshl_or_b32", "u32 u32 u32 -> u32", lambda a, b, c: low(wide(a) << wide(b) % 32) | c),
    Vector("v_and_or_b32", "u32 u32 u32 -> u32", lambda a, b, c: (a & b) | c),
    Vector("v_or3_b32", "u32 u32 u32 -> u32", lambda a, b, c: a | b | c),
    Vector("v_add3_u32", "u32 u32 u32 -> u32", lambda a, b, c: low(wide(a) + wide(b) + wide(c))),
    Vector("v_xad_u32", "u32 u32 u32 -> u32", lambda a, b, c: low(wide(a ^ b) + wide(c))),
    Vector("v_bfe_u32", "u32 u32 u32 -> u32", field),
    Vector("v_bfe_i32", "i32 u32 u32 -> u32", lambda a, b, c: field(a, b, c, signed=True)),
    Vector("v_bfi_b32", "u32 u32 u32 -> u32", lambda a, b, c: (a & b) | (~a & c)),
    Vector("v_bfm_b32", "u32 u32 -> u32", lambda a, b: low(((1 << wide(a) % 32) - 1) << wide(b) % 32)),
    Vector("v_alignbit_b32", "u32 u32 u32 -> u32", lambda a, b, c: aligned(a, b, c % U(32))),
    Vector("v_alignbyte_b32", "u32 u32 u32 -> u32", lambda a, b, c: aligned(a, b, c % U(4) * U(8))),
    Vector("v_perm_b32", "u32 u32 u32 -> u32", perm),
    Vector("v_perm_b32", "u32 u32 u32 -> u32", perm, adjust=selectors),
    Vector("v_bcnt_u32_b32", "u32 u32 -> u32", lambda a, b: low(bits_of(a).sum(-1) + wide(b))),
    Vector("v_mul_lo_u32", "u32 u32 -> u32", lambda a, b: (a.astype(L) * b.astype(L) & L(0xFFFFFFFF)).astype(U)),
    Vector("v_mul_hi_u32", "u32 u32 -> u32", lambda a, b: (a.astype(L) * b.astype(L) >> L(32)).astype(U)),
    Vector("v_mul_hi_i32", "i32 i32 -> u32", lambda a, b: low(wide(a) * wide(b) >> 32)),
    Vector("v_mul_u32_u24", "u32 u32 -> u32", lambda a, b: low(unsigned24(a) * unsigned24(b)), V2),
    Vector("v_mul_hi_u32_u24", "u32 u32 -> u32", lambda a, b: low(unsigned24(a) * unsigned24(b) >> 32), V2),
    Vector("v_mul_i32_i24", "u32 u32 -> u32", lambda a, b: low(signed24(a) * signed24(b)), V2),
    Vector("v_mul_hi_i32_i24", "u32 u32 -> u32", lambda a, b: low(signed24(a) * signed24(b) >> 32), V2),
    Vector(
        "v_mad_u32_u24",
        "u32 u32 u32 -> u32",
        lambda a, b, c: low(unsigned24(a) * unsigned24(b) + wide(c)),
        without="e64",
    ),
    Vector("v_mad_i32_i24", "u32 u32 u32 -> u32", lambda a, b, c: low(signed24(a) * signed24(b) + wide(c))),
    Vector("v_mad_u32_u16", "u16 u16 u32 -> u32", lambda a, b, c: low(wide(a) * wide(b) + wide(c))),
    Vector("v_mad_i32_i16", "i16 i16 u32 -> u32", lambda a, b, c: low(wide(a) * wide(b) + wide(c))),
    Vector("v_sad_u32", "u32 u32 u32 -> u32", lambda a, b, c: low(abs(wide(a) - wide(b)) + wide(c))),
    Vector("v_cvt_pk_u16_u32", "u32 u32 -> u32", lambda a, b: np.minimum(a, 65535) | np.minimum(b, 65535) << U(16)),
    Vector(
        "v_cvt_pk_i16_i32",
        "i32 i32 -> u32",
        lambda a, b: low(np.clip(a, -32768, 32767)) & U(0xFFFF) | low(np.clip(b, -32768, 32767)) << U(16),
    ),
)

# 16 bits: the upper half of the destination becomes zero.
register(
    *[
        Vector(op, "u16 u16 -> u16", formula, V2)
        for op, formula in (
            ("v_add_u16", lambda a, b: a + b),
            ("v_sub_u16", lambda a, b: a - b),
            ("v_subrev_u16", lambda a, b: b - a),
            ("v_mul_lo_u16", lambda a, b: a * b),
            ("v_lshlrev_b16", lambda a, b: b << a % 16),
            ("v_lshrrev_b16", lambda a, b: b >> a % 16),
            ("v_max_u16", np.maximum),
            ("v_min_u16", np.minimum),
        )
    ],
    Vector("v_ashrrev_i16", "u16 i16 -> i16", lambda a, b: b >> (a % 16).astype(np.int16), V2),
    Vector("v_max_i16", "i16 i16 -> i16", np.maximum, V2),
    Vector("v_min_i16", "i16 i16 -> i16", np.minimum, V2),
)

# 64 bits.
register(
    Vector("v_mov_b64", "u64 -> u64", lambda a: a, V1, exact=True),
    Vector("v_lshlrev_b64", "u32 u64 -> u64", lambda a, b: b << (a.astype(L) % L(64))),
    Vector("v_lshrrev_b64", "u32 u64 -> u64", lambda a, b: b >> (a.astype(L) % L(64))),
    Vector("v_ashrrev_i64", "u32 i64 -> i64", lambda a, b: b >> (a.astype(np.int64) % 64)),
    Vector(
        "v_lshl_add_u64",
        "u64 u32 u64 -> u64",
        lambda a, b, c: (a << b.astype(L)) + c,
        adjust=lambda s: [s[0], s[1] % U(5), s[2]],  # shifts of 0 to 4 are defined
        without="e64",
    ),
)


def dot4(signed: bool):
    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        total = wide(c)
        for shift in range(0, 32, 8):
            x, y = (wide(v) >> shift & 255 for v in (a, b))
            if signed:
                x, y = (x ^ 128) - 128, (y ^ 128) - 128
            total = total + x * y
        return low(total)

    return function


register(
    Vector("v_dot4_i32_i8", "u32 u32 u32 -> u32", dot4(True)),
    Vector("v_dot4_u32_u8", "u32 u32 u32 -> u32", dot4(False)),
)

for table in (0x00, 0x27, 0x96, 0xE8, 0xCA, 0xFE):
    register(
        Vector(
            "v_bitop3_b32",
            "u32 u32 u32 -> u32",
            bitop3(table),
            archs=("gfx950",),
            tail=f" bitop3:{table:#x}",
            rows=1,
            without="scalar",
        )
    )


def bitop3_half(rng: np.random.Generator, op: str) -> Iterable[Case]:
    """The 16-bit form: op_sel picks the half of every source; the fourth bit, the half of the destination."""
    for table, selects in ((0xEC, (0, 0, 0, 0)), (0x27, (1, 0, 1, 0)), (0x96, (0, 1, 0, 1)), (0xCA, (1, 1, 1, 1))):
        raw, old, mask = words(rng, 3, 64), words(rng, 64), random_mask(rng)
        sources = [row >> U(16 * high) & U(0xFFFF) for row, high in zip(raw, selects, strict=False)]
        value = bitop3(table)(*sources) & U(0xFFFF)
        merged = old & U(0xFFFF) | value << U(16) if selects[3] else old & U(0xFFFF0000) | value
        want = np.where(active(mask), merged, old)
        chosen = f" op_sel:[{','.join(map(str, selects))}]" if any(selects) else ""
        text = f"{op} v9, v0, v1, v2 bitop3:{table:#x}{chosen}"
        yield Case([text], in_registers(9, want, text), {**rows_from(0, raw), 9: old}, exec_mask=mask)


register(Custom("v_bitop3_b16", bitop3_half, archs=("gfx950",)))
