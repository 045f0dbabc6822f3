"""Floating-point vector instructions. "Instructions": VOP1, VOP2, VOP3A; "Floating point modes" for denormals.

Approximating instructions (exp, log, rcp, rsq, sqrt) are held to the manual's one unit in the last place of the exact
value; they read denormals as zero and write them as zero.
"""

from __future__ import annotations

import numpy as np
from isa_case import ARCHS, register
from isa_numbers import bf16_to_f32, fma16, fma32, fma64
from isa_operands import flushed
from isa_vector import Vector

V1, V2 = "vop1", "vop2"


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A NaN gives the other operand; -0 is below +0."""
    larger = np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.where(a > b, a, b))
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, larger))


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    smaller = np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.where(a < b, a, b))
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, smaller))


def strict(function):
    """CDNA4's MAXIMUM3 and MINIMUM3: NaN if any operand is."""
    return lambda a, b, c: np.where(
        np.isnan(a) | np.isnan(b) | np.isnan(c), np.float32(np.nan), function(function(a, b), c)
    )


def median(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """MED3: with a NaN the smallest of the three, else the larger of the two that the first largest leaves."""
    some = np.isnan(a) | np.isnan(b) | np.isnan(c)
    most = maximum(maximum(a, b), c)
    ordered = np.where(most == a, maximum(b, c), np.where(most == b, maximum(a, c), maximum(a, b)))
    return np.where(some, minimum(minimum(a, b), c), ordered)


def fraction(x: np.ndarray) -> np.ndarray:
    """x - floor(x), never 1; NaN of an infinity."""
    largest = np.nextafter(x.dtype.type(1), x.dtype.type(0))
    return np.minimum(x - np.floor(x), largest).astype(x.dtype)


def ldexp(x: np.ndarray, e: np.ndarray) -> np.ndarray:
    """x 2^e, rounded once."""
    steps = np.clip(e.astype(np.int64), -1500, 1500)
    exact = x.astype(np.longdouble) * np.ldexp(np.longdouble(1), steps.astype(np.int32))
    return np.where(np.isfinite(x) & (x != 0), exact, x).astype(x.dtype)


def exponent(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), np.frexp(x.astype(np.longdouble))[1], 0).astype(np.int32)


def mantissa(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), np.frexp(x.astype(np.longdouble))[0], x).astype(x.dtype)


def approximate(function):
    """A double evaluation of an f32 function whose operand and result lose denormals."""
    return lambda x: flushed(np.asarray(function(flushed(x).astype(np.float64))).astype(np.float32))


def half_function(function):
    return lambda x: np.asarray(function(x.astype(np.float64))).astype(np.float16)


def dot(unpack):
    """Two products and the addend, added without intermediate rounding."""

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        total = c.astype(np.longdouble)
        for shift in (0, 16):
            x, y = (unpack(v >> np.uint32(shift) & np.uint32(0xFFFF)).astype(np.longdouble) for v in (a, b))
            total = total + x * y
        return total.astype(np.float32)

    return function


def f16_of(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(np.float16)


def tame(shift_pairs: str):
    """Dot products of finite operands of like size: with more, the order of the additions would show."""

    def adjust(sources: list[np.ndarray]) -> list[np.ndarray]:
        out = []
        rng = np.random.default_rng(7)
        for source in sources[:2]:
            values = rng.integers(-64, 65, (2, *source.shape)).astype(np.float32) / 8
            if shift_pairs == "f16":
                raw = values.astype(np.float16).view(np.uint16).astype(np.uint32)
            else:
                raw = values.view(np.uint32) >> np.uint32(16)
            out.append(raw[0] | raw[1] << np.uint32(16))
        addend = (rng.integers(-4096, 4096, sources[2].shape).astype(np.float32) / 64).view(np.uint32)
        return [*out, addend]

    return adjust


for size in ("f32", "f16"):
    two, three = f"{size} {size} -> {size}", f"{size} {size} {size} -> {size}"
    register(
        Vector(f"v_add_{size}", two, lambda a, b: a + b, V2, arithmetic=True),
        Vector(f"v_sub_{size}", two, lambda a, b: a - b, V2, arithmetic=True),
        Vector(f"v_subrev_{size}", two, lambda a, b: b - a, V2, arithmetic=True),
        Vector(f"v_mul_{size}", two, lambda a, b: a * b, V2, arithmetic=True),
        Vector(f"v_max_{size}", two, maximum, V2, arithmetic=True),
        Vector(f"v_min_{size}", two, minimum, V2, arithmetic=True),
    )
    keeps = {"keeps_high": size == "f16", "arithmetic": True}
    register(
        Vector(f"v_max3_{size}", three, lambda a, b, c: maximum(maximum(a, b), c), **keeps),
        Vector(f"v_min3_{size}", three, lambda a, b, c: minimum(minimum(a, b), c), **keeps),
        Vector(f"v_med3_{size}", three, median, **keeps),
        Vector(f"v_fma_{size}", three, fma32 if size == "f32" else fma16, **keeps),
    )
    for name, function in (("floor", np.floor), ("ceil", np.ceil), ("trunc", np.trunc), ("rndne", np.rint)):
        register(Vector(f"v_{name}_{size}", f"{size} -> {size}", function, V1))

register(
    Vector(
        "v_mul_legacy_f32",
        "f32 f32 -> f32",
        lambda a, b: np.where((a == 0) | (b == 0), np.float32(0), a * b),
        arithmetic=True,
    ),
    Vector("v_maximum3_f32", "f32 f32 f32 -> f32", strict(maximum), archs=("gfx950",), arithmetic=True),
    Vector("v_minimum3_f32", "f32 f32 f32 -> f32", strict(minimum), archs=("gfx950",), arithmetic=True),
    Vector("v_fmac_f32", "f32 f32 f32 -> f32", fma32, V2, accumulates=True, arithmetic=True, without="sdwa"),
    Vector("v_ldexp_f32", "f32 i32 -> f32", ldexp, arithmetic=True, without="clamp"),
    Vector("v_frexp_exp_i32_f32", "f32 -> i32", exponent, V1),
    Vector("v_frexp_mant_f32", "f32 -> f32", mantissa, V1),
    Vector("v_fract_f32", "f32 -> f32", fraction, V1),
    Vector("v_exp_f32", "f32 -> f32", approximate(np.exp2), V1, ulps=1, rows=4),
    Vector("v_log_f32", "f32 -> f32", approximate(np.log2), V1, ulps=1, rows=4),
    Vector("v_rcp_f32", "f32 -> f32", approximate(lambda x: 1 / x), V1, ulps=1, rows=4),
    Vector("v_rcp_iflag_f32", "f32 -> f32", approximate(lambda x: 1 / x), V1, ulps=1, rows=4),
    Vector("v_rsq_f32", "f32 -> f32", approximate(lambda x: 1 / np.sqrt(x)), V1, ulps=1, rows=4),
    Vector("v_sqrt_f32", "f32 -> f32", approximate(np.sqrt), V1, ulps=1, rows=4),
    Vector("v_rcp_f16", "f16 -> f16", half_function(lambda x: 1 / x), V1, ulps=1),
    Vector("v_rsq_f16", "f16 -> f16", half_function(lambda x: 1 / np.sqrt(x)), V1, ulps=1),
    Vector("v_sqrt_f16", "f16 -> f16", half_function(np.sqrt), V1, ulps=1),
    Vector("v_exp_f16", "f16 -> f16", half_function(np.exp2), V1, ulps=1),
    Vector("v_log_f16", "f16 -> f16", half_function(np.log2), V1, ulps=1),
    Vector(
        "v_ldexp_f16",
        "f16 i16 -> f16",
        lambda a, b: np.where(
            np.isfinite(a) & (a != 0), a.astype(np.float64) * 2.0 ** np.clip(b.astype(np.float64), -90, 90), a
        ).astype(np.float16),
        V2,
    ),
    Vector("v_add_f64", "f64 f64 -> f64", lambda a, b: a + b),
    Vector("v_mul_f64", "f64 f64 -> f64", lambda a, b: a * b),
    Vector("v_max_f64", "f64 f64 -> f64", maximum),
    Vector("v_min_f64", "f64 f64 -> f64", minimum),
    Vector("v_fma_f64", "f64 f64 f64 -> f64", fma64),
    Vector("v_fmac_f64", "f64 f64 f64 -> f64", fma64, V2, accumulates=True, without="dpp sdwa"),
    Vector("v_ldexp_f64", "f64 i32 -> f64", lambda a, b: np.ldexp(a, np.clip(b, -5000, 5000))),
    Vector("v_fract_f64", "f64 -> f64", fraction, V1),
    Vector("v_frexp_exp_i32_f64", "f64 -> i32", exponent, V1),
    Vector("v_frexp_mant_f64", "f64 -> f64", mantissa, V1),
    Vector("v_floor_f64", "f64 -> f64", np.floor, V1),
    Vector("v_ceil_f64", "f64 -> f64", np.ceil, V1),
    Vector("v_trunc_f64", "f64 -> f64", np.trunc, V1),
    Vector("v_rndne_f64", "f64 -> f64", np.rint, V1),
    # 2^-29 relative is what the manual promises; a correctly rounded result is the reference of the check.
    Vector("v_rcp_f64", "f64 -> f64", lambda a: 1 / a, V1, ulps=1 << 23),
    Vector("v_rsq_f64", "f64 -> f64", lambda a: 1 / np.sqrt(a), V1, ulps=1 << 23),
    Vector("v_sqrt_f64", "f64 -> f64", np.sqrt, V1, ulps=1 << 23),
)

for kind, unpack, archs in (("f16", f16_of, ARCHS), ("bf16", bf16_to_f32, ("gfx950",))):
    signature, options = "u32 u32 f32 -> f32", {"adjust": tame(kind), "archs": archs}
    register(
        Vector(f"v_dot2_f32_{kind}", signature, dot(unpack), without="scalar e64", **options),
        Vector(
            *(f"v_dot2c_f32_{kind}", signature, dot(unpack), V2),
            **(options | {"accumulates": True, "without": "scalar e64 sdwa"}),
        ),
    )
