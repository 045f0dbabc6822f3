"""The search space of decode's native kernels: tiles of query rows, and shapes that are left to Triton.

Rows of its table are limits on batch and context (`decode_table`), so that a search over a grid of shapes gives
crossovers: each row decides down to the next smaller batch and context of the grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mla_suite import archs
from mla_suite.archs import ArchSpec, decode_table
from mla_suite.archs.cdna import CdnaKernels
from mla_suite.archs.decode_table import FORMAT, TILES
from mla_suite.core.tuning import SearchSpace, Value
from mla_suite.launch import has_kernel


def candidates(problem: Any, arch: ArchSpec) -> Iterator[Any]:
    """Every tile of the table's whose kernel was built, each kernel once; archs with one tile have none to search."""
    kernels = archs.kernels(arch)
    if not isinstance(kernels, CdnaKernels):
        return
    seen = set()
    for most in TILES.values():
        config = kernels.decode_config(problem, most)
        if config.instance not in seen and has_kernel(arch, config.instance):
            seen.add(config.instance)
            yield config


def key(problem: Any, arch: ArchSpec) -> Mapping[str, Value]:
    return dict(
        policy="default",
        shape=decode_table.ANY,
        query=decode_table.width(problem.q_dtype),
        cache=decode_table.width(problem.kv_format),
        rows=problem.heads * problem.q_len,
        batch=problem.batch,
        context=problem.context,
    )


def cells(problem: Any, arch: ArchSpec, config: Any) -> Mapping[str, Value]:
    """The smallest tile of the table's that gives this kernel."""
    kernels = archs.kernels(arch)
    assert isinstance(kernels, CdnaKernels)
    use = next(name for name, most in TILES.items() if kernels.decode_config(problem, most).instance == config.instance)
    return dict(use=use)


def leaves(backend: str) -> Mapping[str, Value] | None:
    return dict(use=decode_table.TRITON) if backend == decode_table.TRITON else None


SPACE = SearchSpace(candidates, FORMAT, key, cells, plans=False, leaves=leaves)
