"""Which implementation serves an operator on an arch once its kernels are built, as dispatch answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mla_suite import archs, launch
from mla_suite.core import dispatch, explain
from mla_suite.core.register import registry


@contextmanager
def as_if_built() -> Iterator[None]:
    """Within the block dispatch answers as if every declared kernel were built."""
    with launch.declared_kernels():
        dispatch.clear_caches()
        try:
            yield
        finally:
            dispatch.clear_caches()


def serving(op: str, arch: str) -> str:
    """The implementation that serves an operator on an arch: native, triton or reference."""
    with as_if_built():
        return explain.serving(op, archs.get(arch), "cuda")


def answers() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """(arch -> operator -> backend on its GPU, arch -> sentence for a record that is wrong)."""
    good, bad = archs.specs()
    with as_if_built():
        found = {name: {op: explain.serving(op, spec, "cuda") for op in registry()} for name, spec in good.items()}
    return found, bad
