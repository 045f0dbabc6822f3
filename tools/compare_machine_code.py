"""Compares the machine code of two folders of built kernels, to distinguish a change of words from one of code.

    python tools/compare_machine_code.py OLD_OBJECTS NEW_OBJECTS [--arch sm_90] [--renamed OLD=NEW ...]

OLD_OBJECTS and NEW_OBJECTS are folders that `python -m mla_suite build` filled (`<arch>/<instance>.{cubin,hsaco}`).
Each object is an ELF file. Its code sections, constant banks and kernel descriptors are compared byte for byte; names,
line tables, notes and paths are not. `--renamed` replaces a part of an old instance's name where the new one is called
something else; the first old text that occurs is replaced, each option in turn. Prints one line for each object that
differs or has no counterpart, then a summary. Exit status: 0 when nothing differs, 1 when something does, 2 for
arguments that cannot be used.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mla_suite.build import BuildError
from mla_suite.build.report import elf_sections

# Instructions, then what instructions read (constants, module-level data), then what a launch sets up by: the kernel
# descriptors of AMD lie in .rodata, registers and shared memory of a cubin in the sections' headers (see `sections`).
COMPARED = (".text", ".nv.constant", ".nv.global", ".nv.shared", ".rodata", ".data", ".bss")
LAUNCH_PARAMETERS = ".nv.constant0"  # holds zeros of the parameters' size, which is worth comparing, too
SUFFIXES = (".cubin", ".hsaco")


def sections(data: bytes) -> dict[str, tuple[bytes, ...]]:
    """The compared sections of an ELF file by kind (a name up to the kernel's), each with its size and info word.

    Sections of one kind are listed in sorted order, for a file may hold several. BuildError for other files.
    """
    found: dict[str, list[bytes]] = {}
    for section in elf_sections(data):
        prefix = next((prefix for prefix in COMPARED if section.name.startswith(prefix)), None)
        if prefix is None:
            continue
        key = LAUNCH_PARAMETERS if section.name.startswith(LAUNCH_PARAMETERS) else prefix
        # A cubin's text header holds the register count in the top byte of `info` (below it a symbol's number) and the
        # number of barriers in the flags.
        head = struct.pack("<QQI", section.size, section.flags, section.info >> 24 if prefix == ".text" else 0)
        found.setdefault(key, []).append(head + section.body)
    return {key: tuple(sorted(bodies)) for key, bodies in found.items()}


def objects(folder: Path, archs: Sequence[str]) -> dict[str, Path]:
    """`<arch>/<instance>` of every object under `folder`, of all archs or of those named."""
    found = (path for path in sorted(folder.glob("*/*")) if path.suffix in SUFFIXES)
    return {f"{path.parent.name}/{path.stem}": path for path in found if not archs or path.parent.name in archs}


def renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """An old instance's name as the new folder has it."""
    for old, new in pairs:
        name = name.replace(old, new, 1)
    return name


def differences(old: Mapping[str, Path], new: Mapping[str, Path], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """One line for each object whose machine code differs, or that only one side has."""
    expected = {renamed(name, pairs): path for name, path in old.items()}
    lines = [f"{name}: only in the old folder" for name in sorted(expected.keys() - new.keys())]
    lines += [f"{name}: only in the new folder" for name in sorted(new.keys() - expected.keys())]
    for name in sorted(expected.keys() & new.keys()):
        before, after = (sections(path.read_bytes()) for path in (expected[name], new[name]))
        if not any(body for key, body in before.items() if key == ".text"):
            raise BuildError(f"{expected[name]}: it holds no code")
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        if changed:
            sizes = (sum(map(len, side.get(".text", ()))) for side in (before, after))
            lines.append(f"{name}: {', '.join(changed)} differ ({' -> '.join(map(str, sizes))} bytes of code)")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path, help="folder of objects built before the change")
    parser.add_argument("new", type=Path, help="folder of objects built after it")
    parser.add_argument("--arch", action="append", default=[], help="compare this arch alone; may be repeated")
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW", help="part of an instance's name")
    options = parser.parse_args(arguments)
    pairs = [tuple(item.split("=", 1)) for item in options.renamed]
    if any(len(pair) != 2 or not pair[0] for pair in pairs):
        parser.error(f"--renamed takes OLD=NEW with OLD not empty; given: {' '.join(options.renamed)}")
    old, new = objects(options.old, options.arch), objects(options.new, options.arch)
    for folder, found in ((options.old, old), (options.new, new)):
        if not found:
            parser.error(f"{folder} holds no objects ({', '.join(SUFFIXES)}) of {options.arch or 'any arch'}")
    lines = differences(old, new, [(pair[0], pair[1]) for pair in pairs])
    print("\n".join([*lines, f"{len(lines)} of {len(old)} objects differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
