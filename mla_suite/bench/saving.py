"""Prints results, and puts them into files so that nothing can lose what was measured."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mla_suite.build import locations
from mla_suite.errors import UsageError


def write_whole(path: Path, text: str) -> None:
    """Put `text` at `path`: a crash, a full disk or Ctrl-C leaves the old file or the whole new one, never a part.

    A pipe or a terminal has nothing to keep and is written as it is, and so is a file in a folder of somebody else's,
    where no second file can be made. ValueError, in a sentence, when it cannot be written.
    """
    try:
        target = path.resolve()  # a link stays one
        target.parent.mkdir(parents=True, exist_ok=True)
        if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
            target.write_text(text, encoding="utf-8")
        else:
            locations.write_atomically(target, text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def require_writable(path: Path) -> None:
    """UsageError where `write_whole` cannot write the file: asked before a run whose numbers would be lost."""
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if path.is_dir() or not os.access(nearest, os.W_OK) or not (nearest == path or nearest.is_dir()):
        raise UsageError(f"{path} cannot be written; name a file in a folder of yours")


class Table:
    """Rows of a run, printed as they come, and kept in a CSV file that is written again, whole, with every row: an
    interrupted run leaves those before it.

    path   None: nothing is written. UsageError at once for one that cannot be
    about  facts of the run, which stand before the rows as lines `# name: value`
    shown  columns that are printed, under their names; none: nothing is
    """

    def __init__(self, path: Path | None, about: Mapping[str, object] = {}, *, shown: Sequence[str] = ()) -> None:
        self._path, self.about, self._rows = path, dict(about), list[Mapping[str, object]]()
        self._widths = {name: max(len(name), 8) for name in shown}
        if path is not None:
            require_writable(path)

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row; the columns are those of all rows, in the order in which they came. Floats get 5 digits."""
        self._rows.append(row)
        if self._widths:
            self._print(row)
        if self._path is None:
            return
        text = io.StringIO()
        text.writelines(f"# {name}: {value}\n" for name, value in self.about.items())
        columns = list(dict.fromkeys(name for each in self._rows for name in each))
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        for each in self._rows:
            writer.writerow({k: f"{value:.5g}" if isinstance(value, float) else value for k, value in each.items()})
        write_whole(self._path, text.getvalue())

    def _print(self, row: Mapping[str, object]) -> None:
        cells = {name: _short(row.get(name, "")) for name in self._widths}
        self._widths = {name: max(width, len(cells[name])) for name, width in self._widths.items()}
        lines = [self._widths, cells.values()] if len(self._rows) == 1 else [cells.values()]
        for line in lines:
            print(*(cell.rjust(width) for cell, width in zip(line, self._widths.values(), strict=True)), flush=True)


def _short(value: object) -> str:
    """A number with 4 digits, or with all that it has before the point."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
