"""Times that others published for the shapes of a set, beside ours: AITER pull request 3003 on an MI355X."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mla_suite.bench.record import Report, Result

FILE = Path(__file__).parent / "published" / "aiter-3003.csv"
SHAPE = {"heads": 32, "q_len": 4}
"""The problem of the published times, in fp8 with pages of 1; the pull request names no others."""
HEADER = ("batch", "ctx", "asm_us", "hk_us", "ours_us", "gain_percent")


class Pair(NamedTuple):
    """Published microseconds of one shape, decode and reduce: AITER's assembly kernel and its HipKittens kernel."""

    asm_us: float
    hk_us: float
    source: str


@cache
def pairs() -> dict[tuple[int, int], Pair]:
    """By batch and context."""
    with FILE.open(newline="") as file:
        return {
            (int(row["batch"]), int(row["ctx"])): Pair(float(row["asm_us"]), float(row["hk_us"]), row["source"])
            for row in csv.DictReader(file)
        }


def of(result: Result) -> Pair | None:
    """The published times of a result's problem; None where there are none."""
    facts = result.facts
    same = result.op == "decode" and all(facts.get(name) == value for name, value in SHAPE.items())
    if not same or "-p1-fp8" not in result.shape:
        return None
    return pairs().get((facts["batch"], facts["kv_len"]))


class Row(NamedTuple):
    """One shape: microseconds, 0 for ours where it was not timed, and by how much ours is below the assembly kernel."""

    batch: int
    ctx: int
    asm_us: float
    hk_us: float
    ours_us: float

    @property
    def gain_percent(self) -> float | None:
        return 100 * (1 - self.ours_us / self.asm_us) if self.ours_us else None

    @property
    def cells(self) -> tuple[str, ...]:
        gain = "" if self.gain_percent is None else f"{self.gain_percent:.2f}"
        ours = f"{self.ours_us:.3f}" if self.ours_us else ""
        return str(self.batch), str(self.ctx), f"{self.asm_us:.3f}", f"{self.hk_us:.3f}", ours, gain


def rows(report: Report) -> Iterator[Row]:
    """The shapes of a run that have published times; ours is the fastest of our backends on a GPU."""
    found: dict[tuple[int, int], list[Result]] = {}
    for result in report.results:
        if of(result) is not None:
            found.setdefault((result.facts["batch"], result.facts["kv_len"]), []).append(result)
    for shape, results in found.items():
        own = [r.us for r in results if report.on_gpu and r.rounds and r.backend in ("native", "triton")]
        pair = pairs()[shape]
        yield Row(*shape, pair.asm_us, pair.hk_us, min(own, default=0.0))


def as_csv(report: Report) -> str:
    """The table as CSV."""
    return "\n".join([",".join(HEADER), *(",".join(row.cells) for row in rows(report))]) + "\n"
