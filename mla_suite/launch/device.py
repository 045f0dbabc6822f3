"""Facts that are asked of the device that tensors are on."""

from __future__ import annotations

from functools import cache

import torch

from mla_suite.archs import ArchSpec

CPU_UNITS = 8  # compute units that a CPU is taken for, so that plans made on it share work out


@cache  # asking torch takes 2 us of every call
def compute_units(device: torch.device) -> int:
    """Compute units (SMs) of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_UNITS


def on_device(record: ArchSpec, index: int) -> ArchSpec:
    """The record of an arch with the compute units and the L2 size of the GPU with this index."""
    properties = torch.cuda.get_device_properties(index)
    return record.on_device(
        getattr(properties, "multi_processor_count", record.compute_units), getattr(properties, "L2_cache_size", 0)
    )
