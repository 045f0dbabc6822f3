"""Check AMD machine code for wait states that the ISA leaves to the program.

  python -m mla_suite hazards                                            every AMD object that was built
  python -m mla_suite hazards --kernel decode_fp8                        those whose id contains this
  python -m mla_suite hazards --arch gfx950 --disassembly kernel.s ...   any assembly, or a listing of a disassembler

A listing is what `llvm-objdump -d` writes: an instruction per line, its address and code behind `//`. The last line
says how many texts were checked and how many findings there are; the exit status is 1 if there are any. Each finding
names both instructions, the wait states found and required, and the section of AMD's manual that asks for them.
"""

import argparse
import sys
from pathlib import Path

from mla_suite.build import ObjectError, hazards
from mla_suite.build.manifest import installed, read
from mla_suite.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="only this arch; the arch of the files given with --disassembly")
    parser.add_argument("--kernel", help="only instances whose id contains this")
    parser.add_argument("--objects", type=Path, help="object folder; default: the one that is used")
    parser.add_argument("--disassembly", type=Path, nargs="+", metavar="FILE", help="texts to check instead of objects")


def run(arguments: argparse.Namespace) -> int:
    if arguments.disassembly:
        if arguments.kernel or arguments.objects:
            raise UsageError("--disassembly names the texts themselves: leave --kernel and --objects out")
        if arguments.arch is None:
            raise UsageError("--disassembly needs --arch, gfx942 or gfx950: the texts do not say for which they are")
        texts = []
        for path in arguments.disassembly:
            try:
                texts.append((str(path), arguments.arch, path.read_text(encoding="utf-8")))
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{path} cannot be read: {error}") from error
    else:
        try:
            manifest = read(arguments.objects) if arguments.objects else installed()
            texts = [
                (f"{arch} {name}", arch, entry.read_text())
                for (arch, name), entry in sorted(manifest.kernels.items())
                if entry.text and arguments.arch in (None, arch) and (arguments.kernel or "") in name
            ]
        except ObjectError as error:
            print(error, file=sys.stderr)
            return 1
        if not texts:
            raise UsageError(f"{manifest.root} holds no AMD kernel of that arch and name")
    count = 0
    for where, arch, text in texts:
        for sentence in hazards.sentences(where, text, arch):
            print(sentence)
            count += 1
    print(f"{len(texts)} texts checked, {count} findings")
    return 1 if count else 0
