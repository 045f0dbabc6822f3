"""Number formats by definition: torch's own float8 types, and the 6 and 4 bit formats of the OCP MX specification
(version 1.0, section 5.3) spelled out code by code."""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np
import torch

_libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
_libm.fmaf.restype, _libm.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """C99 fmaf per element: one rounding."""
    f = _libm.fmaf
    values = [f(x, y, z) for x, y, z in zip(*(np.ravel(v).tolist() for v in (a, b, c)), strict=True)]
    return np.array(values, np.float32).reshape(a.shape)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    f = _libm.fma
    values = [f(x, y, z) for x, y, z in zip(*(np.ravel(v).tolist() for v in (a, b, c)), strict=True)]
    return np.array(values, np.float64).reshape(a.shape)


def fma16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """A product of halves is exact in double; where its sum with a third is not, one of the two is too small to
    decide a tie."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """torch's conversion: nearest even."""
    flat = torch.from_numpy(np.array(x, np.float32).ravel())
    return flat.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(np.shape(x))


_TORCH = {
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
# (exponent bits, mantissa bits, bias)
_SMALL = {"e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1)}
BITS = {"e4m3fnuz": 8, "e5m2fnuz": 8, "e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}


def values_of(name: str) -> np.ndarray:
    """The f32 value of every code of a narrow format."""
    if name in _TORCH:
        return torch.arange(256, dtype=torch.uint8).view(_TORCH[name]).float().numpy()
    exponent_bits, mantissa_bits, bias = _SMALL[name]
    out = []
    for code in range(1 << (1 + exponent_bits + mantissa_bits)):
        mantissa = code & ((1 << mantissa_bits) - 1)
        exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
        value = (
            (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
            if exponent
            else mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
        )
        out.append(-value if code >> (exponent_bits + mantissa_bits) else value)
    return np.array(out, np.float32)


def encode(name: str, x: np.ndarray) -> np.ndarray:
    """Nearest code, ties to the even code, of finite values within the format's range; zeros keep their sign if the
    format has two."""
    table = values_of(name).astype(np.float64)
    half = len(table) // 2
    magnitudes = np.where(np.isfinite(table[:half]), table[:half], np.inf)
    order = np.argsort(magnitudes, kind="stable")
    sorted_values = magnitudes[order]
    a = np.abs(np.asarray(x, np.float64))
    above = np.clip(np.searchsorted(sorted_values, a), 1, half - 1)
    low, high = sorted_values[above - 1], sorted_values[above]
    up = (a - low > high - a) | ((a - low == high - a) & (order[above] % 2 == 0))
    code = np.where(up, order[above], order[above - 1]).astype(np.uint32)
    sign = np.signbit(x)
    if name.endswith("fnuz"):
        sign = sign & (code != 0)
    return code | sign.astype(np.uint32) * half


def fp8_name(arch: str, kind: str) -> str:
    """The formats that an arch calls fp8 and bf8: FNUZ on CDNA3, OCP on CDNA4 ("Matrix Arithmetic Instructions")."""
    base = {"fp8": "e4m3", "bf8": "e5m2"}[kind]
    return base + ("fnuz" if arch == "gfx942" else "")
