"""Fits the model of time to published points of AMD GPUs, and reports how far it is from those held out.

    python tools/fit_amd_time.py            the report, with the constants that the package has
    python tools/fit_amd_time.py --fit      fit them again to the points whose part is 'fit', and print them
    python tools/fit_amd_time.py --write    write the table and the plot of docs/amd_time_model.md

The points are other people's kernels, modelled by amd_peers.py from what is known of their geometry: what is fitted and
tested is the chip around the compute units. Times that include the host's part of a launch are reported by themselves.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import amd_points
import support
from amd_peers import from_caches, known, predict
from amd_points import Point

from mla_suite.emulator.timing import BOUNDS, CHIP, Chip, HeldOut

PAGE = Path(__file__).parent.parent / "docs" / "amd_time_model.md"
PLOT = PAGE.with_suffix(".svg")
SELF = "`tools/fit_amd_time.py`"
ENOUGH = 8
"""Held-out points below which a class is unvalidated."""
ARCHS = ("gfx942", "gfx950")
TABLES = ("aiter-3003", "aiter-3003-first")
"""Pull request 3003's: the later one, of device time, and the first, in which launches count, too."""


def loss(points: Sequence[Point], chip: Chip, exposed: float) -> float:
    """Mean distance of modelled and published times, as a factor's logarithm: an outlier counts once."""
    return statistics.fmean(abs(math.log(predict(point, chip, exposed).us / point.us)) for point in points)


def fit(points: Sequence[Point]) -> tuple[Chip, float]:
    """The constants that minimise `loss` on the points of part 'fit', by steps along one constant at a time."""
    chosen = device(points, "fit")

    def made(values: Sequence[float]) -> tuple[Chip, float]:
        launch, share, exposed = values
        return replace(CHIP, launch_us=launch, memory_share=min(1.0, share)), min(1.0, exposed)

    values, step = [4.0, 0.75, 0.3], 0.3
    best = loss(chosen, *made(values))
    while step > 1e-3:
        moved = False
        for at in range(len(values)):
            for factor in (1 + step, 1 / (1 + step)):
                tried = [value * factor if i == at else value for i, value in enumerate(values)]
                found = loss(chosen, *made(tried))
                if found < best - 1e-9:
                    best, values, moved = found, tried, True
        step = step if moved else step / 2
    return made(values)


def errors(points: Iterable[Point], key: Callable[[Point], tuple[str, ...]]) -> dict[tuple[str, ...], HeldOut]:
    """Median and 90th percentile of the relative error in percent, of points with equal keys."""
    found: dict[tuple[str, ...], list[float]] = {}
    for point in points:
        found.setdefault(key(point), []).append(100 * abs(predict(point).us / point.us - 1))
    made = {}
    for name, each in sorted(found.items()):
        at_90 = sorted(each)[math.ceil(0.9 * len(each)) - 1]
        made[name] = HeldOut(round(statistics.median(each), 1), round(at_90, 1), len(each))
    return made


def bound(point: Point) -> tuple[str, str]:
    return point.card.arch, predict(point).bound


def device(points: Iterable[Point], part: str) -> list[Point]:
    """Those of a part that are fitted to or counted: times of the device, and of keys that came from memory."""
    timed = (point for point in points if point.source.part == part and point.source.timing == "device")
    return [point for point in timed if not from_caches(point)]


def held_out(points: Sequence[Point]) -> dict[tuple[str, str], HeldOut]:
    """By arch and class; only classes with enough held-out points."""
    found = errors(device(points, "held_out"), bound)
    return {(arch, name): found[arch, name] for arch in ARCHS for name in BOUNDS
            if (arch, name) in found and found[arch, name].points >= ENOUGH}  # fmt: skip


def ranking(points: Sequence[Point], table: str) -> tuple[int, int]:
    """Of a table's shapes whose kernels differ by more than 10 %: how many times the faster is named, and how many."""
    rows: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        if point.source.name == table:
            rows.setdefault((point.batch, point.ctx), []).append(point)
    right = total = 0
    for asm, hk in rows.values():
        if max(asm.us, hk.us) < 1.1 * min(asm.us, hk.us):
            continue
        total += 1
        right += (predict(asm).us < predict(hk).us) == (asm.us < hk.us)
    return right, total


def markdown(title: str, header: str, rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"{title} ({SELF}):", "", header, "|" + "---|" * (header.count("|") - 1)]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def table(points: Sequence[Point]) -> str:
    """The report as Markdown."""
    chosen, used = device(points, "held_out"), errors(device(points, "fit"), bound)
    by_class, none = errors(chosen, bound), HeldOut(0, 0, 0)
    rows: list[Sequence[object]] = []
    for arch in ARCHS:
        for name in BOUNDS:
            found, fitted = by_class.get((arch, name), none), used.get((arch, name), none)
            figures = (f"{found.median} %", f"{found.p90} %") if found.points else ("-", "-")
            state = "" if found.points >= ENOUGH else "**unvalidated**"
            rows.append((arch, name, found.points, *figures, fitted.points, state))
    numbers = "points | median error | 90th percentile |"
    lines = markdown("By class", f"| arch | class | {numbers} points fitted to | |", rows)
    for title, header, key in (
        ("By source", "| source | card |", lambda point: (point.source.name, point.card.gpu)),
        ("By kind", "| kind |", lambda point: (point.kind,)),
        ("By what a kernel is modelled from", "| from |", lambda point: (known(point),)),
    ):
        found_by = errors(chosen, key)
        rows = [(*name, each.points, f"{each.median} %", f"{each.p90} %") for name, each in found_by.items()]
        lines += markdown(title, f"{header} {numbers}", rows)
    left_out = "; ".join(f"{point}, {point.us:g} us" for point in points if from_caches(point))
    lines += [f"Left out ({SELF}), since memory alone takes longer at the data sheet's rate: {left_out}.", ""]
    (right, total), (right_first, total_first) = (ranking(points, table) for table in TABLES)
    lines += [
        f"Ranking ({SELF}): of pull request 3003's {total + total_first} rows whose kernels differ by more than 10 %,",
        f"the model names the faster one in {right + right_first}: in {right} of {total} of its later table and in "
        f"{right_first} of {total_first} of its first.",
    ]
    return "\n".join(lines)


def plot(points: Sequence[Point]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mla_suite"  # the same file from the same points
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 5.2))
    for part, marker in (("fit", "x"), ("held_out", "o")):
        for arch, colour in zip(ARCHS, ("tab:red", "tab:blue"), strict=True):
            chosen = [point for point in device(points, part) if point.card.arch == arch]
            modelled = [predict(point).us for point in chosen]
            label = f"{arch}, {'held out' if part == 'held_out' else 'fitted to'}"
            axes.scatter([p.us for p in chosen], modelled, s=14, marker=marker, c=colour, alpha=0.6, label=label)
    ends = (4.0, 20000.0)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="grey", alpha=0.2, linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published us", ylabel="modelled us")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants and print them")
    parser.add_argument("--write", action="store_true", help="write the table and the plot of the page")
    given = parser.parse_args(arguments)
    points = amd_points.points()
    if given.fit:
        chip, exposed = fit(points)
        distance = loss(device(points, "fit"), chip, exposed)
        print(chip, f"exposed={exposed}", f"mean distance {distance:.4f}", sep="\n")
        return 0
    report = table(points)
    print(report)
    if given.write:
        support.write_section(PAGE, "points", report)
        plot(points)
    return 0


if __name__ == "__main__":
    sys.exit(main())
