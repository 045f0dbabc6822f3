"""Print which implementation serves each operator on each arch, as the Markdown table of the README.

native = a kernel of this repository for that arch, portable = Triton, reference = the fp32 definition in torch.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

MARKED = re.compile(r"(<!-- support:begin.*?-->\n).*?(<!-- support:end -->)", re.S)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the table between a file's support markers")


def run(args: argparse.Namespace) -> int:
    if args.write is None:
        print(table())
        return 0
    text, replaced = MARKED.subn(lambda marks: f"{marks[1]}{table()}\n{marks[2]}", args.write.read_text())
    if not replaced:
        raise SystemExit(f"{args.write} has no <!-- support:begin --> and <!-- support:end --> lines to write between")
    args.write.write_text(text)
    return 0


def table() -> str:
    """The support table, derived from the operators' backends and the kernels that each arch declares."""
    from mla_suite.core import arch, library
    from mla_suite.toolchain.instances import instances

    columns = arch.names()
    built = {name: {instance.kernel for instance in instances(name)} for name in columns}
    lines = ["| operator | " + " | ".join(columns) + " | other GPUs | CPU |", "|---" * (len(columns) + 3) + "|"]
    for op in library.registry().values():
        backends = {backend.name for backend in op.backends}
        other = "portable" if "portable" in backends else "reference"
        cells = ["native" if "native" in backends and op.name in built[name] else other for name in columns]
        lines.append(f"| {op.name} | " + " | ".join([*cells, other, "reference"]) + " |")
    return "\n".join(lines)
