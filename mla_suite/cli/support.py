"""Print which implementation serves each operator on each arch, as the Markdown table of the README.

native = a kernel of this repository for that arch, triton = Triton, reference = the fp32 definition in torch. The cells
are dispatch's own answers, every declared kernel taken as built. An arch whose record is wrong has no column: below the
table, a sentence says what is wrong with it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mla_suite.bench import saving


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the table between a file's support markers")


def run(args: argparse.Namespace) -> int:
    made, bad = table()
    if args.write is None:
        print(made)
    else:
        saving.write_section(args.write, "support", made)
    for sentence in bad:
        print(f"support: {sentence}", file=sys.stderr)
    return 1 if bad else 0


def serving(op: str, arch: str) -> str:
    """The implementation that serves an operator on an arch once its kernels are built: native, triton or reference."""
    from mla_suite import archs, launch
    from mla_suite.core import dispatch, explain

    with launch.declared_kernels():
        dispatch.clear_caches()
        answer = explain.serving(op, archs.get(arch), "cuda")
    dispatch.clear_caches()
    return answer


def table() -> tuple[str, list[str]]:
    """(the support table as Markdown, a sentence for each arch whose record is wrong)."""
    from mla_suite import launch
    from mla_suite.core import explain, register

    columns, bad = explain.support_table(launch.declared_kernels)
    lines = ["| operator | " + " | ".join(columns) + " | other GPUs | CPU |", "|---" * (len(columns) + 3) + "|"]
    for op in register.registry():
        cells = [answers[op] for answers in columns.values()]
        cells += [explain.serving(op, None, "cuda"), explain.serving(op, None, "cpu")]
        lines.append(f"| {op} | " + " | ".join(cells) + " |")
    return "\n".join(lines), list(bad.values())
