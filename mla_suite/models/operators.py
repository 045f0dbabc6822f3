"""The torch library of the layer's own operators on CUDA GPUs; on other devices the layer uses torch's operators.

A program exported on such a GPU names these operators, so whatever runs it imports mla_suite.models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16)
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
LARGE_SHARED_MEMORY = 200 << 10  # bytes of a multiprocessor; others have 100 to 164 KiB

library = torch.library.Library("mla_suite_layers", "DEF")


def have_kernels(*operands: torch.Tensor) -> bool:
    """Whether there are kernels for these; the kernels have no gradients, and rows are contiguous for them."""
    first = operands[0]
    if first.device.type != "cuda" or torch.version.hip is not None or first.dtype not in DTYPES:
        return False
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return False
    return all(operand.dtype == first.dtype and operand.stride(-1) == 1 for operand in operands)


def on_its_device(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation with its first tensor's device as the current one, on which Triton launches."""

    def run(first: torch.Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(first):
            return implementation(first, *others)

    return run


def stages(device: torch.device) -> int:
    """Stages of the operands, 16 or 32 KB each, that are on their way or in use at a time: 4 where a block may have as
    much shared memory as four take, else 2."""
    if device.type != "cuda":
        return 2
    held = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return 4 if held >= LARGE_SHARED_MEMORY else 2
