"""Saved runs as the Markdown of the README: per machine one summary by operator, and every shape below it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mla_suite.bench import table
from mla_suite.bench.noise import median
from mla_suite.bench.record import Report, Result

NONE_YET = (
    "No run on a GPU is stored in `benchmarks/results/` yet: nothing here is a claim about speed. "
    "`python -m mla_suite bench --save benchmarks/results/<machine>.json` measures one."
)
SHAPES = (
    "In a shape's name `b` is the batch, `h` heads, `q` query tokens per sequence, `kv` cached keys per sequence, `p` "
    "the page, `plan` a plan made once per step; a sparse pool is `kv_format.page.keys`."
)


def latency(reports: Sequence[Report]) -> str:
    """The latency section: what machines were measured, with what, when and how; or that there are none."""
    return "\n".join(line for report in reports for line in _machine(report)) + f"\n{SHAPES}" if reports else NONE_YET


def _machine(report: Report) -> Iterator[str]:
    facts = report.environment
    named = (("driver", "driver"), ("CUDA", "cuda"), ("ROCm", "rocm"), ("torch", "torch"), ("triton", "triton"))
    versions = [f"{name} {facts[key]}" for name, key in named if facts.get(key)]
    packages = [name for name in table.THIRD_PARTY_NAMES if any(r.backend == name and r.rounds for r in report.results)]
    versions += [
        next(f"{name} {r.config}" for r in report.results if r.backend == name and r.rounds) for name in packages
    ]
    commit = str(facts.get("commit", ""))[:12] + (" with local changes" if facts.get("changed") else "")
    about = [
        f"{facts['compute_units']} units",
        *versions,
        str(facts["date"]),
        *([f"commit {commit}"] if commit else []),
    ]
    yield f"**{facts['device']}** ({facts['arch']}): {', '.join(about)}. Command: `{report.command}`"
    yield ""
    if facts.get("note"):
        yield f"{facts['note']}"
        yield ""
    if report.floors:
        yield (
            f"Device time of a call by CUDA graph replay with cold caches. Ceilings measured in the same run: read "
            f"{report.floors.gb_per_s:.0f} GB/s, bf16 matrix product {report.floors.tflops:.0f} TFLOP/s; `x floor` is "
            "time over the larger of the two times they allow."
        )
    else:
        yield "Time of a call on this CPU; no ceilings are measured there."
    yield ""
    best = _fastest(report)
    yield from _summary(report, best, packages)
    yield f"<details><summary>All {len(best)} shapes</summary>\n"
    yield from _rows(report, best, packages)
    yield "\n</details>\n"
    lost = table.failures(r for r in report.results if r.key[:2] not in {b.key[:2] for b in best})
    if lost.rows:
        yield (
            "Not timed: "
            + "; ".join(f"{op} {shape} ({backend}: {why})" for op, shape, backend, why in lost.rows)
            + ".\n"
        )


def _fastest(report: Report) -> list[Result]:
    """Returns the fastest of our own backends for each shape, in the run's order."""
    found: dict[tuple[str, str], Result] = {}
    for result in report.results:
        if result.rounds and result.backend not in table.THIRD_PARTY_NAMES:
            kept = found.get(result.key[:2])
            if kept is None or result.us < kept.us:
                found[result.key[:2]] = result
    return list(found.values())


def _summary(report: Report, best: Sequence[Result], packages: Sequence[str]) -> Iterator[str]:
    header = ["operator", "shapes", "backends"]
    header += ["x floor: least, median, most"] if report.floors else []
    header += [f"time / {package}: least, geometric mean, most (shapes)" for package in packages]
    yield _line(header)
    yield "|" + "---|" * len(header)
    for op in dict.fromkeys(result.op for result in best):
        own = [result for result in best if result.op == op]
        cells = [op, str(len(own)), ", ".join(sorted({result.backend for result in own}))]
        if report.floors:
            over = [result.over_floor for result in own]
            cells.append(f"{min(over):.2f}, {median(over):.2f}, {max(over):.2f}")
        for package in packages:
            ratios = sorted(filter(None, (_ratio(report, result, package) for result in own)))
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
            cells.append(f"{ratios[0]:.2f}, {mean:.2f}, {ratios[-1]:.2f} ({len(ratios)})" if ratios else "not measured")
        yield _line(cells)
    yield ""


def _rows(report: Report, best: Sequence[Result], packages: Sequence[str]) -> Iterator[str]:
    header = ["operator", "shape", "backend", "us", "spread %", "GB/s", "TFLOP/s"]
    header += ["x floor"] if report.floors else []
    header += [part for package in packages for part in (f"{package} us", "ratio")]
    yield _line(header)
    yield "|" + "---|" * 3 + "---:|" * (len(header) - 3)
    timed = {result.key: result for result in report.results if result.rounds}
    for result in best:
        cells = [result.op, f"`{result.shape}`", result.backend, table.microseconds(result.us)]
        cells += [f"{result.spread_percent:.1f}", f"{result.gb_per_s:.0f}", table.teraflops(result.tflops)]
        cells += [f"{result.over_floor:.2f}"] if report.floors else []
        for package in packages:
            other = timed.get((result.op, result.shape, package))
            cells += [table.microseconds(other.us), f"{result.us / other.us:.2f}"] if other else ["", ""]
        yield _line(cells)


def _ratio(report: Report, result: Result, package: str) -> float | None:
    other = next((r for r in report.results if r.key == (result.op, result.shape, package) and r.rounds), None)
    return result.us / other.us if other else None


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
