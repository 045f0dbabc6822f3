"""Print which implementation serves each operator on each arch, as the Markdown table of the README.

native is a kernel of this repository for that arch, triton is Triton, reference is the fp32 definition in torch. The
cells are dispatch's own answers, as if every declared kernel were built. An arch whose record is wrong has no column; a
sentence below the table says what is wrong with it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from mla_suite import archs, launch
from mla_suite.bench import saving
from mla_suite.core import dispatch, explain
from mla_suite.core.register import registry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the table between a file's support markers")


def run(args: argparse.Namespace) -> int:
    made, bad = table()
    if args.write is None:
        print(made)
    else:
        saving.write_section(args.write, "support", made)
    if find_spec("triton") is None:
        print(
            "support: triton is not installed here, so no cell says triton; torch's builds for GPUs bring it",
            file=sys.stderr,
        )
    for sentence in bad:
        print(f"support: {sentence}", file=sys.stderr)
    return 1 if bad else 0


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
    """The implementation that serves an operator on an arch once its kernels are built: native, triton or reference."""
    with as_if_built():
        return explain.serving(op, archs.get(arch), "cuda")


def answers() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """(arch -> operator -> backend on its GPU, arch -> sentence for a record that is wrong)."""
    good, bad = archs.specs()
    with as_if_built():
        found = {name: {op: explain.serving(op, spec, "cuda") for op in registry()} for name, spec in good.items()}
    return found, bad


def table() -> tuple[str, list[str]]:
    """(the support table as Markdown, a sentence for each arch whose record is wrong)."""
    columns, bad = answers()
    lines = ["| operator | " + " | ".join(columns) + " | other GPUs | CPU |", "|---" * (len(columns) + 3) + "|"]
    for op in registry():
        cells = [column[op] for column in columns.values()]
        cells += [explain.serving(op, None, "cuda"), explain.serving(op, None, "cpu")]
        lines.append(f"| {op} | " + " | ".join(cells) + " |")
    return "\n".join(lines), list(bad.values())
