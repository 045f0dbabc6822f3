"""The outputs of a call, as `Output` specifies them: for fakes, and as one function for calls that come again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mla_suite.core.op import Output


def empty(outputs: Sequence[Output], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Uninitialised outputs; fakes and symbolic sizes too."""
    return tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs])


def allocator(
    outputs: Sequence[Output], device: torch.device, strides: Sequence[Sequence[int]] | None = None
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """`empty` for real tensors, as one function without arguments; with `strides` in place of contiguous ones.

    Inductor's entry points take a third of the time of torch.empty, most of which goes into its arguments (3 us an
    output on an H200's host). They are torch's own and not public: where one is missing, torch.empty_strided does. They
    know the current device alone.
    """
    if not outputs:
        return tuple
    steps = [_contiguous(shape) for shape, _ in outputs] if strides is None else list(strides)
    laid_out = list(zip(outputs, steps, strict=True))

    def elsewhere() -> tuple[torch.Tensor, ...]:
        return tuple(
            [torch.empty_strided(shape, step, dtype=dtype, device=device) for (shape, dtype), step in laid_out]
        )

    make = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if make is None:
        return elsewhere
    makers = [partial(make, shape, step, dtype) for (shape, dtype), step in laid_out]
    on_cpu = device.type == "cpu"
    current: Callable[[], Any] = (lambda: None) if on_cpu else torch._C._cuda_getDevice
    ordinal = device.index
    if len(makers) == 2:  # spelled out: a loop takes 0.2 us more
        first, second = makers

        def allocate() -> tuple[torch.Tensor, ...]:
            if on_cpu or current() == ordinal:
                return first(), second()
            return elsewhere()
    else:

        def allocate() -> tuple[torch.Tensor, ...]:
            if on_cpu or current() == ordinal:
                return tuple(map(_make, makers))
            return elsewhere()

    return allocate


_make = partial.__call__


def _contiguous(shape: Sequence[int | torch.SymInt]) -> tuple[int | torch.SymInt, ...]:
    """Strides, in elements, as torch gives them to a contiguous tensor."""
    strides: list[int | torch.SymInt] = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))
