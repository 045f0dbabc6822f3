"""Outputs of eager calls, allocated the way that code compiled by Inductor allocates its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch


class Output(NamedTuple):
    """An output to be allocated, contiguous, on the device of the operator's first tensor."""

    shape: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype


def empty(outputs: Sequence[Output], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Uninitialised outputs; fakes and symbolic sizes too."""
    return tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs])


def allocator(outputs: Sequence[Output], device: torch.device) -> Callable[[], tuple[torch.Tensor, ...]]:
    """What `empty` does, for real tensors and again and again.

    Inductor's entry points take a third of the time of torch.empty, most of which goes into its arguments (3 us an
    output on an H200's host). They are torch's own and not public: where one is missing, torch.empty does. They know
    the current device alone.
    """
    if not outputs:
        return tuple
    make = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if make is None:
        return lambda: empty(outputs, device)
    here = _all([partial(make, shape, _contiguous(shape), dtype) for shape, dtype in outputs])
    if device.type == "cpu":
        return here
    current, ordinal = torch._C._cuda_getDevice, device.index
    return lambda: here() if current() == ordinal else empty(outputs, device)


def _all(makers: Sequence[Callable[[], torch.Tensor]]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Calls each. One and two, which is what operators return, are spelled out: a loop takes 0.2 us more."""
    if len(makers) == 1:
        (only,) = makers
        return lambda: (only(),)
    if len(makers) == 2:
        first, second = makers
        return lambda: (first(), second())
    return lambda: tuple([make() for make in makers])


def _contiguous(shape: Sequence[int | torch.SymInt]) -> tuple[int | torch.SymInt, ...]:
    """Strides, in elements, as torch gives them to a contiguous tensor."""
    strides: list[int | torch.SymInt] = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))
