"""Our decode in the model of time, beside the published and the modelled times of other kernels on AMD GPUs.

    python tools/compare_amd_peers.py                  the summary of benchmarks/results/modelled/decode.csv
    python tools/compare_amd_peers.py --write          model our kernels again (10 minutes), and write file and page
    python tools/compare_amd_peers.py --source aiter-3003-first --batch 1,16        the rows of a source, on the screen

Nothing here was measured by us, and none of our kernels has run on an AMD GPU. `published` is somebody else's time of
somebody else's kernel, from benchmarks/published; `peer` is what the model makes of that kernel's geometry
(amd_peers.py); `ours` is what it makes of the instructions that our kernels execute in the emulator
(modelled_decode.py). docs/amd_time_model.md says how far the model is from published times, and that none of these
is one of our kernels'.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import amd_points
import support
from amd_peers import predict
from amd_points import Point
from fit_amd_time import PAGE
from modelled_decode import Problem, modelled

from mla_suite.bench.saving import Table
from mla_suite.cli import bar, sizes

FILE = Path(__file__).parent.parent / "benchmarks" / "results" / "modelled" / "decode.csv"
CARDS = {"MI300X": "gfx942", "MI355X": "gfx950"}
"""The cards whose compute units, clocks and memory are those of our records of their archs."""
ASKED = (("MI300X", "aiter-asm", "bf16", 128, 1, 128, 4096),)
"""Problems without a published time: card, implementation, type of queries and cache, heads, q_len, batch, keys."""


class Row(NamedTuple):
    """One published kernel on one problem; times in microseconds, `published` 0 where nobody printed one."""

    source: str
    gpu: str
    implementation: str
    queries: str
    cache: str
    heads: int
    q_len: int
    batch: int
    keys: int
    published: float
    peer: float
    ours: float
    bound: str


UNKNOWN = ("tokenspeed-gluon",)
"""Implementations of whose geometry nothing is known here."""
KINDS: dict[str, Any] = {
    **dict.fromkeys(("heads", "q_len", "batch", "keys"), int),
    **dict.fromkeys(("published", "peer", "ours"), float),
}


def chosen(sources: Sequence[str] = (), batches: Sequence[int] = ()) -> list[Point]:
    """The published points of dense decode on `CARDS` by kernels of `amd_peers`, and the problems of `ASKED`."""
    found = [p for p in amd_points.points() if p.kind.startswith("dense") and p.card.gpu in CARDS]
    found = [p for p in found if p.implementation not in UNKNOWN]
    known = amd_points.cards()
    source = amd_points.Source("asked", "held_out", "device", "")
    for gpu, implementation, dtype, heads, q_len, batch, keys in ASKED:
        kind = "dense fp8" if dtype == "fp8" else "dense 16-bit"
        problem = dtype, dtype, heads, q_len, batch, keys
        found.append(Point(source, known[gpu], implementation, kind, *problem, splits=0, us=0.0))
    return [p for p in found if (not sources or p.source.name in sources) and (not batches or p.batch in batches)]


@cache
def ours(gpu: str, problem: Problem) -> tuple[float, str]:
    """Our modelled microseconds and their class; several kernels share a problem."""
    found = modelled(CARDS[gpu], problem)
    return round(found.us, 2), found.bound


def rows(points: Sequence[Point]) -> Iterator[Row]:
    """A row for each point."""
    with bar("modelling", len(points)) as advance:
        for point in points:
            advance(description=str(point), advance=1)
            yield row_of(point)


def row_of(point: Point) -> Row:
    problem = Problem(point.batch, point.heads, point.q_len, point.ctx, point.kv_dtype, point.q_dtype, page=1)
    names = point.source.name, point.card.gpu, point.implementation, point.q_dtype, point.kv_dtype
    sizes = point.heads, point.q_len, point.batch, point.ctx
    return Row(*names, *sizes, point.us, round(predict(point).us, 2), *ours(point.card.gpu, problem))


def stored() -> list[Row]:
    """The rows of `FILE`."""
    with FILE.open(newline="") as file:
        return [Row(**{name: KINDS.get(name, str)(text) for name, text in row.items()}) for row in csv.DictReader(file)]


def summary(found: Iterable[Row]) -> list[str]:
    """A Markdown table: per source and kernel the geometric means of our modelled time over its two times."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row.source, row.gpu, row.implementation, row.cache), []).append(row)
    lines = ["| source | GPU | kernel | cache | rows | over its modelled time; worst | over the published; worst |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (source, gpu, kernel, cached), group in groups.items():
        cells = [_ratios([row.ours / row.peer for row in group])]
        cells.append(_ratios([row.ours / row.published for row in group if row.published]))
        lines.append(f"| {source} | {gpu} | {kernel} | {cached} | {len(group)} | {' | '.join(cells)} |")
    return lines


def _ratios(found: Sequence[float]) -> str:
    return f"{geometric_mean(found):.2f}; {max(found):.2f}" if found else "-"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="model every row, and write the file and the page")
    parser.add_argument("--source", action="append", default=[], metavar="NAME", help="rows of this source alone")
    parser.add_argument("--batch", type=sizes, default=(), metavar="N,N", help="rows of these batch sizes alone")
    given = parser.parse_args(arguments)
    if given.write and (given.source or given.batch):
        parser.error("--write models every row; leave out --source and --batch")
    if not (given.write or given.source or given.batch):
        print("\n".join(summary(stored())))
        return 0
    points = chosen(given.source, given.batch)
    if not points:
        known = ", ".join(sorted({point.source.name for point in chosen()}))
        parser.error(f"no such rows; the sources are {known}")
    table, found = Table(FILE) if given.write else Table(None, shown=Row._fields), list[Row]()
    for row in rows(points):
        table.add(row._asdict())
        found.append(row)
    if given.write:
        support.write_section(PAGE, "comparison", "\n".join(summary(found)))
    print("\n".join(summary(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
