"""A run as one self-contained HTML page: tables and plots, no script, nothing fetched; reads well printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from mla_suite.bench import plots, record, saving, table
from mla_suite.bench.record import Comparison, Report
from mla_suite.bench.table import Table
from mla_suite.errors import UsageError

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; background: #fff; margin: 0 auto; max-width: 100rem;
  padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p.lead { margin: 0 0 1rem; color: #495057; }
dl.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .4rem 1.2rem; margin: 0; }
dl.facts div { border-top: 2px solid #e9ecef; padding-top: .25rem; overflow-wrap: anywhere; }
dl.facts div.wide { grid-column: 1 / -1; }
dt { font-size: .75rem; color: #6c757d; } dd { margin: 0; font-variant-numeric: tabular-nums; }
.verdict { font-weight: 600; } .verdict.bad { color: #c92a2a; } .verdict.good { color: #2b8a3e; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .78rem; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; font-size: .95rem; }
th, td { padding: .2rem .35rem; border-bottom: 1px solid #e9ecef; text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid #868e96; white-space: nowrap; }
td.n, th.n { text-align: right; } td.n, td.error, td.change { white-space: nowrap; }
td.shape { font-family: ui-monospace, monospace; font-size: .72rem; white-space: nowrap; }
tr.slower td, tr.failed td { background: #fff0f0; } tr.faster td { background: #f0fbf2; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr)); gap: 1.2rem; }
figure { margin: 0; break-inside: avoid; } figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: .8rem; color: #495057; }
code { font-size: .85em; background: #f1f3f5; padding: .1rem .3rem; border-radius: 3px; overflow-wrap: anywhere; }
@page { size: A4 landscape; margin: 12mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .plots { grid-template-columns: 1fr 1fr; } .scroll { overflow: visible; }
  table { font-size: 7.2pt; } th, td { padding: 1pt 4pt; } td.shape { font-size: 6.6pt; }
  thead { display: table-header-group; } tr { break-inside: avoid; }
  h2, caption { break-after: avoid; } h2.numbers { break-before: page; }
  tr.failed td:first-child::before { content: "wrong "; }
}
"""


def need_matplotlib() -> None:
    """ValueError, in a sentence, where the plots cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise UsageError("--html draws with matplotlib, which is not installed: pip install 'mla_suite[bench]'")


def write(path: Path, report: Report, comparisons: Sequence[Comparison] = (), old: Report | None = None) -> None:
    """Write the page, whole or not at all. ValueError when it cannot be written."""
    saving.write_whole(path, html(report, comparisons, old))


def html(report: Report, comparisons: Sequence[Comparison] = (), old: Report | None = None) -> str:
    """The page. `comparisons` with `old` add verdicts, a column and bars."""
    figures = [
        *plots.ratios(report, comparisons),
        *plots.latency(report),
        *plots.roofline(report),
        *plots.counted(report),
    ]
    facts = report.environment
    title = f"mla_suite on {facts['device']}, {facts['date']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(_lead(report))}</p>',
        *_facts(report),
        *_verdict(comparisons, old, report),
        "<h2>Plots</h2>",
        '<div class="plots">',
        *(
            f'<figure id="{escape(name)}" role="img" aria-label="{escape(caption)}">{drawn}'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            for name, caption, drawn in figures
        ),
        "</div>",
        '<h2 class="numbers">Numbers</h2>',
        *(part for shown in _tables(report, comparisons) for part in _table(shown)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'  # a browser would ask the server for one
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _lead(report: Report) -> str:
    if not report.on_gpu:
        return (
            "No GPU on this machine: times are those of the reference on its CPU, and those of emulated kernels are "
            "bounds counted in the emulator, never times. Times are medians of rounds; the spread is twice the "
            "distance to the fastest."
        )
    return (
        "Device time per call by CUDA graph replay with cold caches: median of rounds; the spread is twice the "
        "distance to the fastest. Host time is that of an eager call. Floors were measured in the same run on the same "
        "card; compare ratios to them rather than times of different cards. Every result was checked first."
    )


def _facts(report: Report) -> Iterator[str]:
    facts = dict(report.environment)
    changed = facts.pop("changed", False)
    if facts.get("commit"):
        facts["commit"] = facts["commit"][:12] + (" with local changes" if changed else "")
    if report.floors:
        facts["read ceiling"] = f"{report.floors.gb_per_s:.0f} GB/s ({report.floors.source})"
        facts["bf16 matrix ceiling"] = f"{report.floors.tflops:.0f} TFLOP/s"
        if report.floors.fp8_tflops:
            facts["fp8 matrix ceiling"] = f"{report.floors.fp8_tflops:.0f} TFLOP/s"
    facts["sets"] = ", ".join(report.sets)
    yield '<dl class="facts">'
    for name, value in facts.items():
        if value != "":
            yield f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd></div>"
    yield f'<div class="wide"><dt>command</dt><dd><code>{escape(report.command)}</code></dd></div></dl>'


def _verdict(comparisons: Sequence[Comparison], old: Report | None, new: Report) -> Iterator[str]:
    if old is None:
        return
    slow = [entry for entry in comparisons if entry.verdict.word == "slower"]
    fast = sum(entry.verdict.word == "faster" for entry in comparisons)
    lost = len(list(record.missing(old, new)))
    kind = "bad" if slow or lost else "good"
    words = (f"{len(slow)} slower" if slow else "none slower") + (f", {lost} not timed any more," if lost else "")
    commit = str(old.environment.get("commit", ""))[:12] or "unknown commit"
    yield (
        f"<p>Against the run of {escape(str(old.environment['date']))} ({escape(commit)}): "
        f'<span class="verdict {kind}">{words}</span> of {len(comparisons)} shapes, {fast} faster. A shape is slower '
        "when its median rose by more than the spreads of both runs and 2.5 % together.</p>"
    )


def _tables(report: Report, comparisons: Sequence[Comparison]) -> Iterator[Table]:
    for shown in (table.times(report, comparisons), table.counted(report), table.failures(report.results)):
        if shown.rows:
            yield shown


def _table(shown: Table) -> Iterator[str]:
    def kind(index: int) -> str:
        name = "n" if index in shown.numeric else shown.header[index]
        name = name if name in ("n", "shape", "error", "change") else ""
        return f' class="{name}"' if name else ""

    yield f'<div class="scroll"><table><caption>{escape(shown.title)}</caption><thead><tr>'
    yield "".join(f'<th scope="col"{kind(index)}>{escape(name)}</th>' for index, name in enumerate(shown.header))
    yield "</tr></thead><tbody>"
    for row, mark in zip(shown.rows, shown.marks, strict=True):
        cells = "".join(f"<td{kind(index)}>{escape(cell)}</td>" for index, cell in enumerate(row))
        yield f'<tr class="{mark}">{cells}</tr>' if mark else f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"
