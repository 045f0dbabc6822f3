"""Check AMD machine code for wait states that the ISA leaves to the program.

  python tools/check_hazards.py                                            every AMD object that was built
  python tools/check_hazards.py --kernel decode_fp8                        those whose id contains this
  python tools/check_hazards.py --arch gfx950 --disassembly kernel.s ...   any assembly, or a listing of a disassembler

A listing is what `llvm-objdump -d` writes: an instruction per line, its address and code behind `//`. The last line
says how many texts were checked and how many findings there are; the exit status is 1 if there are any. Each finding
names both instructions, the wait states found and required, and the section of AMD's manual that asks for them.
"""

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from hazards.check import sentences
from hazards.table import ARCHS

Text = tuple[str, str, str]
"""Where it is from, the text, and its arch."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=ARCHS, help="only this arch; the arch of the files given with --disassembly")
    parser.add_argument("--kernel", help="only instances whose id contains this")
    parser.add_argument("--objects", type=Path, help="object folder; default: the one that is used")
    parser.add_argument("--disassembly", type=Path, nargs="+", metavar="FILE", help="texts to check instead of objects")
    arguments = parser.parse_args(argv)
    if arguments.disassembly and (arguments.kernel or arguments.objects):
        parser.error("--disassembly names the texts themselves: leave --kernel and --objects out")
    if arguments.disassembly and arguments.arch is None:
        parser.error("--disassembly needs --arch, gfx942 or gfx950: the texts do not say for which they are")
    try:
        named = [(str(path), path.read_text("utf-8"), arguments.arch) for path in arguments.disassembly or ()]
        texts = named or _built(arguments)
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"a text cannot be read: {error}")
    except RuntimeError as error:
        parser.error(str(error))
    if not texts:
        parser.error("no AMD kernel of that arch and name was built")
    processes = min(os.cpu_count() or 1, len(texts))
    # A process takes neighbours, whose instructions are mostly the same, and makes no cycles for a collector to find.
    with ProcessPoolExecutor(processes, initializer=gc.disable) as pool:
        each_text = partial(pool.map, chunksize=-(-len(texts) // (2 * processes))) if processes > 1 else map
        found = [sentence for each in each_text(sentences, *zip(*texts, strict=True)) for sentence in each]
    print(*found, f"{len(texts)} texts checked, {len(found)} findings", sep="\n")
    return 1 if found else 0


def _built(arguments: argparse.Namespace) -> list[Text]:
    """The texts of built objects; ObjectError, a RuntimeError, where they may not be used."""
    from mla_suite.build.manifest import installed, read  # a build that runs this program has not installed it yet

    manifest = read(arguments.objects) if arguments.objects else installed()
    return [
        (f"{arch} {name}", entry.read_text(), arch)
        for (arch, name), entry in sorted(manifest.kernels.items())
        if entry.text and arguments.arch in (None, arch) and (arguments.kernel or "") in name
    ]


if __name__ == "__main__":
    sys.exit(main())
