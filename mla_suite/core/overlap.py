"""Calls that write into memory which the same call reads are refused.

A tensor's bytes are taken to reach from its first element to its last, gaps included: two views that interleave
without a byte in common are refused, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mla_suite.core import checks


def reach(value: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last; 0 without elements."""
    if not value.numel():
        return 0
    elements = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (elements + 1) * value.element_size()


def first_overlap(addresses: Sequence[int], sizes: Sequence[int], written: Sequence[int]) -> tuple[int, int] | None:
    """The positions of a written tensor and of another that share bytes, or None."""
    for position in written:
        begin = addresses[position]
        end = begin + sizes[position]
        if begin == end:
            continue
        for at, other in enumerate(addresses):
            if other < end and begin < other + sizes[at] and at != position and sizes[at]:
                return position, at
    return None


def refuse(name: str, arguments: Sequence[str], tensors: Sequence[Any], mutated: Sequence[int]) -> None:
    """ValueError where one of the written tensors lies in memory of another argument.

    tensors  every positional argument in the schema's order: tensors, lists of them and None
    mutated  the positions of those that are written
    """
    names: list[str] = []
    found: list[torch.Tensor] = []
    written: list[int] = []
    for position, value in enumerate(tensors):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                if position in mutated:
                    written.append(len(found))
                names.append(arguments[position])
                found.append(tensor)
    both = first_overlap([tensor.data_ptr() for tensor in found], [reach(tensor) for tensor in found], written)
    if both is not None:
        first, second = both
        if second in written:
            first, second = max(both), min(both)
        output, other = names[first], names[second]
        given = f"shares memory with {other}, which the call still needs when it writes {output}"
        checks.fail(name, output, given, f"give {output} memory of its own")
