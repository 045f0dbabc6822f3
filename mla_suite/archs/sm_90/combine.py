"""Combine on sm_90: beside the kernel that every arch has, one for plans and one that runs while decode does."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.common import combine
from mla_suite.archs.common import combine_config as configs
from mla_suite.archs.common.combine_config import CombineConfig

PLANNED_GROUPS = 4  # workgroups for each compute unit, that walk the splits of a plan
RESIDENT = 4224  # waves of a whole H200; the compiled kernel takes from it how many splits are many
MAX_STREAMED_ROWS = 16  # rows that neighbouring compute units fill for streaming (csrc/sm_90/combine/PERF.md)
STREAMING_POINTS = ((4, 8), (2, 8), (1, 8), (1, 4))  # slices, waves
MAX_STREAMED_SPLITS = 128  # splits of a sequence: each has a lane that keeps its weight


@dataclass(frozen=True)
class PersistentCombineConfig:
    """The one instance of csrc/common/persistent_combine.hpp, for rows that can be read and written 16 bytes at a time.

    Its workgroups stay and walk what the plan split, so that there are few of them however many rows there are.
    """

    arch: ArchSpec = field(repr=False)
    head_dim_v: int

    vec = 4
    waves = 8
    slices = 2  # of a row that a workgroup merges

    @property
    def instance(self) -> str:
        return f"persistent_combine_dv-{self.head_dim_v}_waves-{self.waves}_slices-{self.slices}_resident-{RESIDENT}"

    @property
    def threads(self) -> int:
        return self.waves * self.arch.wavefront

    def grid(self, rows: int) -> int:
        """Workgroups for `rows` rows over the whole batch, were all of them split."""
        return min(rows * self.slices, PLANNED_GROUPS * self.arch.compute_units)


@dataclass(frozen=True)
class StreamingCombineConfig:
    """An instance of csrc/sm_90/combine/streaming_combine.cu, for rows read and written 16 bytes at a time.

    It merges partials word by word while decode stores them; `slices` workgroups share the columns of a row, of which
    decode stores `runs` at the same time.
    """

    arch: ArchSpec = field(repr=False)
    head_dim_v: int
    slices: int
    waves: int
    runs: int

    vec = 4

    @property
    def instance(self) -> str:
        return f"streaming_combine_dv-{self.head_dim_v}_waves-{self.waves}_slices-{self.slices}_runs-{self.runs}"

    @property
    def threads(self) -> int:
        return self.waves * self.arch.wavefront

    @property
    def resident(self) -> int:
        """Workgroups that a compute unit has room for."""
        return 4 * self.arch.simds // self.waves

    def grid(self, rows: int) -> int:
        """Workgroups for `rows` rows over the whole batch."""
        return rows * self.slices


def persistent(arch: ArchSpec, head_dim_v: int, rows: int, batch: int) -> PersistentCombineConfig | None:
    """The configuration for a plan, where any other would need more workgroups than the device holds at once, most of
    them for nothing; else None."""
    if head_dim_v != 512:
        return None
    every_row = configs.rule(arch, head_dim_v, rows * batch, 2)
    fits = every_row.grid(rows * batch) <= every_row.resident * arch.compute_units
    return None if fits else PersistentCombineConfig(arch, head_dim_v)


def streaming(
    arch: ArchSpec, head_dim_v: int, rows: int, batch: int, splits: int, busy: int, runs: int
) -> StreamingCombineConfig | None:
    """The configuration that combines `splits` of each sequence of `rows` rows while decode, on `busy` compute units,
    goes on; None if there is none.

    All its workgroups must find room beside decode. Decode stores `runs` of a row at the same time: 2 where a block has
    whole rows, 4 where two blocks share them. Not for more than MAX_STREAMED_ROWS whole rows of neighbouring units:
    they share one way to memory, which then takes longer to fill the sentinels than a kernel takes to end.
    """
    if head_dim_v != 512 or splits > MAX_STREAMED_SPLITS:
        return None
    if busy > arch.compute_units // 2 and 2 * rows > MAX_STREAMED_ROWS and runs == 2:
        return None
    points = (StreamingCombineConfig(arch, head_dim_v, *point, runs) for point in STREAMING_POINTS)
    return next((p for p in points if p.grid(rows * batch) <= p.resident * (arch.compute_units - busy)), None)


def config_for(
    arch: ArchSpec,
    head_dim_v: int,
    out_dtype: torch.dtype,
    rows: int,
    batch: int,
    splits: int,
    fixed: bool,
    planned: bool,
) -> CombineConfig | PersistentCombineConfig:
    """The kernel that combines `splits` per sequence of `rows` rows, or those of a plan; `fixed` asks for the one that
    does not depend on the batch."""
    if planned and not fixed:
        for_plan = persistent(arch, head_dim_v, rows, batch)
        if for_plan is not None:
            return for_plan
        splits *= 2  # the longest sequence of a plan has more splits than the mean, and its combine ends last
    return combine.config_for(arch, head_dim_v, out_dtype, rows, batch, splits, fixed)
