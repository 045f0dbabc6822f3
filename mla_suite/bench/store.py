"""Writes rows into tuned tables: the shipped one where it may be written, else the user's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mla_suite.bench import saving
from mla_suite.core import dispatch, tuning
from mla_suite.core.tuning import Format
from mla_suite.errors import UsageError


def path_for(form: Format, table: str, *, user: bool) -> Path:
    """The file to write: the user's when asked for, or when the package's folder cannot be written."""
    shipped = tuning.SHIPPED / form.op / "tuned"
    nearest = shipped if shipped.is_dir() else shipped.parent
    if user or not os.access(nearest, os.W_OK):
        return tuning.user_directory() / form.op / f"{table}.csv"
    return shipped / f"{table}.csv"


def merged(form: Format, table: str, path: Path, rows: Sequence[Mapping[str, object]]) -> str:
    """The table's text with these rows in it, each in place of one with the same key. ValueError for unsound ones."""
    lines: dict[tuple[tuning.Value, ...], str] = {}
    if path.is_file():
        tuning.load(form, table, path)  # a damaged table is reported, never overwritten
        for text in path.read_text(encoding="ascii").splitlines()[1:]:
            lines[_key(form, dict(zip(form.header, text.split(","), strict=True)))] = text
    for row in rows:
        made = line(form, row)
        lines[_key(form, dict(zip(form.header, made.split(","), strict=True)))] = made
    return "\n".join((",".join(form.header), *(lines[key] for key in sorted(lines)))) + "\n"


def write(form: Format, table: str, path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Merge the rows into the table and check the result before it replaces the file; then forget what was read.

    ValueError, and the file as it was, for unsound rows and where it cannot be written.
    """
    text = merged(form, table, path, rows)
    wrong = tuning.lint(form, table, path, text.encode())
    if wrong:
        raise UsageError("; ".join(wrong))
    saving.write_whole(path, text)
    tuning.clear_cache()
    dispatch.clear_caches()


def line(form: Format, row: Mapping[str, object]) -> str:
    """One row as its table holds it."""
    return form.line({name: _cell(value) for name, value in row.items()})


def _key(form: Format, cells: Mapping[str, str]) -> tuple[tuning.Value, ...]:
    return tuple(column.parse(cells[column.name]) for column in form.keys)


def _cell(value: object) -> str:
    """As text that a table may hold: what names of devices and versions have beyond that becomes a space."""
    return re.sub(r"[^A-Za-z0-9 ._+:%()-]", " ", str(value)).strip()[:100]
