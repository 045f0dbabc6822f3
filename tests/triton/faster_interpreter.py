"""Triton's interpreter without work that it repeats; what it computes and what it checks stay the same.

Before each call of a device function it looks through all of triton.language for functions to replace, which the
kernel's launch has replaced, and for each type it asks a table that it builds anew: 20 of the 68 s of CPU time of the
tests that interpret. Each value gets a type of its own, whose shape is checked, spelled and given a type anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
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


class _Shape(NamedTuple):
    """What values of one shape share: none of it is changed once it is made."""

    of_type: tl.tuple
    spelled: str
    of_tensor: tl.tuple
    type_numel: int
    numel: tl.constexpr


@lru_cache(None, typed=True)  # a shape of floats is refused, though 16.0 is 16
def _shape(*lengths: int) -> _Shape:
    of_type = tl.tuple(lengths)
    type_numel = validate_block_shape(of_type)
    return _Shape(of_type, str(of_type), tl.tuple(map(tl.constexpr, lengths)), type_numel, tl.constexpr(type_numel))


@cache
def _scalar() -> tuple[tl.tuple, tl.constexpr]:
    """The shape of scalars and their one value, made when `install` has replaced what a tuple is."""
    return tl.tuple([]), tl.constexpr(1)


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    assert isinstance(shape, (list, tl.tuple))
    lengths = [length.value if isinstance(length, tl.constexpr) else length for length in shape]
    if not lengths:
        raise TypeError("0d block_type is forbidden")
    self.element_ty, self.common = element_ty, _shape(*lengths)
    self.shape, self.numel = self.common.of_type, self.common.type_numel
    self.name = f"<{self.common.spelled}, {element_ty}>"


def _init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    block = type.is_block()
    self.shape, self.numel = (type.common.of_tensor, type.common.numel) if block else _scalar()


def _init_tuple(self: tl.tuple, args: Any, type: Any = None) -> None:
    self.values = list(args)
    self._type = type if type is None or isinstance(type, tl.tuple_type) else tl.tuple_type(type)


def _type_of_tuple(self: tl.tuple) -> tl.tuple_type:
    """Made when it is asked for, which shapes are not."""
    if self._type is None:
        self._type = tl.core._type_for_tuple_values(self.values)
    return self._type


def _set_type_of_tuple(self: tl.tuple, type: tl.tuple_type) -> None:
    self._type = type


def install() -> None:
    tl.tuple.__init__ = _init_tuple
    tl.tuple.type = property(_type_of_tuple, _set_type_of_tuple)
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor
    interpreter._LangPatchScope = _Scope
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _ask_once(interpreter._get_np_dtype)
