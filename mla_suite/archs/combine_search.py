"""The search space of combine: legal configurations of its kernel that were built, or are built for the search."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from mla_suite.archs import ArchSpec
from mla_suite.archs import combine as configs
from mla_suite.archs.combine import FIXED_SPLITS, ROW_COUNTS, VECS, CombineConfig
from mla_suite.build.builder import build_tuned
from mla_suite.build.instances import instance
from mla_suite.core import tuning
from mla_suite.core.tuning import SearchSpace, Value
from mla_suite.launch import has_kernel
from mla_suite.ops.combine import Problem

WAVES = (1, 2, 4, 8, 16)
SLICES = (1, 2, 4, 8)
TRIED_VECS = (1, 2, 4)
# With these every number of rows and every vector is legal. NVIDIA's kernels let warps share a row's splits where a
# block has one row, and have a warp for each row else.
TRIED_WAVES = {"amd": (8,), "nvidia": (2, 4, 8)}


def candidates(problem: Problem, arch: ArchSpec) -> Iterator[CombineConfig]:
    """Every legal point that was built for the arch and takes the problem."""
    for point in _legal(arch, problem.head_dim_v, VECS, WAVES, SLICES):
        if point.fixed_splits in (0, problem.uniform_splits) and has_kernel(arch, point.instance):
            yield point


def _legal(
    arch: ArchSpec, head_dim_v: int, vecs: Sequence[int], waves: Sequence[int], slices: Sequence[int]
) -> Iterator[CombineConfig]:
    for rows, vec, wave, slice_count, fixed in itertools.product(ROW_COUNTS, vecs, waves, slices, FIXED_SPLITS):
        try:
            yield CombineConfig(arch, head_dim_v, rows, vec, wave, slice_count, fixed)
        except ValueError:  # an illegal point explains itself; here it only is no candidate
            continue


def build(arch: ArchSpec, progress: Callable[[int, int], None] | None = None) -> int:
    """Compile what a search tries beyond what is built, for rows of 512: rows x vectors x splits compiled in or not.

    Returns how many were compiled, into this user's cache. BuildError where there is no compiler.
    """
    return build_points(arch, _legal(arch, 512, TRIED_VECS, TRIED_WAVES[arch.vendor], (1,)), progress)


def build_points(
    arch: ArchSpec, points: Iterable[CombineConfig], progress: Callable[[int, int], None] | None = None
) -> int:
    return build_tuned([instance(arch.name, "combine", point.constants) for point in points], progress=progress)


def build_named(arch: ArchSpec, progress: Callable[[int, int], None] | None = None) -> int:
    """Compile what tuned tables name, this user's included, and what is not built; returns how many."""
    points = [configs.config_of_row(arch, row.values) for row in tuning.rows(configs.FORMAT, arch.name)]
    return build_points(arch, {point.instance: point for point in points}.values(), progress)


def cells(problem: Problem, arch: ArchSpec, point: CombineConfig) -> Mapping[str, Value]:
    found = dict(rows_per_group=point.rows, vec=point.vec, waves=point.waves, slices=point.slices)
    return found | {"fixed_splits": point.fixed_splits}


SPACE = SearchSpace(candidates, configs.FORMAT, configs.table_key, cells, build)
