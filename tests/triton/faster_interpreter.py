"""Triton's interpreter without work that it repeats; what it computes and what it checks stay the same.

Before each call of a device function it looks through all of triton.language for functions to replace, which the
kernel's launch has replaced, and for each type it asks a table that it builds anew: 20 of the 68 s of CPU time of the
tests that interpret.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patched: set[str] = set()
"""Modules whose functions the launch that runs now has replaced."""


class _Scope(interpreter._LangPatchScope):
    """The replacements of a launch, whose end puts back what was there."""

    def restore(self) -> None:
        super().restore()
        _patched.clear()


def _patch_once(patch: Callable[[Callable[..., Any]], interpreter._LangPatchScope]) -> Callable[..., Any]:
    def patch_lang(fn: Callable[..., Any]) -> interpreter._LangPatchScope:
        names = {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}
        if names and names <= _patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        _patched.update(names)
        return scope

    return patch_lang


def _ask_once(np_dtype: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    of_scalar = cache(np_dtype)

    def get_np_dtype(dtype: tl.dtype) -> np.dtype:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np_dtype(element) if isinstance(element, tl.pointer_type) else of_scalar(element)

    return get_np_dtype


def install() -> None:
    interpreter._LangPatchScope = _Scope
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _ask_once(interpreter._get_np_dtype)
