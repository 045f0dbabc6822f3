"""What may be tuned about combine: the point of its kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from mla_suite.core.arch import Arch
from mla_suite.core.space import Space
from mla_suite.core.tuning import Value
from mla_suite.launch import has_kernel
from mla_suite.ops.combine import config as configs
from mla_suite.ops.combine.config import ROWS, VECS, Config
from mla_suite.ops.combine.native import OUT_TYPES

WAVES = (1, 2, 4, 8, 16)
SLICES = (1, 2, 4, 8)


def candidates(problem: Any, arch: Arch) -> Iterator[Config]:
    """Every legal point that was built for the arch."""
    for rows, vec, waves, slices in itertools.product(ROWS, VECS, WAVES, SLICES):
        try:
            point = Config(arch, problem.head_dim_v, rows, vec, waves, slices)
        except ValueError:  # an illegal point explains itself; here it only is no candidate
            continue
        if has_kernel(arch, point.instance):
            yield point


def facts(problem: Any, arch: Arch) -> Mapping[str, Value]:
    splits = problem.num_splits or -(-problem.splits // max(problem.batch, 1))
    return dict(
        head_dim_v=problem.head_dim_v,
        out_dtype=OUT_TYPES[problem.out_dtype][1],
        device_units=arch.compute_units,
        rows=problem.rows,
        batch=problem.batch,
        splits=splits,
    )


def cells(problem: Any, arch: Arch, point: Config) -> Mapping[str, Value]:
    """The point; decode's split count stays what tables say now, since timing combine alone says nothing about it."""
    now = configs.split_count(
        arch, problem.head_dim_v, OUT_TYPES[problem.out_dtype][1], rows=problem.rows, batch=problem.batch
    )
    return dict(rows_per_group=point.rows, vec=point.vec, waves=point.waves, slices=point.slices, num_splits=now)


SPACES = {"native": Space(candidates, configs.FORMAT, str, facts, cells)}
