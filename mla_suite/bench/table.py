"""A run as rows of text, for the console and the page alike. Other packages are columns beside our own backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mla_suite.bench import published
from mla_suite.bench.bounds import limiter
from mla_suite.bench.record import Comparison, Report, Result
from mla_suite.bench.third_party import THIRD_PARTIES

THIRD_PARTY_NAMES = tuple(package.name for package in THIRD_PARTIES)


class Table(NamedTuple):
    """`numeric` columns are set flush right. `marks` has a word per row: '', slower, faster, failed."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    marks: list[str]
    numeric: frozenset[int]


def times(report: Report, comparisons: Sequence[Comparison] = ()) -> Table:
    """One row per shape and own backend that was timed. The error is relative, against what is named beside it."""
    own = [result for result in report.results if result.rounds and result.backend not in THIRD_PARTY_NAMES]
    packages = [name for name in THIRD_PARTY_NAMES if any(r.backend == name and r.rounds for r in report.results)]
    judged: Mapping[tuple[str, str, str], Comparison] = {entry.new.key: entry for entry in comparisons}
    gpu = report.on_gpu
    columns: dict[str, Callable[[Result], str]] = {
        "operator": lambda r: r.op,
        "shape": lambda r: r.shape,
        "backend": lambda r: r.backend,
        "time us": lambda r: microseconds(r.us),
        "spread %": lambda r: f"{r.spread_percent:.1f}",
    }
    if judged:
        columns["change"] = lambda r: str(judged[r.key].verdict) if r.key in judged else "new"
    if gpu and any(result.sustained_us for result in own):
        columns["sustained us"] = lambda r: microseconds(r.sustained_us) if r.sustained_us else ""
    if gpu:
        columns["host us"] = lambda r: microseconds(r.host_us)
    columns["GB/s"] = lambda r: f"{r.gb_per_s:.0f}" if gpu else f"{r.gb_per_s:.1f}"
    columns["TFLOP/s"] = lambda r: teraflops(r.tflops)
    if report.floors:
        columns["floor us"] = lambda r: microseconds(r.floor_us)
        columns["x floor"] = lambda r: f"{r.over_floor:.2f}"
        columns["bound"] = lambda r: r.bound
    columns["error"] = _error
    for name in packages:
        columns |= _beside(name, {r.key[:2]: r.us for r in report.results if r.backend == name and r.rounds})
    rows = [tuple(cell(result) for cell in columns.values()) for result in own]
    verdicts = [judged[result.key].verdict.word if result.key in judged else "" for result in own]
    words = {"operator", "shape", "backend", "bound", "change", "error"}
    numeric = frozenset(index for index, name in enumerate(columns) if name not in words)
    title = "Device time of a call, cold caches" if gpu else "Time of a call on this CPU"
    return Table(title, tuple(columns), rows, ["" if word == "same" else word for word in verdicts], numeric)


def _beside(package: str, us: Mapping[tuple[str, str], float]) -> dict[str, Callable[[Result], str]]:
    """The columns of another package, whose times are given by operator and shape."""
    return {
        f"{package} us": lambda r: microseconds(us[r.key[:2]]) if r.key[:2] in us else "",
        f"x {package}": lambda r: f"{r.us / us[r.key[:2]]:.2f}" if r.key[:2] in us else "",
    }


def beside_published(report: Report) -> Table:
    """Ours beside the times of AITER pull request 3003, for the shapes that have some."""
    rows = list(published.rows(report))
    title = "As published for AITER on an MI355X (p50 of decode and reduce), and ours on this device"
    header = ("batch", "ctx", "ASM us", "HK us", "ours us", "gain %")
    return Table(title, header, rows, [""] * len(rows), frozenset(range(len(header))))


def counted(report: Report) -> Table:
    """Bounds from the emulator. They are clocks of a compute unit, and never become a time."""
    found = [result for result in report.results if result.counted]
    resources = list(found[0].counted) if found else []
    rows: list[tuple[str, ...]] = []
    for result in found:
        clocks = [f"{result.counted[name]:.0f}" for name in resources]
        rows.append((result.op, result.shape, result.backend, *clocks, limiter(result.counted), _error(result)))
    header = ("operator", "shape", "kernel", *resources, "highest", "error")
    numeric = frozenset(range(3, 3 + len(resources)))
    title = "Bounds counted in the emulator: clocks per compute unit, work spread evenly; not times"
    return Table(title, header, rows, [""] * len(rows), numeric)


def failures(results: Iterable[Result]) -> Table:
    """Tables each shape that was not timed, and why: wrong results first, then unsupported; equal reasons together."""
    grouped: dict[tuple[bool, str, str, str], list[str]] = {}
    for result in results:
        if result.failure:
            grouped.setdefault((not result.wrong, result.op, result.backend, result.failure), []).append(result.shape)
    rows: list[tuple[str, ...]] = []
    marks = []
    for (refused, op, backend, why), shapes in sorted(grouped.items()):
        some = shapes[0] if len(shapes) == 1 else f"{shapes[0]} and {len(shapes) - 1} more"
        rows.append((op, some, backend, why))
        marks.append("" if refused else "failed")
    return Table("Not timed", ("operator", "shape", "backend", "reason"), rows, marks, frozenset())


def microseconds(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def teraflops(tflops: float) -> str:
    return f"{tflops:.3f}" if tflops < 1 else f"{tflops:.1f}" if tflops < 100 else f"{tflops:.0f}"


def _error(result: Result) -> str:
    return "definition" if result.checked == "definition" else f"{result.error:.0e} {result.checked}"
