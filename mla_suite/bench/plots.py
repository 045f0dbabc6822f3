"""Plots of a run as inline SVG, by matplotlib: latency over context, roofline, ratio to a package or an older run."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_suite.bench.record import Comparison, Report, Result
from mla_suite.bench.table import THIRD_PARTY_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#a61e4d", "#5c940d", "#364fc7", "#e67700")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)))
VERDICTS = {"slower": "#c92a2a", "faster": "#2b8a3e", "same": "#868e96"}
MAX_NAMES = 5
MAX_KERNELS = 16

Drawn = tuple[str, str, str]
"""Name, caption and SVG of a figure."""


def svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element. `name` keeps its ids apart from those of other figures on a page."""
    import matplotlib

    target = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    # The page sets the width; the viewBox keeps the proportions.
    return re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"(?=[^>]*>)', r"\1", text, count=1)


def latency(report: Report) -> Iterator[Drawn]:
    """One figure per operator, query length and head count: colour is the batch, line and marker the backend."""
    measured = [r for r in report.results if r.rounds and "kv_len" in r.facts]

    def family(result: Result) -> tuple[str, int, int]:
        return result.op, result.facts["heads"], result.facts["q_len"]

    for (op, heads, q_len), group in groupby(sorted(measured, key=family), family):
        lines: dict[tuple[str, int, str], list[Result]] = {}
        for r in group:
            lines.setdefault((r.backend, r.facts["batch"], "ragged" if "-kv~" in r.shape else ""), []).append(r)
        if max(len(points) for points in lines.values()) < 2:
            continue  # a context alone is in the table and under the roofline
        batches, backends = (sorted({key[at] for key in lines}, key=_own_first) for at in (1, 0))
        figure, axes = _figure()
        for (backend, batch, variant), points in sorted(lines.items()):
            points.sort(key=lambda r: r.facts["kv_len"])
            contexts = [r.facts["kv_len"] for r in points]
            colour = COLOURS[batches.index(batch) % len(COLOURS)]
            index = backends.index(backend)
            axes.plot(contexts, [r.us for r in points], color=colour, marker=MARKERS[index % len(MARKERS)],
                      linestyle=LINES[index % len(LINES)], markersize=5 if not variant else 8,
                      markerfacecolor=colour if not variant else "none")  # fmt: skip
            if all(r.floor_us for r in points) and backend == backends[0] and not variant:
                axes.plot(contexts, [r.floor_us for r in points], color=colour, linestyle=":", linewidth=1)
        _log_axes(axes, base=2)
        axes.set_xlabel("context (keys per query token)" if op == "sparse_decode" else "context (keys per sequence)")
        axes.set_ylabel("time of a call (µs)")
        axes.set_title(f"{op}: {heads} heads, {q_len} query token{'s' if q_len > 1 else ''}")
        keys: list[tuple[str, str, str, Any]] = [
            (f"batch {batch}", COLOURS[at % len(COLOURS)], "", "-") for at, batch in enumerate(batches)
        ]
        keys += [(str(name), "#495057", MARKERS[at % len(MARKERS)], LINES[at % len(LINES)])
                 for at, name in enumerate(backends)]  # fmt: skip
        keys += [("floor", "#495057", "", ":")] if report.floors else []
        _legend(axes, keys)
        notes = " Dotted: floor measured in the same run." if report.floors else ""
        notes += " Hollow: ragged lengths, at their mean." if any(key[2] for key in lines) else ""
        name = f"latency-{op}-h{heads}-q{q_len}"
        yield name, f"Latency over context, {op}, {heads} heads, q_len {q_len}.{notes}", svg(figure, name)


def roofline(report: Report) -> Iterator[Drawn]:
    """Achieved rate of every shape over its arithmetic intensity, under the ceilings measured in the run."""
    measured = [r for r in report.results if r.rounds and r.flops and r.bytes]
    if not measured:
        return
    figure, axes = _figure()
    kinds = sorted({(r.op, r.backend) for r in measured}, key=lambda kind: (kind[1] in THIRD_PARTY_NAMES, kind))
    for index, (op, backend) in enumerate(kinds):
        own = [r for r in measured if (r.op, r.backend) == (op, backend)]
        axes.scatter(
            [r.flops / r.bytes for r in own],
            [r.tflops for r in own],
            s=26,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            alpha=0.8,
            label=f"{op}, {backend}",
        )
    if report.floors:
        low, high = (f(r.flops / r.bytes for r in measured) for f in (min, max))
        xs = [low / 2 * (4 * high / low) ** (step / 100) for step in range(101)]
        bandwidth, peak = report.floors.gb_per_s, report.floors.tflops
        axes.plot(xs, [min(x * bandwidth / 1e3, peak) for x in xs], color="#333", linewidth=1.2,
                  label=f"ceilings: {bandwidth:.0f} GB/s, {peak:.0f} TFLOP/s")  # fmt: skip
        if fp8 := report.floors.fp8_tflops:
            axes.plot(xs, [min(x * bandwidth / 1e3, fp8) for x in xs], color="#333", linewidth=1.0, linestyle="--",
                      label=f"with fp8 queries and keys: {fp8:.0f} TFLOP/s")  # fmt: skip
    _log_axes(axes)
    axes.set_xlabel("arithmetic intensity (FLOP per byte of device memory)")
    axes.set_ylabel("achieved rate (TFLOP/s)")
    axes.set_title("Roofline: every shape")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ceilings = "measured in the same run" if report.floors else "not measured: no GPU"
    yield "roofline", f"Roofline per shape; ceilings {ceilings}.", svg(figure, "roofline")


def counted(report: Report) -> Iterator[Drawn]:
    """Yields a plot of the emulator's counts: per kernel and shape the least clocks of a compute unit, by resource."""
    found = [r for r in report.results if r.counted][:MAX_KERNELS]
    if not found:
        return
    figure, axes = _figure(height=max(4.4, 1 + 0.45 * len(found)))
    resources = list(found[0].counted)
    height = 0.8 / len(resources)
    for index, resource in enumerate(resources):
        places = [at + (index - (len(resources) - 1) / 2) * height for at in range(len(found))]
        clocks = [r.counted[resource] for r in found]
        axes.barh(places, clocks, height=height, color=COLOURS[index % len(COLOURS)], label=resource)
    axes.set_yticks(range(len(found)), [f"{r.op} {r.shape}\n{r.backend}" for r in found], fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xlabel("least clocks of a compute unit (a bound, not a time)")
    axes.set_ylabel("kernel and shape")
    axes.set_title("Bounds counted in the emulator")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    yield "counted", "Bounds of emulated kernels by resource, work spread evenly over the chip.", svg(figure, "counted")


def ratios(report: Report, comparisons: Sequence[Comparison]) -> Iterator[Drawn]:
    """Time over that of the older run, and over that of each package: a point per shape, over how long it takes."""
    if comparisons:
        points = [Point(c.new, 1 + c.verdict.change, c.old.us, c.verdict.allowed, c.verdict.word) for c in comparisons]
        yield _ratio("ratio-old", "the older run", points)
    by_key = {r.key: r for r in report.results if r.rounds}
    for package in THIRD_PARTY_NAMES:
        others = [
            (r, by_key.get((r.op, r.shape, package))) for r in by_key.values() if r.backend not in THIRD_PARTY_NAMES
        ]
        points = [Point(r, r.us / other.us, other.us, 0.0, r.backend) for r, other in others if other]
        if points:
            yield _ratio(f"ratio-{package}", package, points)


class Point(NamedTuple):
    """A shape: its ratio over the other's time, what noise explains, and the word it is grouped and coloured by."""

    result: Result
    ratio: float
    us: float
    noise: float
    group: str


def _ratio(name: str, other: str, points: Sequence[Point]) -> Drawn:
    figure, axes = _figure()
    axes.axhline(1.0, color="#333", linewidth=1)
    groups = sorted({point.group for point in points}, key=_own_first)
    for index, group in enumerate(groups):
        own = [point for point in points if point.group == group]
        colour = VERDICTS.get(group, COLOURS[index % len(COLOURS)])
        axes.errorbar([p.us for p in own], [p.ratio for p in own], yerr=[p.noise for p in own], linestyle="none",
                      marker=MARKERS[index % len(MARKERS)], markersize=5, elinewidth=0.6, ecolor="#ced4da",
                      color=colour, label=f"{group} ({len(own)})")  # fmt: skip
    # The slowest are named, unless noise explains them; the table has the rest.
    worst = sorted((p for p in points if p.group not in ("same", "faster")), key=lambda p: p.ratio, reverse=True)
    for place, point in enumerate(worst[:MAX_NAMES]):
        axes.annotate(f"{point.result.op} {point.result.shape}", (point.us, point.ratio), fontsize=6.5, color="#495057",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                      xytext=(0.99, 0.98 - 0.045 * place), textcoords="axes fraction", ha="right", va="top",
                      arrowprops={"arrowstyle": "-", "color": "#ced4da", "linewidth": 0.6})  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, at: f"{value:g}")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.35 * (high - low))  # room for the names
    axes.set_xlabel(f"time of {other} (µs)")
    axes.set_ylabel(f"time / time of {other} (1 = equal)")
    axes.set_title(f"Ratio to {other}")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    noise = " Whiskers: what noise explains." if any(point.noise for point in points) else ""
    return name, f"Ratio to {other}, a point per shape; less is faster.{noise}", svg(figure, name)


def _own_first(name: str | int) -> tuple[bool, str | int]:
    return name in THIRD_PARTY_NAMES, name


def _legend(axes: Axes, keys: Sequence[tuple[str, str, str, Any]]) -> None:
    """(label, colour, marker, line style) of lines that are drawn for the legend only."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=c, marker=marker, linestyle=style, label=label) for label, c, marker, style in keys]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _log_axes(axes: Axes, base: int = 10) -> None:
    from matplotlib.ticker import NullFormatter

    axes.set_xscale("log", base=base)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, at: f"{value:g}" if value < 1e5 else f"{value:.0e}")
    axes.yaxis.set_major_formatter(lambda value, at: f"{value:g}")
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if high / low > 10:
            axis.set_minor_formatter(NullFormatter())
        else:  # less than a decade may have no labelled tick of its own
            axis.set_minor_formatter(lambda value, at: f"{value:g}")


def _figure(height: float = 4.4) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    # Figure itself, not pyplot: no window system, no state that outlives the plot
    figure: Any = Figure(figsize=(8.6, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, which="major", color="#dee2e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
