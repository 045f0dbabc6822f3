"""Conversions. "Instructions": VOP1 and VOP3A; fp8 and bf8 are FNUZ on CDNA3 and OCP on CDNA4.

Conversions to integers truncate and saturate; NaN gives 0. Conversions to floats round to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from isa_case import (
    ALL,
    ARCHS,
    DENORMALS,
    Case,
    Custom,
    active,
    in_registers,
    random_mask,
    register,
    rows_from,
    vector_name,
    words,
)
from isa_numbers import BITS, bf16_to_f32, encode, f32_to_bf16, fp8_name, values_of
from isa_operands import SDWA, typed
from isa_vector import Vector

from mla_suite.emulator import State

V1, V2 = "vop1", "vop2"
NEW = ("gfx950",)
U = np.uint32


def saturated(low: int, high: int, kind: type, rounding: Callable = np.trunc) -> Callable[[np.ndarray], np.ndarray]:
    def convert(x: np.ndarray) -> np.ndarray:
        wide = np.where(np.isnan(x), 0, x).astype(np.longdouble)
        return np.clip(rounding(wide), low, high).astype(np.int64).astype(kind)

    return convert


to_u32, to_i32 = saturated(0, 2**32 - 1, np.uint32), saturated(-(2**31), 2**31 - 1, np.int32)
to_u16, to_i16 = saturated(0, 65535, np.uint16), saturated(-32768, 32767, np.int16)


def packed(half: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Two operands, each made 16 bits, the first in the low half."""
    return lambda low, high: half(low).astype(U) & U(0xFFFF) | (half(high).astype(U) & U(0xFFFF)) << U(16)


def near_half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def nearest(x: np.ndarray) -> np.ndarray:
    """Half way goes up."""
    return np.floor(x + np.longdouble(0.5))


def toward_zero(x: np.ndarray) -> np.ndarray:
    """The nearest half that is not larger in magnitude; NaN stays one, infinity stays."""
    near = x.astype(np.float16)
    away = np.abs(near.astype(np.float64)) > np.abs(x.astype(np.float64))
    return np.where(away, np.nextafter(near, np.float16(0)), near).view(np.uint16)


def numbers(sources: list[np.ndarray]) -> list[np.ndarray]:
    """No NaN: where a result packs two, its payload would be compared."""
    return [np.where(np.isnan(typed(raw, "f32")), U(0x3F9D70A4), raw) for raw in sources]


def numbers16(sources: list[np.ndarray]) -> list[np.ndarray]:
    return [np.where(np.isnan(typed(raw, "f16")), U(0x3E9D), raw) for raw in sources]


def normalised(x: np.ndarray) -> np.ndarray:
    """V_CVT_PKNORM_I16_F32: -1..1 -> -32767..32767, to the nearest."""
    return np.rint(np.clip(x.astype(np.float64), -1, 1) * 32767).astype(np.int64)


register(
    Vector("v_cvt_f32_u32", "u32 -> f32", lambda a: a.astype(np.float32), V1),
    Vector("v_cvt_f32_i32", "i32 -> f32", lambda a: a.astype(np.float32), V1),
    Vector("v_cvt_u32_f32", "f32 -> u32", to_u32, V1),
    Vector("v_cvt_i32_f32", "f32 -> i32", to_i32, V1),
    Vector("v_cvt_flr_i32_f32", "f32 -> i32", saturated(-(2**31), 2**31 - 1, np.int32, np.floor), V1),
    Vector("v_cvt_rpi_i32_f32", "f32 -> i32", saturated(-(2**31), 2**31 - 1, np.int32, nearest), V1),
    *(
        Vector(f"v_cvt_f32_ubyte{i}", "u32 -> f32", lambda a, i=i: (a >> U(8 * i) & U(255)).astype(np.float32), V1)
        for i in range(4)
    ),
    Vector("v_cvt_f32_f16", "f16 -> f32", lambda a: a.astype(np.float32), V1),
    Vector("v_cvt_f16_f32", "f32 -> f16", lambda a: a.astype(np.float16), V1),
    Vector("v_cvt_f16_u16", "u16 -> f16", lambda a: a.astype(np.float64).astype(np.float16), V1),
    Vector("v_cvt_f16_i16", "i16 -> f16", lambda a: a.astype(np.float64).astype(np.float16), V1),
    Vector("v_cvt_u16_f16", "f16 -> u16", to_u16, V1),
    Vector("v_cvt_i16_f16", "f16 -> i16", to_i16, V1),
    Vector("v_cvt_f64_f32", "f32 -> f64", lambda a: a.astype(np.float64), V1),
    Vector("v_cvt_f32_f64", "f64 -> f32", lambda a: a.astype(np.float32), V1),
    Vector("v_cvt_f64_i32", "i32 -> f64", lambda a: a.astype(np.float64), V1),
    Vector("v_cvt_f64_u32", "u32 -> f64", lambda a: a.astype(np.float64), V1),
    Vector("v_cvt_i32_f64", "f64 -> i32", to_i32, V1),
    Vector("v_cvt_u32_f64", "f64 -> u32", to_u32, V1),
    Vector("v_cvt_pkrtz_f16_f32", "f32 f32 -> u32", packed(toward_zero), adjust=numbers),
    Vector("v_cvt_pknorm_i16_f32", "f32 f32 -> u32", packed(normalised), adjust=numbers),
    Vector("v_cvt_pk_f16_f32", "f32 f32 -> u32", packed(near_half), adjust=numbers, archs=NEW),
    Vector("v_cvt_pk_bf16_f32", "f32 f32 -> u32", packed(f32_to_bf16), adjust=numbers, archs=NEW),
    Vector("v_cvt_f32_bf16", "u16 -> f32", bf16_to_f32, V1, archs=NEW, without="scalar dpp sdwa"),
    Vector("v_pack_b32_f16", "f16 f16 -> u32", packed(lambda x: x.view(np.uint16)), adjust=numbers16),
)


def _codes(rng: np.random.Generator) -> np.ndarray:
    """All 256 codes, four to a register."""
    return rng.permutation(256).astype(np.uint8).view(U)


def _in_floats(first: int, want: np.ndarray) -> Callable[[State], None]:
    """The check that registers hold these f32 rows, any NaN for a NaN."""
    rows = np.atleast_2d(want)
    return lambda state: np.testing.assert_array_equal(state.v[first : first + len(rows)].view(np.float32), rows)


def from_narrow(rng: np.random.Generator, op: str, name: str, count: int) -> Iterable[Case]:
    """One byte, or the two of a half, that SDWA picks."""
    table, codes, target = values_of(name), _codes(rng), vector_name(2, count)
    for select in ("", *(SDWA[:4] if count == 1 else SDWA[4:6])):
        text = f"{op}_sdwa {target}, v0 src0_sel:{select}" if select else f"{op}_e32 {target}, v0"
        first = count * int(select[-1]) if select else 0
        want = np.stack([table[codes >> U(8 * (first + i)) & U(255)] for i in range(count)])
        yield Case([text], _in_floats(2, want), {0: codes})


def _in_range(rng: np.random.Generator, name: str, count: int) -> np.ndarray:
    """Values within a format: codes, points between two codes, and small ones."""
    table = values_of(name)
    finite = table[np.isfinite(table)]
    top = finite.max()
    out = rng.choice(finite, count).astype(np.float64)
    out = np.where(rng.random(count) < 0.6, out * (1 + rng.choice([0.0625, 0.03, 0.1, -0.0625], count)), out)
    tiny = np.abs(finite[finite != 0]).min()
    out = np.where(rng.random(count) < 0.2, rng.standard_normal(count) * tiny, out)
    out[:4] = [0.0, -0.0, tiny / 2, -tiny / 2]
    return np.clip(out, -top, top).astype(np.float32)


def to_narrow_pair(rng: np.random.Generator, op: str, name: str) -> Iterable[Case]:
    for high, mask in ((False, ALL), (True, ALL), (False, random_mask(rng))):
        a, b, old = _in_range(rng, name, 64), _in_range(rng, name, 64), words(rng, 64)
        pair = encode(name, a) | encode(name, b) << U(8)
        new = (old & U(0xFFFF)) | pair << U(16) if high else (old & U(0xFFFF0000)) | pair
        want = np.where(active(mask), new, old)
        text = f"{op} v2, v0, v1" + (" op_sel:[0,0,1]" if high else "")
        yield Case([text], in_registers(2, want, text), {0: a, 1: b, 2: old}, exec_mask=mask)
    # Above the range: with FP16_OVFL (MODE bit 23) the largest value; NaN is a NaN of the format.
    table = values_of(name)
    top = np.nanmax(np.where(np.isinf(table), np.nan, table))
    a = np.where(np.arange(64) % 2 == 0, top * 1.5, -top * 8).astype(np.float32)
    b = np.full(64, np.nan, np.float32)

    def check_top(state: State) -> None:
        got = state.v[2]
        np.testing.assert_array_equal(table[got & U(255)], np.sign(a) * top)
        assert np.isnan(table[got >> U(8) & U(255)]).all()

    yield Case([f"{op} v2, v0, v1"], check_top, {0: a, 1: b}, mode=DENORMALS | 1 << 23)

    def check_open(state: State) -> None:
        assert not np.isfinite(table[state.v[2] & U(255)]).any()  # NaN, or the format's infinity

    yield Case([f"{op} v2, v0, v1"], check_open, {0: a, 1: b})


for arch in ARCHS:
    for kind in ("fp8", "bf8"):
        name = fp8_name(arch, kind)
        register(
            Custom(f"v_cvt_f32_{kind}", from_narrow, name, 1, archs=(arch,)),
            Custom(f"v_cvt_pk_f32_{kind}", from_narrow, name, 2, archs=(arch,)),
            Custom(f"v_cvt_pk_{kind}_f32", to_narrow_pair, name, archs=(arch,)),
        )

# CDNA4 scaled conversions: the scale is an f32 of which the exponent counts. Narrow to wide multiplies, wide to narrow
# divides. OCP formats.
FORMATS = {"fp8": "e4m3", "bf8": "e5m2", "fp6": "e2m3", "bf6": "e3m2", "fp4": "e2m1"}


def _scales(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """f32 with any mantissa, and the powers of two they mean."""
    exponents = rng.integers(-6, 7, 64)
    mantissas = 1 + rng.integers(0, 4, 64) / 4
    return (2.0**exponents * mantissas).astype(np.float32), 2.0**exponents


def _pack(wide: str, values: np.ndarray) -> np.ndarray:
    """[elements, 64] of doubles -> registers."""
    if wide == "f32":
        return values.astype(np.float32).view(U)
    raw = values.astype(np.float16).view(np.uint16) if wide == "f16" else f32_to_bf16(values.astype(np.float32))
    if len(raw) == 1:
        return raw.astype(U)
    return raw[0::2].astype(U) | raw[1::2].astype(U) << U(16)


def _equal(wide: str, got: np.ndarray, want: np.ndarray) -> None:
    """Bits, but any NaN for a NaN."""
    if wide == "f32":
        np.testing.assert_array_equal(got.view(np.float32), want.view(np.float32))
        return
    split = [np.stack([x & U(0xFFFF), x >> U(16)]) for x in (got, want)]
    as_real = [x.astype(np.uint16).view(np.float16) if wide == "f16" else bf16_to_f32(x) for x in split]
    np.testing.assert_array_equal(*as_real)
    zero = as_real[1] == 0
    np.testing.assert_array_equal(np.signbit(as_real[0])[zero], np.signbit(as_real[1])[zero])


def widen(rng: np.random.Generator, op: str, narrow: str, wide: str, elements: int) -> Iterable[Case]:
    bits, table = BITS[FORMATS[narrow]], values_of(FORMATS[narrow]).astype(np.float64)
    total = elements * bits
    registers = -(-total // 32)
    selections = {8: 4, 16: 2}.get(total, 1)
    for part in range(selections):
        raw = words(rng, registers, 64)
        scale, factor = _scales(rng)
        whole = sum(raw[i].astype(object) << 32 * i for i in range(registers))
        start = part * total
        codes = np.stack([(whole >> start + e * bits & (1 << bits) - 1).astype(np.int64) for e in range(elements)])
        with np.errstate(all="ignore"):
            want = _pack(wide, table[codes] * factor)
        source, target = vector_name(0, registers), vector_name(32, len(want))
        # One byte of the register: two bits of op_sel; half of it: one.
        select = f" op_sel:[{part & 1},{part >> 1},0]" if selections == 4 else f" op_sel:[{part},0,0]"
        text = f"{op} {target}, {source}, v10" + (select if part else "")

        def check(state: State, want: np.ndarray = want) -> None:
            _equal(wide, state.v[32 : 32 + len(want)], want)

        yield Case([text], check, {**rows_from(0, raw), 10: scale})


def narrow_pair(rng: np.random.Generator, op: str, narrow: str, wide: str) -> Iterable[Case]:
    name = FORMATS[narrow]
    bits = BITS[name]
    parts = 4 if bits == 4 else 2
    for part in range(parts):
        scale, factor = _scales(rng)
        pair = np.stack([_in_range(rng, name, 64) for _ in range(2)]) * factor
        if wide == "f32":
            raw, exact = pair.astype(np.float32).view(U), pair.astype(np.float32).astype(np.float64)
            names = "v0, v1"
        else:
            top = np.abs(values_of(name)[np.isfinite(values_of(name))]).max()
            rounded = pair.astype(np.float16) if wide == "f16" else bf16_to_f32(f32_to_bf16(pair.astype(np.float32)))
            limit = np.minimum(top * factor, 65504 if wide == "f16" else np.inf)
            exact = np.clip(rounded.astype(np.float64), -limit, limit)
            raw = _pack(wide, exact)
            names = "v0"
        old = words(rng, 64)
        codes = encode(name, exact / factor)
        field = codes[0] | codes[1] << U(bits)
        shift, mask = part * 2 * bits, (1 << 2 * bits) - 1
        want = (old & ~U(mask << shift)) | field << U(shift)
        if bits == 4:
            select = f" op_sel:[0,0,{part & 1},{part >> 1}]"
        else:
            select = f" op_sel:[0,0,{part}]" if wide != "f32" else f" op_sel:[0,0,0,{part}]"
        text = f"{op} v20, {names}, v10{select if part else ''}"
        yield Case([text], in_registers(20, want, text), {**rows_from(0, raw), 10: scale, 20: old})


for wide in ("f32", "f16", "bf16"):
    for narrow in ("fp8", "bf8", "fp4"):
        register(Custom(f"v_cvt_scalef32_pk_{wide}_{narrow}", widen, narrow, wide, 2, archs=NEW))
        register(Custom(f"v_cvt_scalef32_pk_{narrow}_{wide}", narrow_pair, narrow, wide, archs=NEW))
    for narrow in ("fp6", "bf6"):
        register(Custom(f"v_cvt_scalef32_pk32_{wide}_{narrow}", widen, narrow, wide, 32, archs=NEW))
for narrow in ("fp8", "bf8"):
    register(Custom(f"v_cvt_scalef32_f32_{narrow}", widen, narrow, "f32", 1, archs=NEW))
