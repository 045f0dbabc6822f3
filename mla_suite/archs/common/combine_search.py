"""The search space of combine: every legal configuration of its kernel that was built."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from mla_suite.archs import ArchSpec
from mla_suite.archs.common import combine_config as configs
from mla_suite.archs.common.combine import OUT_TYPES
from mla_suite.archs.common.combine_config import ROW_COUNTS, VECS, CombineConfig
from mla_suite.core.tuning import SearchSpace, Value
from mla_suite.launch import has_kernel

WAVES = (1, 2, 4, 8, 16)
SLICES = (1, 2, 4, 8)


def candidates(problem: Any, arch: ArchSpec) -> Iterator[CombineConfig]:
    """Every legal point that was built for the arch."""
    for rows, vec, waves, slices in itertools.product(ROW_COUNTS, VECS, WAVES, SLICES):
        try:
            point = CombineConfig(arch, problem.head_dim_v, rows, vec, waves, slices)
        except ValueError:  # an illegal point explains itself; here it only is no candidate
            continue
        if has_kernel(arch, point.instance):
            yield point


def facts(problem: Any, arch: ArchSpec) -> Mapping[str, Value]:
    splits = problem.num_splits or -(-problem.splits // max(problem.batch, 1))
    return dict(
        head_dim_v=problem.head_dim_v,
        out_dtype=OUT_TYPES[problem.out_dtype][1],
        device_units=arch.compute_units,
        rows=problem.rows,
        batch=problem.batch,
        splits=splits,
    )


def cells(problem: Any, arch: ArchSpec, point: CombineConfig) -> Mapping[str, Value]:
    return dict(rows_per_group=point.rows, vec=point.vec, waves=point.waves, slices=point.slices)


SPACES = {"native": SearchSpace(candidates, configs.FORMAT, str, facts, cells)}
