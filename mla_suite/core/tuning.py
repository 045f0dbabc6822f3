"""Tuned tables: which configuration was best for which shape, as CSV rows with their provenance.

A table is `ops/<op>/tuned/<arch>.csv`. A user's own is `<op>/<arch>.csv` in `MLA_SUITE_TUNED_DIR`, or in
`mla_suite/tuned` under the configuration directory, and its rows come before shipped ones. What a table of an operator
holds is declared by its `Format`. `find` takes the row of a shape, else the nearest in log space; an operator may read
its rows as limits instead, as decode does. Nothing here needs torch, so a build can read the configurations that tables
ask for.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_suite.archs import ArchSpec

MAX_BYTES = 1 << 20
MAX_ROWS = 4096
SHIPPED = Path(__file__).parent.parent / "ops"
_CELL = re.compile(r"[A-Za-z0-9 ._+:%()-]{0,100}")  # no separators of paths, no quotes, no control characters
_DATE = re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_DECIMAL = re.compile(r"(0|[1-9][0-9]{0,8})(\.[0-9]{1,3})?")

Value = int | str
PROVENANCE = {
    "measured": ("microseconds", "spread_percent", "device", "compute_units", "driver", "software", "date", "commit"),
    "published": ("microseconds", "device", "date", "source"),
    "counted": ("date", "commit"),
}
"""Kinds of row, with the provenance each must have. Counted rows come from the emulator and never carry a time."""

_PROVENANCE_COLUMNS = (
    "kind",
    "microseconds",
    "spread_percent",
    "baseline",  # the fastest other backend measured beside it, and its time
    "baseline_microseconds",
    "device",
    "compute_units",
    "driver",
    "software",
    "date",
    "commit",
    "source",
)


@dataclass(frozen=True)
class Integer:
    """A column of whole numbers, low and high included."""

    name: str
    low: int
    high: int

    def parse(self, text: str) -> int:
        if not re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) or not self.low <= int(text) <= self.high:
            raise ValueError(f"{self.name} is {text!r}; it takes an integer in {self.low}..{self.high}")
        return int(text)


@dataclass(frozen=True)
class Choice:
    """A column that takes one of a few words."""

    name: str
    words: tuple[str, ...]

    def parse(self, text: str) -> str:
        if text not in self.words:
            raise ValueError(f"{self.name} is {text!r}; it takes {', '.join(self.words)}")
        return text


Column = Integer | Choice


@dataclass(frozen=True, eq=False)
class Format:
    """The columns of one operator's tables.

    exact   columns a row must share with a problem to be used for it
    near    columns in which a row may differ: the nearest row is used
    config  columns with what a row decides
    refuse  (arch name, row's values by column) -> why this configuration cannot be built or run, or None
    timed   rows say how long a configuration took; else they are limits, and a published one needs no time
    """

    op: str
    exact: tuple[Column, ...]
    near: tuple[Integer, ...]
    config: tuple[Column, ...]
    refuse: Callable[[str, Mapping[str, Value]], str | None] = lambda arch, values: None
    timed: bool = True

    @property
    def keys(self) -> tuple[Column, ...]:
        return (*self.exact, *self.near)

    @property
    def header(self) -> tuple[str, ...]:
        """The first line of every table of the operator."""
        return (*(column.name for column in (*self.keys, *self.config)), *_PROVENANCE_COLUMNS)

    def line(self, cells: Mapping[str, object]) -> str:
        """One row as CSV text, as the tuner prints it; missing provenance is left empty."""
        return ",".join(str(cells.get(name, "")) for name in self.header)


@dataclass(frozen=True)
class Row:
    """A checked row: parsed key and configuration columns, provenance as text."""

    path: Path
    line: int
    values: Mapping[str, Value]
    provenance: Mapping[str, str]

    @property
    def position(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Match:
    """The row that decides a problem. `differing` are near columns whose values differ: name, asked, row's value."""

    row: Row
    differing: tuple[tuple[str, int, int], ...]

    def within(self, factor: int) -> bool:
        """Whether each of them is at most `factor` times the problem's, or a part of it as large."""
        return all(theirs <= factor * asked and asked <= factor * theirs for _, asked, theirs in self.differing)

    @property
    def reason(self) -> str:
        """For `explain`: file, line, kind, and how far away the row is."""
        kind = self.row.provenance["kind"]
        if not self.differing:
            return f"{kind} row {self.row.position}"
        differences = ", ".join(f"{name} {theirs} for {asked}" for name, asked, theirs in self.differing)
        return f"nearest {kind} row {self.row.position} ({differences})"


def find(form: Format, arch: str, key: Mapping[str, Value]) -> Match | None:
    """The row for a problem: exact first, else nearest by the sum of |log2| over the near columns, else None.

    key  a value for each key column; others are ignored. Among equally near rows a user's comes first.
    """
    exact, asked = _place(form, key)
    best, row = math.inf, None
    for logs, other in _groups(form, arch).get(exact, ()):
        distance = sum(map(abs, map(sub, logs, asked)))
        if distance < best:
            best, row = distance, other
    if row is None:
        return None
    near = [(column.name, int(key[column.name]), int(row.values[column.name])) for column in form.near]
    return Match(row, tuple([entry for entry in near if entry[1] != entry[2]]))


@lru_cache(maxsize=256)
def rows(form: Format, arch: str) -> tuple[Row, ...]:
    """All rows for an arch, a user's before shipped ones; a shipped row with the same key as a user's is left out.

    Read once, up to `clear_cache`. Raises ValueError with file and line for a table with anything wrong in it.
    """
    found: dict[tuple[Value, ...], Row] = {}
    for path in (user_directory() / form.op / f"{arch}.csv", SHIPPED / form.op / "tuned" / f"{arch}.csv"):
        if os.path.isfile(path):  # False, not an error, below a home that this user may not enter
            for row in load(form, arch, path):
                found.setdefault(_key(form, row.values), row)
    return tuple(found.values())


@lru_cache(maxsize=256)
def _groups(form: Format, arch: str) -> dict[tuple[Value, ...], list[tuple[list[float], Row]]]:
    """Values of the exact columns -> for each such row log2 of the near ones, and the row."""
    groups: dict[tuple[Value, ...], list[tuple[list[float], Row]]] = {}
    for row in rows(form, arch):
        exact, near = _place(form, row.values)
        groups.setdefault(exact, []).append((near, row))
    return groups


def _place(form: Format, values: Mapping[str, Value]) -> tuple[tuple[Value, ...], list[float]]:
    near = [math.log2(max(int(values[column.name]), 1)) for column in form.near]
    return tuple([values[column.name] for column in form.exact]), near


def clear_cache() -> None:
    """Read the tables, and where a user's own are, again at the next look-up."""
    rows.cache_clear()
    _groups.cache_clear()


def user_directory() -> Path:
    """Where a user's own tables are; it need not exist."""
    named = os.environ.get("MLA_SUITE_TUNED_DIR")
    if named:
        return Path(named)
    # The XDG base directory specification has relative values ignored. expanduser leaves an unknown home as "~"; then
    # there are no tables of a user's, since nothing is read from the working directory.
    named = os.environ.get("XDG_CONFIG_HOME", "")
    base = named if os.path.isabs(named) else os.path.expanduser("~/.config")
    return Path(base if os.path.isabs(base) else os.devnull) / "mla_suite" / "tuned"


def load(form: Format, arch: str, path: Path) -> tuple[Row, ...]:
    """The rows of one table; ValueError, with file and line, at the first thing `lint` would name."""
    checked: list[Row] = []
    for finding in _check(form, arch, path, path.read_bytes()):
        if isinstance(finding, str):
            raise ValueError(finding)
        checked.append(finding)
    return tuple(checked)


def lint(form: Format, arch: str, path: Path, data: bytes | None = None) -> tuple[str, ...]:
    """Everything wrong with a table, or with `data` in its place, each as `file:line: sentence`; empty if it is sound.

    Checked: size, header, number of cells, characters, ranges, legality of the configuration, provenance, no row slower
    than its baseline, rows sorted by key and unique.
    """
    found = _check(form, arch, path, path.read_bytes() if data is None else data)
    return tuple(finding for finding in found if isinstance(finding, str))


def _check(form: Format, arch: str, path: Path, data: bytes) -> Iterator[Row | str]:
    if len(data) > MAX_BYTES:
        yield f"{path}:1: {len(data)} bytes; a table has at most {MAX_BYTES}"
        return
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        yield f"{path}:1: byte {error.start} is not ASCII; a table holds plain text"
        return
    lines = text.splitlines()
    if not lines or lines[0] != ",".join(form.header):
        yield f"{path}:1: the header is {lines[0] if lines else ''!r}; it must be {','.join(form.header)!r}"
        return
    if len(lines) - 1 > MAX_ROWS:
        yield f"{path}:{MAX_ROWS + 2}: {len(lines) - 1} rows; a table has at most {MAX_ROWS}"
        return
    before: tuple[Value, ...] | None = None
    for number, line in enumerate(lines[1:], start=2):
        try:
            row = _parse(form, arch, path, number, line)
            key = _key(form, row.values)
            if before is not None and key == before:
                raise ValueError("this key is that of the row above; a shape has one row")
            if before is not None and key < before:
                raise ValueError("this key belongs above the row before it; rows are sorted by their key columns")
        except ValueError as error:
            yield f"{path}:{number}: {error}"
            continue
        before = key
        yield row


def _key(form: Format, values: Mapping[str, Value]) -> tuple[Value, ...]:
    return tuple(values[column.name] for column in form.keys)


def _parse(form: Format, arch: str, path: Path, number: int, line: str) -> Row:
    cells = line.split(",")  # no quoting: no cell may hold a comma or a quote
    if len(cells) != len(form.header):
        raise ValueError(f"{len(cells)} cells; the header has {len(form.header)}")
    for name, cell in zip(form.header, cells, strict=True):
        if not _CELL.fullmatch(cell):
            raise ValueError(f"{name} is {cell!r}; a cell has at most 100 of letters, digits, space and ._+:%()-")
    texts = dict(zip(form.header, cells, strict=True))
    values = {column.name: column.parse(texts[column.name]) for column in (*form.keys, *form.config)}
    provenance = {name: texts[name] for name in _PROVENANCE_COLUMNS}
    _check_provenance(provenance, form.timed)
    reason = form.refuse(arch, values)
    if reason is not None:
        raise ValueError(f"this configuration is not legal on {arch}: {reason}")
    return Row(path, number, values, provenance)


def _check_provenance(cells: Mapping[str, str], timed: bool) -> None:
    kind = cells["kind"]
    if kind not in PROVENANCE:
        raise ValueError(f"kind is {kind!r}; it takes {', '.join(PROVENANCE)}")
    missing = [name for name in PROVENANCE[kind] if not cells[name] and (timed or name != "microseconds")]
    if missing:
        raise ValueError(f"a {kind} row needs {', '.join(missing)}")
    if kind == "counted" and (cells["microseconds"] or cells["baseline_microseconds"]):
        raise ValueError("a counted row has a time; counters give bounds, never microseconds")
    patterns = {"date": _DATE, "commit": _COMMIT, "microseconds": _DECIMAL, "spread_percent": _DECIMAL}
    patterns |= {"baseline_microseconds": _DECIMAL, "compute_units": re.compile(r"[1-9][0-9]{0,4}")}
    for name, pattern in patterns.items():
        if cells[name] and not pattern.fullmatch(cells[name]):
            raise ValueError(f"{name} is {cells[name]!r}; it must look like {pattern.pattern}")
    if bool(cells["baseline"]) != bool(cells["baseline_microseconds"]):
        raise ValueError("baseline and baseline_microseconds come together or not at all")
    if cells["baseline"] and float(cells["microseconds"]) > float(cells["baseline_microseconds"]):
        times = f"{cells['microseconds']} us against {cells['baseline_microseconds']} us"
        raise ValueError(f"the row loses to {cells['baseline']} ({times}); leave the shape to it")


@dataclass(frozen=True)
class SearchSpace:
    """The configurations of an operator's kernels that a tuner may try, and the table that keeps the best.

    candidates  (problem, arch) -> configurations that are legal there; each is given to the native backend's `run`
    form        schema of its tables, one for each arch
    key         (problem, arch) -> values of the table's key columns
    cells       (problem, arch, configuration) -> values of its configuration columns
    build       (arch, progress) -> number of kernels compiled for a search, beyond those that ship
    plans       whether its tables decide calls with a plan too
    leaves      another backend's name -> values of the configuration columns that leave a shape to it; None where the
                table cannot
    """

    candidates: Callable[[Any, ArchSpec], Iterable[Any]]
    form: Format
    key: Callable[[Any, ArchSpec], Mapping[str, Value]]
    cells: Callable[[Any, ArchSpec, Any], Mapping[str, Value]]
    build: Callable[[ArchSpec, Callable[[int, int], None]], int] = lambda arch, progress: 0
    plans: bool = True
    leaves: Callable[[str], Mapping[str, Value] | None] = lambda backend: None
