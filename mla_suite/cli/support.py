"""Print which implementation serves each operator on each arch, as the Markdown table of the README.

native = a kernel of this repository for that arch, triton = Triton, reference = the fp32 definition in torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mla_suite.cli import marked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the table between a file's support markers")


def run(args: argparse.Namespace) -> int:
    if args.write is None:
        print(table())
        return 0
    marked.write(args.write, "support", table())
    return 0


def serving(op: str, arch: str) -> str:
    """The implementation that serves an operator on an arch: native, triton or reference."""
    from mla_suite.build.instances import instances
    from mla_suite.core import register

    backends = {backend.name for backend in register.get(op).backends}
    if "native" in backends and any(instance.kernel == op for instance in instances(arch)):
        return "native"
    return "triton" if "triton" in backends else "reference"


def table() -> str:
    """The support table, derived from the operators' backends and the kernels that each arch declares."""
    from mla_suite import archs as arch
    from mla_suite.core import register

    columns = arch.names()
    lines = ["| operator | " + " | ".join(columns) + " | other GPUs | CPU |", "|---" * (len(columns) + 3) + "|"]
    for op in register.registry().values():
        other = "triton" if any(backend.name == "triton" for backend in op.backends) else "reference"
        cells = [serving(op.name, name) for name in columns]
        lines.append(f"| {op.name} | " + " | ".join([*cells, other, "reference"]) + " |")
    return "\n".join(lines)
