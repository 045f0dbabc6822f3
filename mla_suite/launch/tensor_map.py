"""Tensor maps of the copy engine (TMA): the CUDA driver's 128 opaque bytes that describe a tensor in memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from mla_suite.launch.cuda import open_library
from mla_suite.launch.driver import DriverError

WORDS = 16  # 8 bytes each
ALIGNMENT = 16  # bytes; it holds for addresses and for strides
_ELEMENTS = {torch.uint8: 0, torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLES = {64: 2, 128: 3}  # CUtensorMapSwizzle, by the bytes of a box's innermost dimension
_NO_INTERLEAVE, _PROMOTE_TO_128, _ZEROS_OUTSIDE = 0, 2, 0


@lru_cache(maxsize=1024)
def swizzled(
    address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> tuple[int, ...]:
    """The map of a tensor whose boxes land in shared memory under the swizzle of their own width, as 16 words.

    address  of the first element, a multiple of 16
    sizes    elements along each dimension, innermost first
    strides  bytes between neighbours along each dimension but the innermost, multiples of 16
    box      elements along each dimension that one copy brings; the innermost takes 128 or 64 bytes

    The map depends on the arguments alone, so equal calls share one. DriverError when the driver refuses or is too old.
    """
    return _encode(open_library(), address, dtype, sizes, strides, box)


def _encode(
    library: Any,
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> tuple[int, ...]:
    if not hasattr(library, "cuTensorMapEncodeTiled"):
        raise DriverError("the CUDA driver has no cuTensorMapEncodeTiled; it must be of CUDA 12 or newer")
    rank = len(sizes)
    words = (ctypes.c_uint64 * (WORDS + 7))()
    first = -ctypes.addressof(words) % 64 // 8  # the driver wants 64-byte alignment
    code = library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(words) + 8 * first),
        ctypes.c_int(_ELEMENTS[dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(_NO_INTERLEAVE),
        ctypes.c_int(_SWIZZLES[box[0] * dtype.itemsize]),
        ctypes.c_int(_PROMOTE_TO_128),
        ctypes.c_int(_ZEROS_OUTSIDE),
    )
    if code:
        raise DriverError(
            f"cuTensorMapEncodeTiled: CUDA error {code} for sizes {sizes}, strides {strides}, boxes of {box}"
        )
    return tuple(words[first : first + WORDS])
