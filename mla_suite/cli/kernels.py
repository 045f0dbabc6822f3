"""Print the manifest: what every built kernel costs, and which compiler made it.

  python -m mla_suite kernels --arch gfx942 --kernel append_kv

vgpr and agpr are registers of a lane, sgpr of a wave (NVIDIA: vgpr of a thread). waves/SIMD is the number of waves that
fit beside each other. matrix/token and LDS reads/token are instructions of the main loop for each KV token; loop is the
number of its instructions, code the kernel's bytes. Everything is read from the compiler's output; nothing is run.
"""

import argparse
import difflib
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mla_suite.build import KernelEntry, Manifest, ObjectError
from mla_suite.build.manifest import installed, read
from mla_suite.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="only this arch")
    parser.add_argument("--kernel", help="only instances whose id, or name in what `emulate` prints, contains this")
    parser.add_argument("--objects", type=Path, help="object folder; default: the one that is used")


def run(arguments: argparse.Namespace) -> int:
    try:
        manifest = read(arguments.objects) if arguments.objects else installed()
    except ObjectError as error:
        print(error, file=sys.stderr)
        return 1
    entries = [
        entry
        for key, entry in sorted(manifest.kernels.items())
        if (not arguments.arch or key[0] == arguments.arch)
        and (not arguments.kernel or any(arguments.kernel in name for name in (entry.id, entry.symbol)))
    ]
    if not entries:
        raise UsageError(_nothing(manifest, arguments.arch, arguments.kernel))
    console = Console(width=None if sys.stdout.isatty() else 240)  # a name on one line, for programs that search it
    for root in sorted({entry.root for entry in entries}):  # this user's kernels of tuned rows have a folder of theirs
        table = Table(title=str(root), caption="LDS: static + dynamic bytes; loop: static counts per turn")
        for name in ("arch", "kernel"):
            table.add_column(name, overflow="fold")
        for name in numbers(entries[0]):
            table.add_column(name, justify="right")
        for entry in entries:
            if entry.root == root:
                table.add_row(entry.arch, entry.id, *numbers(entry).values())
        console.print(table)
    for version in sorted({f"{entry.arch}: {entry.compiler}" for entry in entries}):
        console.print(version)
    return 0


def _nothing(manifest: Manifest, arch: str | None, kernel: str | None) -> str:
    """That no entry has the arch and the name, and what there is instead."""
    there = sorted({name for name, _ in manifest.kernels})
    if kernel is None or not there or (arch is not None and arch not in there):
        held = f"{manifest.root} holds kernels of {', '.join(there) or 'no arch'}"
        return f"nothing that was built is for {arch or 'any arch'}; {held}"
    names = {
        name for key, entry in manifest.kernels.items() if arch in (None, key[0]) for name in (entry.id, entry.kernel)
    }
    near = difflib.get_close_matches(kernel, sorted(names), n=3, cutoff=0.5)
    hint = f"; near it are {', '.join(near)}" if near else ""
    return f"nothing that was built for {arch or ' or '.join(there)} has {kernel!r} in its name{hint}"


def numbers(entry: KernelEntry) -> dict[str, str]:
    """The numeric cells of one row by their column; a dash where a number has no meaning."""
    loop = entry.loop

    def per_token(count: int) -> str:
        return f"{count / entry.tokens:.2f}" if entry.tokens else f"{count}/turn"

    return {
        "threads": str(entry.threads),
        "vgpr": str(entry.vgprs),
        "agpr": str(entry.agprs),
        "sgpr": str(entry.sgprs) if loop or entry.sgprs else "-",
        "LDS": f"{entry.lds}+{entry.dynamic_lds}",
        "spills": str(entry.spills),
        "waves/SIMD": str(entry.occupancy),
        "matrix/token": per_token(loop.matrix) if loop else "-",
        "LDS reads/token": per_token(loop.lds_reads) if loop else "-",
        "loop": str(loop.instructions) if loop else "-",
        "code": str(entry.code_bytes),
    }
