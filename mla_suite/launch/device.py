"""Facts of the device that tensors are on."""

from __future__ import annotations

from functools import cache

import torch

CPU_UNITS = 8  # a CPU shares nothing out; this many show how work would be dealt


@cache  # asking torch takes 2 us of every call
def compute_units(device: torch.device) -> int:
    """Compute units (SMs) of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_UNITS
