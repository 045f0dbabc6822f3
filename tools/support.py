"""Print which implementation serves each operator on each arch, as the Markdown table of the README.

  python tools/support.py
  python tools/support.py --write README.md     replaces the table there

native is a kernel of this repository for that arch, triton is Triton, reference is the fp32 definition in torch. The
cells are dispatch's own answers, as if every declared kernel were built. An arch whose record is wrong has no column; a
sentence below the table says what is wrong with it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mla_suite.bench import saving
from mla_suite.cli.serving import answers
from mla_suite.core import explain
from mla_suite.core.register import registry
from mla_suite.errors import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the table between a file's support markers")
    args = parser.parse_args(argv)
    made, bad = table()
    if args.write is None:
        print(made)
    else:
        try:
            write_section(args.write, "support", made)
        except UsageError as error:
            parser.error(str(error))
    if find_spec("triton") is None:
        print(
            "support: triton is not installed here, so no cell says triton; torch's builds for GPUs bring it",
            file=sys.stderr,
        )
    for sentence in bad:
        print(f"support: {sentence}", file=sys.stderr)
    return 1 if bad else 0


def table() -> tuple[str, list[str]]:
    """(the support table as Markdown, a sentence for each arch whose record is wrong)."""
    columns, bad = answers()
    lines = ["| operator | " + " | ".join(columns) + " | other GPUs | CPU |", "|---" * (len(columns) + 3) + "|"]
    for op in registry():
        cells = [column[op] for column in columns.values()]
        cells += [explain.serving(op, None, "cuda"), explain.serving(op, None, "cpu")]
        lines.append(f"| {op} | " + " | ".join(cells) + " |")
    return "\n".join(lines), list(bad.values())


def section(text: str, name: str) -> str | None:
    """Returns the text between `<!-- name:begin ... -->` and `<!-- name:end -->`; None where they are not there."""
    found = _pattern(name).search(text)
    return found[2] if found else None


def write_section(path: Path, name: str, made: str) -> None:
    """Replace the section of a file. ValueError when the file cannot be read or written, or has no such section."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} cannot be read: it is no text in UTF-8") from error
    written, replaced = _pattern(name).subn(lambda found: f"{found[1]}{made}\n{found[3]}", text)
    if not replaced:
        raise UsageError(f"{path} has no <!-- {name}:begin --> and <!-- {name}:end --> lines to write between")
    saving.write_whole(path, written)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}:begin.*?-->\n)(.*?)(<!-- {name}:end -->)", re.S)


if __name__ == "__main__":
    sys.exit(main())
