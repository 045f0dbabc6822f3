"""Facts of the device that tensors are on."""

from __future__ import annotations

from functools import cache

import torch

CPU_UNITS = 8  # a CPU has no compute units; with this many a plan on the CPU still splits its work


@cache  # asking torch takes 2 us of every call
def compute_units(device: torch.device) -> int:
    """Compute units (SMs) of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_UNITS
