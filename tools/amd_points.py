"""Published times of MLA kernels on AMD GPUs: benchmarks/published/amd-*.csv, read and checked.

Every point is somebody else's kernel on somebody else's card, as a thread or a commit prints it. Sources were divided
into those that a model may be fitted to and those held out before any model was fitted.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks" / "published"
PARTS = ("fit", "held_out")
TIMINGS = ("device", "host")
KINDS = ("dense 16-bit", "dense fp8", "sparse", "reduce")


@dataclass(frozen=True)
class Card:
    """One GPU model: its arch, compute units, highest clock in MHz, and memory rate of the data sheet in GB/s."""

    gpu: str
    arch: str
    compute_units: int
    clock_mhz: int
    memory_gb_per_s: int


@dataclass(frozen=True)
class Source:
    """Where points come from. `timing` is 'device' for kernels' own time or a graph's, 'host' where launches count."""

    name: str
    part: str
    timing: str
    url: str


@dataclass(frozen=True)
class Point:
    """One published time in microseconds.

    ctx     keys that a query attends; of a reduction 0, `batch` its tokens and `splits` its partial results
    splits  KV splits where the source prints them or its launcher's code says them, else 0
    """

    source: Source
    card: Card
    implementation: str
    kind: str
    q_dtype: str
    kv_dtype: str
    heads: int
    q_len: int
    batch: int
    ctx: int
    splits: int
    us: float

    def __str__(self) -> str:
        shape = f"B{self.batch} H{self.heads} q{self.q_len} kv{self.ctx}"
        return f"{self.source.name} {self.card.gpu} {self.implementation} {self.kv_dtype} {shape}"


def _rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))


def cards() -> dict[str, Card]:
    found = {}
    for row in _rows("amd-cards.csv"):
        sizes = (int(row[name]) for name in ("compute_units", "clock_mhz", "memory_gb_per_s"))
        found[row["gpu"]] = Card(row["gpu"], row["arch"], *sizes)
    return found


def sources() -> dict[str, Source]:
    return {row["source"]: Source(row["source"], row["part"], row["timing"], row["url"])
            for row in _rows("amd-sources.csv")}  # fmt: skip


def points() -> list[Point]:
    """All points, those of aiter-3003.csv among them. ValueError names the first row that cannot be one."""
    known, gpus = sources(), cards()
    found = []
    for row in _rows("amd-decode.csv"):
        heads, q_len, batch, ctx, splits = (
            int(row[name] or 0) for name in ("heads", "q_len", "batch", "ctx", "splits")
        )
        if row["source"] not in known or row["gpu"] not in gpus:
            raise ValueError(f"amd-decode.csv: {row}: the source or the GPU is in neither amd-sources nor amd-cards")
        found.append(
            Point(known[row["source"]], gpus[row["gpu"]], row["implementation"], row["kind"], row["q_dtype"],
                  row["kv_dtype"], heads, q_len, batch, ctx, splits, float(row["us"]))
        )  # fmt: skip
    first = known["aiter-3003-first"]
    for row in _rows("aiter-3003.csv"):
        for implementation, column in (("aiter-asm", "asm_us"), ("aiter-hk-h32-first", "hk_us")):
            found.append(
                Point(first, gpus["MI355X"], implementation, "dense fp8", "fp8", "fp8", 32, 4, int(row["batch"]),
                      int(row["ctx"]), 0, float(row[column]))
            )  # fmt: skip
    check(found)
    return found


def check(found: list[Point]) -> None:
    """ValueError for a point that appears twice, has an impossible number, or whose source says no part or timing."""
    for name, times in Counter((p.source.name, p.card.gpu, p.implementation, p.kind, p.kv_dtype, p.heads, p.q_len,
                                 p.batch, p.ctx, p.splits) for p in found).items():  # fmt: skip
        if times > 1:
            raise ValueError(f"the point {name} is there {times} times")
    for point in found:
        if point.source.part not in PARTS or point.source.timing not in TIMINGS or point.kind not in KINDS:
            raise ValueError(f"{point}: part, timing or kind is not one of {PARTS}, {TIMINGS}, {KINDS}")
        wrong = point.us <= 0 or min(point.heads, point.q_len, point.batch) < 1
        if wrong or (point.ctx == 0) != (point.kind == "reduce"):
            raise ValueError(f"{point}: {point.us} us with {point.splits} splits is no time of such a problem")
    unused = set(sources()) - {point.source.name for point in found}
    if unused:
        raise ValueError(f"no point comes from {', '.join(sorted(unused))}")
