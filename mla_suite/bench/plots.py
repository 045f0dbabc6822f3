"""Plots of a run as inline SVG, by matplotlib: latency over context, roofline, ratio to a peer or an older run."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mla_suite.bench.record import Comparison, Report, Result
from mla_suite.bench.table import PEER_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#a61e4d", "#5c940d", "#364fc7", "#e67700")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MOST_LINES = 8
MOST_BARS = 40


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


def latency(report: Report) -> Iterator[tuple[str, str, str]]:
    """(name, caption, svg): one figure per operator, query length and head count, with a line per batch and backend."""
    measured = [r for r in report.results if r.rounds and "kv_len" in r.facts]

    def family(result: Result) -> tuple[str, int, int]:
        return result.op, result.facts["heads"], result.facts["q_len"]

    for (op, heads, q_len), found in groupby(sorted(measured, key=family), family):
        lines: dict[tuple[str, int, str], list[tuple[int, float, float]]] = {}
        for r in found:
            variant = "ragged" if "-kv~" in r.shape else ""
            key = (r.backend, r.facts["batch"], variant)
            lines.setdefault(key, []).append((r.facts["kv_len"], r.us, r.floor_us))
        if max(len(points) for points in lines.values()) < 2:
            continue  # a context alone is in the table and under the roofline
        figure, axes = _figure()
        for index, (key, points) in enumerate(sorted(lines.items())[: 2 * MOST_LINES]):
            backend, batch, variant = key
            points.sort()
            colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
            label = f"{backend}, batch {batch}" + (f", {variant}" if variant else "")
            xs = [x for x, _, _ in points]
            axes.plot(xs, [us for _, us, _ in points], marker=marker, color=colour, label=label)
            if all(floor for _, _, floor in points):
                axes.plot(xs, [floor for _, _, floor in points], color=colour, linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, at: f"{value:.0f}")
        axes.yaxis.set_major_formatter(lambda value, at: f"{value:g}")
        axes.set_xlabel("context (keys per query token)" if op == "sparse_decode" else "context (keys per sequence)")
        axes.set_ylabel("time of a call (µs)")
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.set_title(f"{op}: {heads} heads, {q_len} query token{'s' if q_len > 1 else ''}")
        dotted = " Dotted: floor measured in the same run." if report.floors else ""
        name = f"latency-{op}-h{heads}-q{q_len}"
        yield name, f"Latency over context, {op}, {heads} heads, q_len {q_len}.{dotted}", svg(figure, name)


def roofline(report: Report) -> Iterator[tuple[str, str, str]]:
    """Achieved rate of every shape over its arithmetic intensity, under the ceilings measured in the run."""
    measured = [r for r in report.results if r.rounds and r.flops and r.bytes]
    if not measured:
        return
    figure, axes = _figure()
    kinds = sorted({(r.op, r.backend) for r in measured})
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
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, at: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, at: f"{value:g}")
    axes.set_xlabel("arithmetic intensity (FLOP per byte of device memory)")
    axes.set_ylabel("achieved rate (TFLOP/s)")
    axes.set_title("Roofline: every shape")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ceilings = "measured in the same run" if report.floors else "not measured: no GPU"
    yield "roofline", f"Roofline per shape; ceilings {ceilings}.", svg(figure, "roofline")


def ratios(report: Report, comparisons: Sequence[Comparison]) -> Iterator[tuple[str, str, str]]:
    """Bars per shape: time over the older run's, and time over each peer's."""
    if comparisons:
        bars = [(_label(c.new), 1 + c.verdict.change, c.verdict.word, c.verdict.allowed) for c in comparisons]
        yield from _bars("ratio-old", "an older run", "time / time of the older run", bars)
    by_key = {r.key: r for r in report.results if r.rounds}
    for peer in PEER_NAMES:
        bars = []
        for r in by_key.values():
            other = by_key.get((r.op, r.shape, peer))
            if other and r.backend not in PEER_NAMES:
                word = "slower" if r.us > other.us else "faster"
                bars.append((_label(r), r.us / other.us, word, 0.0))
        if bars:
            yield from _bars(f"ratio-{peer}", peer, f"time / time of {peer}", bars)


def _bars(
    name: str, other: str, axis: str, bars: Sequence[tuple[str, float, str, float]]
) -> Iterator[tuple[str, str, str]]:
    colours = {"slower": "#c92a2a", "faster": "#2b8a3e", "same": "#868e96"}
    for first in range(0, len(bars), MOST_BARS):
        part = bars[first : first + MOST_BARS]
        figure, axes = _figure(height=1.2 + 0.22 * len(part))
        places = range(len(part))
        axes.barh(places, [ratio - 1 for _, ratio, _, _ in part], left=1, height=0.7,
                  color=[colours[word] for _, _, word, _ in part], xerr=[noise for *_, noise in part],
                  error_kw={"ecolor": "#adb5bd", "elinewidth": 1, "capsize": 2})  # fmt: skip
        axes.axvline(1.0, color="#333", linewidth=1)
        axes.set_yticks(places, [label for label, *_ in part], fontsize=7)
        axes.invert_yaxis()
        axes.set_ylim(len(part) - 0.4, -0.6)
        axes.set_xlabel(f"{axis} (1 = equal, less is faster)")
        axes.set_ylabel("shape")
        page = f" ({first // MOST_BARS + 1})" if len(bars) > MOST_BARS else ""
        axes.set_title(f"Ratio to {other}{page}")
        own = f"{name}-{first // MOST_BARS}"
        noise = " Whiskers: what noise explains." if any(entry[3] for entry in part) else ""
        yield own, f"Ratio to {other} per shape.{noise}", svg(figure, own)


def _label(result: Result) -> str:
    return f"{result.op} {result.shape} {result.backend}"


def _figure(height: float = 3.8) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    # Figure itself, not pyplot: no window system, no state that outlives the plot
    figure: Any = Figure(figsize=(8.6, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, which="major", color="#dee2e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
