"""Times that others published for the shapes of a set, beside ours: AITER pull request 3003 on an MI355X."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mla_suite.bench.record import Report

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


def rows(report: Report) -> Iterator[tuple[str, ...]]:
    """The cells of `HEADER` for each shape of a run that has published times.

    Ours is the fastest of our backends on a GPU; a shape that was not timed there has none, and no gain.
    """
    found: dict[tuple[int, int], list[float]] = {}
    for result in report.results:
        facts = result.facts
        same = result.op == "decode" and all(facts.get(name) == value for name, value in SHAPE.items())
        if same and "-p1-fp8" in result.shape and (facts["batch"], facts["kv_len"]) in pairs():
            times = found.setdefault((facts["batch"], facts["kv_len"]), [])
            if report.on_gpu and result.rounds and result.backend in ("native", "triton"):
                times.append(result.us)
    for (batch, ctx), times in found.items():
        asm_us, hk_us, _ = pairs()[batch, ctx]
        ours = (f"{min(times):.3f}", f"{100 * (1 - min(times) / asm_us):.2f}") if times else ("", "")
        yield str(batch), str(ctx), f"{asm_us:.3f}", f"{hk_us:.3f}", *ours


def as_csv(report: Report) -> str:
    """The table as CSV."""
    return "\n".join([",".join(HEADER), *map(",".join, rows(report))]) + "\n"
