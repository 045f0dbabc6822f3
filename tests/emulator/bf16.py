"""Conversions between float32 and bf16 held as uint16, for tests that use numpy alone."""

import numpy as np


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounds finite values to nearest even."""
    raw = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (raw + 0x7FFF + (raw >> 16 & 1) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)
