"""Combine on sm_90: beside the kernel that every arch has, one for plans and one that runs while decode does."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property

from mla_suite.archs import ArchSpec, combine
from mla_suite.archs.combine import CombineConfig, CombineKernel
from mla_suite.build.instances import instance_id
from mla_suite.launch.spec import LaunchSpec
from mla_suite.ops.combine import Problem

PLANNED_GROUPS = 4  # workgroups for each compute unit, that walk the splits of a plan
RESIDENT = 4224  # waves of a whole H200; the compiled kernel takes from it how many splits are many
MAX_STREAMED_ROWS = 16  # rows that neighbouring compute units fill for streaming (csrc/sm_90/combine/PERF.md)
STREAMING_POINTS = ((4, 8), (2, 8), (1, 8), (1, 4))  # slices, waves
MOST_WAIT_SECONDS = 4000  # 32 bits of the kernel count them in units of 1,024 ns
MAX_STREAMED_SPLITS = 128  # splits of a sequence: each has a lane that keeps its weight


@dataclass(frozen=True)
class WholeRowsConfig(CombineKernel):
    """The configuration of a kernel for rows that are read and written 16 bytes at a time: see `resident`, `persistent`
    and `streamed`.

    kernel  its name, and `more` what else its instance's name says
    slices  workgroups that share the columns of a row
    most    workgroups at most
    """

    arch: ArchSpec = field(repr=False)
    head_dim_v: int
    kernel: str
    waves: int
    slices: int
    most: int
    more: str = ""

    vec = 4

    @property
    def instance(self) -> str:
        return f"{self.kernel}_dv-{self.head_dim_v}_waves-{self.waves}{self.more}"

    @property
    def resident(self) -> int:
        """Workgroups that a compute unit has room for, of a kernel that runs beside decode."""
        return 4 * self.arch.simds // self.waves

    def grid(self, rows: int) -> int:
        return min(rows * self.slices, self.most)


def resident(arch: ArchSpec, head_dim_v: int, merges: bool) -> WholeRowsConfig:
    """csrc/sm_90/combine/resident_combine.hpp, whose workgroups, one per compute unit, go through the sequences that
    the plan split. Where decode `merges` rows itself there are fewer, because those that find nothing to do are then
    gone before decode ends."""
    units = arch.compute_units
    return WholeRowsConfig(arch, head_dim_v, "resident_combine", 16, 1, max(1, units * 3 // 4) if merges else units)


def persistent(arch: ArchSpec, head_dim_v: int) -> WholeRowsConfig:
    """csrc/common/persistent_combine.hpp: as `resident`, with few workgroups however many rows there are."""
    more = f"_slices-2_resident-{RESIDENT}"
    return WholeRowsConfig(arch, head_dim_v, "persistent_combine", 8, 2, PLANNED_GROUPS * arch.compute_units, more)


def streamed(arch: ArchSpec, head_dim_v: int, slices: int, waves: int, runs: int) -> WholeRowsConfig:
    """csrc/sm_90/combine/streaming_combine.cu, which merges partials word by word while decode stores them, `runs` of a
    row at the same time."""
    more = f"_slices-{slices}_runs-{runs}"
    return WholeRowsConfig(arch, head_dim_v, "streaming_combine", waves, slices, combine.MAX_ROWS, more)


class FoldCombineConfig(CombineConfig):
    """An instance of csrc/sm_90/combine/fold_combine.hpp, for rows read and written 16 bytes at a time.

    It merges as CombineConfig's instance does in batch-invariant mode, but for partials that it folds to nodes first.
    """

    @cached_property
    def instance(self) -> str:
        return f"fold_{instance_id('combine', self.constants)}"


def for_plan(problem: Problem, arch: ArchSpec, merges: bool) -> WholeRowsConfig | None:
    """The configuration for a plan; None for other widths, and for so few rows that several waves share one.

    `merges` says that decode merges some rows itself. The persistent combine serves more rows than the device has room
    for at once: it has been measured there, the other has not (csrc/sm_90/plan/PERF.md, R13).
    """
    if problem.head_dim_v != 512:
        return None
    rows = problem.rows * problem.batch
    every_row = combine.rule(arch, problem.head_dim_v, rows, 2)
    if every_row.parts > 1:
        return None
    if every_row.grid(rows) > every_row.resident * arch.compute_units:
        return persistent(arch, problem.head_dim_v)
    return resident(arch, problem.head_dim_v, merges)


def streaming(problem: Problem, arch: ArchSpec, busy: int, runs: int) -> WholeRowsConfig | None:
    """The configuration that combines while decode, on `busy` compute units, goes on; None if there is none.

    All its workgroups must find room beside decode. Decode stores `runs` of a row at the same time: 2 where a block has
    whole rows, 4 where two blocks share them. Not for more than MAX_STREAMED_ROWS whole rows of neighbouring units:
    they share one way to memory, which then takes longer to fill the sentinels than a kernel takes to end.
    """
    if problem.head_dim_v != 512 or problem.mean_splits > MAX_STREAMED_SPLITS:
        return None
    if busy > arch.compute_units // 2 and 2 * problem.rows > MAX_STREAMED_ROWS and runs == 2:
        return None
    rows, free = problem.rows * problem.batch, arch.compute_units - busy
    points = (streamed(arch, problem.head_dim_v, *point, runs) for point in STREAMING_POINTS)
    return next((point for point in points if point.grid(rows) <= point.resident * free), None)


def bounded(launch: LaunchSpec) -> LaunchSpec:
    """The launch of a streaming combine, whose waits for decode end in a trap after MLA_SUITE_WAIT_SECONDS: 20 where it
    is not set, 0 for none. They travel as `workgroups`, which such a kernel has no other use for."""
    given = os.environ.get("MLA_SUITE_WAIT_SECONDS") or "20"
    if not given.isdecimal() or int(given) > MOST_WAIT_SECONDS:
        most = f"a whole number of seconds up to {MOST_WAIT_SECONDS}, or 0 for no limit"
        raise ValueError(f"MLA_SUITE_WAIT_SECONDS={given}: it is {most}")
    return launch._replace(numbers={**launch.numbers, "workgroups": int(given)})


def of_states(launch: LaunchSpec, rows: int) -> LaunchSpec:
    """The launch of a combine whose partials are states of folds (csrc/sm_90/decode/node_state.hpp)."""
    strides = {"partial_lse_split_stride": 2 * rows, "partial_lse_row_stride": 2}
    return launch._replace(numbers={**launch.numbers, **strides})


def config_for(
    problem: Problem, arch: ArchSpec, *, fixed: bool, planned: bool, merges: bool = False, folds: bool = False
) -> CombineKernel:
    """The kernel for partials that an attention kernel leaves, with a plan if `planned`; `fixed` asks for the one that
    does not depend on the batch, and folds partials to nodes if `folds`; `merges` says that a decode with a plan merges
    some rows itself."""
    if fixed and folds:
        merge = combine.invariant(arch, problem.head_dim_v, problem.rows * problem.batch)
        return FoldCombineConfig(arch, problem.head_dim_v, merge.rows, merge.vec, merge.waves, merge.slices)
    if planned and not fixed:
        chosen = for_plan(problem, arch, merges)
        if chosen is not None:
            return chosen
        # The longest sequence of a plan has more splits than the mean, and its combine ends last.
        problem = problem._replace(splits=2 * problem.batch * problem.mean_splits)
    return combine.config_for(problem, arch, fixed)
