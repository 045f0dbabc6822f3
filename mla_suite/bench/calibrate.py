"""Constants of the model of time as tools/measure_amd.py measured them, beside today's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import ArchSpec
from mla_suite.emulator import ModelledTime, timing
from mla_suite.errors import UsageError
from mla_suite.ops.decode.samples import decode_sample


class Constant(NamedTuple):
    """A constant of `emulator.timing`: what it is today, and what the measurements say."""

    name: str
    today: float
    measured: float

    def __str__(self) -> str:
        return f"{self.name}: {self.today:.4g} today, {self.measured:.4g} of this file"


def read(path: Path) -> tuple[str, list[Constant]]:
    """A sentence about the file, and its constants. UsageError for a file that the program did not write."""
    try:
        record = json.loads(path.read_text())
        arch, numbers = archs.get(record["arch"]), record["numbers"]
        found = _constants(arch, numbers)
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"{path} is no file of tools/measure_amd.py: {type(error).__name__}: {error}") from error
    how = "MODELLED by a dry run, nothing was measured" if record["modelled"] else "measured"
    return f"{arch.name}, {record['device']}: {how}", found


def _constants(arch: ArchSpec, numbers: Mapping[str, float]) -> list[Constant]:
    unit, loop = timing.UNITS[arch.name], numbers["empty loop, clocks"]
    least = _decode(arch, 21)
    launch_us = (numbers["decode of 21 keys, us"] - (least.us - least.launch_us)) * arch.clock_mhz / 2400
    share = numbers["combine, GB/s"] * 1e9 / arch.memory_bytes_per_s
    found = [Constant("launch_us", timing.CHIP.launch_us, launch_us)]
    found.append(Constant("memory_share", timing.CHIP.memory_share, share))
    if numbers["clock meanwhile, MHz"]:
        found.append(
            Constant("matrix_clock", timing.CHIP.matrix_clock, numbers["clock meanwhile, MHz"] / arch.clock_mhz)
        )
    per_key = (_decode(arch, 1024).us - _decode(arch, 512).us) * arch.clock_mhz / 512
    found.append(Constant("decode's clocks per key", per_key, numbers["decode in one workgroup, clocks per key"]))
    one = numbers["stream of 1 workgroups, bytes per clock"]
    latency = numbers["load from memory and a loop, clocks"] - loop
    scalar, barrier = (numbers[f"{what} and a loop, clocks"] - loop for what in ("scalar load", "barrier of 4 waves"))
    return [
        *found,
        Constant("memory_latency", unit.memory_latency, latency),
        Constant("memory_rate", unit.memory_rate, one),
        Constant("lds_rate", unit.lds_rate, numbers["LDS read, bytes per clock"] / 128),
        Constant("lds_direct", unit.lds_direct, numbers["load to LDS, bytes per clock"]),
        Constant("barrier", unit.barrier, barrier - unit.issue),
        Constant("branch", unit.branch, loop - 3 * unit.issue),
        Constant("scalar_latency", unit.scalar_latency, scalar),
    ]


def _decode(arch: ArchSpec, keys: int) -> ModelledTime:
    """What the model makes of decode with 128 heads in one workgroup."""
    args, kwargs = decode_sample([keys], heads=128, num_splits=1).make(torch.device("cpu"))
    with mla_suite.emulate(arch.name):
        _, time = emulator.modelled(lambda: mla_suite.decode(*args, **kwargs))
    assert time is not None
    return time
