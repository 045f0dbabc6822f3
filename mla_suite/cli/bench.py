"""Measure the operators on named shapes; compare with an earlier run; write a page.

  python -m mla_suite bench                                   this machine's usual set
  python -m mla_suite bench --list                            the sets of shapes
  python -m mla_suite bench --set flashmla --save new.json    keep the numbers
  python -m mla_suite bench --set flashmla --compare old.json exit 1 if a shape is slower than noise explains
  python -m mla_suite bench --set aiter-3003 --batch-sizes 1,8 --ctx-lens 512,4096 --csv table.csv
  python -m mla_suite bench --load new.json --html page.html  a page from saved numbers, measuring nothing

On a GPU it measures the device time by CUDA graph replay with cold caches, after a rest and at the end of 0.7 s without
one; the host time of an eager call; and the ceilings of the card in the same run. Every result is compared with the
reference, or with fp64, before it is timed. Without a GPU it measures the reference's time on the CPU and, if AMD
kernels are built, counts their bounds in the emulator. Ctrl-C ends a run early; what was measured by then is printed
and saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mla_suite.cli import INTERRUPTED, bar, positive, sizes, torch_device
from mla_suite.errors import UsageError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from mla_suite.bench.clock import Effort
    from mla_suite.bench.record import Comparison, Report, Result
    from mla_suite.bench.sets import Case
    from mla_suite.bench.table import Table


GRID = {
    "batch_sizes": "batches",
    "ctx_lens": "contexts",
    "nhead": "heads",
    "decode_qlen": "q_len",
    "page_sizes": "pages",
}
"""Options that give a set other sizes, and what the set calls them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", metavar="NAME", help="shapes to measure; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the sets and stop")
    parser.add_argument("--op", help="only this operator's shapes")
    parser.add_argument("--shapes", nargs="+", metavar="PART", help="only shapes whose names contain one of these")
    grid = parser.add_argument_group("other sizes, for the sets aiter-3003 and aiter-3003-bf16")
    grid.add_argument("--batch-sizes", type=sizes, metavar="N,N", help="sequences (default as published)")
    grid.add_argument("--ctx-lens", type=sizes, metavar="N,N", help="cached keys of a sequence")
    grid.add_argument("--nhead", type=positive, metavar="N", help="heads of the queries (default 32)")
    grid.add_argument("--decode-qlen", type=positive, metavar="N", help="query tokens of a sequence (default 4)")
    grid.add_argument("--page-sizes", type=sizes, metavar="N,N", help="tokens of a page (default 1)")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write ours beside the published times as CSV")
    parser.add_argument(
        "--backend", action="append", choices=("native", "triton", "reference"), help="only this one; repeatable"
    )
    parser.add_argument("--plan", choices=("with", "without", "both"), help="decode with a plan, without, or both")
    parser.add_argument("--device", type=torch_device, help="torch device (default: the first GPU, else the CPU)")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds of a shape in each pass (default 3)")
    parser.add_argument("--passes", type=positive, default=2, help="passes over the set (default 2)")
    parser.add_argument("--warmup", type=positive, default=0, metavar="N", help="calls before each round, at least")
    parser.add_argument("--iters", type=positive, default=0, metavar="N", help="calls timed in each round, at least")
    parser.add_argument(
        "--sustained", type=float, default=0.7, metavar="S", help="seconds without a pause, on a GPU; 0: burst only"
    )
    parser.add_argument("--no-third-party", action="store_true", help="leave out flash_mla, flashinfer and aiter")
    parser.add_argument("--no-emulator", action="store_true", help="do not count bounds in the emulator")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the run as JSON")
    parser.add_argument("--load", metavar="FILE", type=Path, help="take a saved run instead of measuring")
    parser.add_argument("--compare", metavar="FILE", type=Path, help="compare with an earlier saved run")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write one self-contained page")
    parser.add_argument("--commit", help="commit named in the run, where it cannot be found out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from mla_suite.bench import published, record, saving, sets
    from mla_suite.bench.clock import Effort
    from mla_suite.bench.run import Stopped

    console = Console(width=None if sys.stdout.isatty() else 200)
    if args.list:
        for name, entry in sets.SETS.items():
            console.print(f"[bold]{name}[/]: {len(entry.cases())} shapes. {entry.source}", highlight=False)
        return 0
    if args.html is not None:
        from mla_suite.bench import page  # says what is missing before minutes are spent on measuring

        page.need_matplotlib()
    for path in filter(None, (args.save, args.html, args.csv)):
        _make_room(path)
    chosen = [name for name in ("set", "op", "shapes", "backend", "plan", *GRID) if getattr(args, name)]
    if args.load and chosen:
        given = " ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise UsageError(f"--load shows a run as it was saved; leave out {given}")
    old = record.load(args.compare) if args.compare else None
    if not 0 <= args.sustained <= 60:
        raise UsageError(f"--sustained {args.sustained}: it takes 0 to 60 seconds")
    effort = Effort(args.rounds, args.passes, sustained_s=args.sustained, warmup=args.warmup, iters=args.iters)
    if args.load:
        report, stopped = record.load(args.load), False
    else:
        if old is not None:
            _need_comparable(old, args)
        report, stopped = _measure(args, effort)
    _save(report, args.save)  # before anything that can refuse
    comparisons: list[Comparison] = []
    if old is not None and not stopped:
        comparisons = record.compare(old, report)
        if not comparisons:
            raise UsageError(f"{args.compare} shares no timed shape with this run ({', '.join(report.sets)})")
        if not args.load:
            try:
                comparisons = _again(old, report, comparisons, args, effort)
                _save(report, args.save)
            except Stopped:  # suspects that were measured once are not judged
                comparisons, stopped = [], True
    if args.csv is not None:
        saving.write_whole(args.csv, published.as_csv(report))
    if args.html is not None:
        page.write(args.html, report, comparisons, old if comparisons else None)
    if stopped:
        _show(console, report, comparisons, args.json)
        files = " and ".join(str(path) for path in (args.save, args.csv, args.html) if path)
        where = f", and saved in {files}" if files else ""
        print(f"bench: stopped before the end; what was measured is above{where}", file=sys.stderr)
        return INTERRUPTED
    lost = list(record.missing(old, report)) if old is not None else []
    slower = record.slower(comparisons)
    _show(console, report, comparisons, args.json)
    if not args.json:
        for result, why in lost:
            said = f"lost: {result.op} {result.shape} {result.backend} was timed before: {why}"
            console.print(said, style="red", markup=False)  # a reason's brackets are no markup
        if old is not None:
            console.print(_summary(comparisons, len(lost)), highlight=False)
    return 1 if slower or lost or any(result.wrong for result in report.results) else 0


def _need_comparable(old: Report, args: argparse.Namespace) -> None:
    """ValueError, before minutes are spent, when the run that is asked for could not be judged against `old`."""
    from mla_suite.bench import environment, noise, record

    record.need_same_machine(old, environment.describe(_device(args)))
    if args.rounds * args.passes < noise.FEWEST_ROUNDS:
        raise UsageError(
            f"--rounds {args.rounds} --passes {args.passes}: a comparison needs {noise.FEWEST_ROUNDS} rounds in all"
        )


def _save(report: Report, path: Path | None) -> None:
    """Write the run, if asked to. Where that fails its JSON goes to stdout, and the ValueError on."""
    if path is None:
        return
    try:
        report.save(path)
    except ValueError:
        print(json.dumps(report.as_json(), indent=1))
        raise


def _make_room(path: Path) -> None:
    """A folder for a file that will be written. ValueError before minutes are spent on what could not be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written; name a file in a folder of yours")


def _cases(args: argparse.Namespace, names: Sequence[str]) -> list[Case]:
    from dataclasses import replace

    from mla_suite.bench import sets

    found: dict[str, Case] = {}
    grid = {meant: getattr(args, name) for name, meant in GRID.items() if getattr(args, name)}
    for name in names:
        for case in sets.named(name, args.op, **grid):
            plans = {"with": (True,), "without": (False,), "both": (True, False), None: (case.planned,)}[args.plan]
            for planned in plans if case.op == "decode" else (False,):
                chosen = replace(case, planned=planned)
                found.setdefault(chosen.id, chosen)
    return sets.matching(found, args.shapes)


def _device(args: argparse.Namespace) -> torch.device:
    import torch

    device: torch.device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams and graphs are those of the current device
    return device


def _measure(args: argparse.Namespace, effort: Effort) -> tuple[Report, bool]:
    """A new run, and whether Ctrl-C ended it early."""
    from mla_suite.bench import environment, floors
    from mla_suite.bench.record import Report
    from mla_suite.bench.run import Stopped

    device = _device(args)
    names = args.set or ["flashmla" if device.type == "cuda" else "quick"]
    cases = _cases(args, names)
    emulated = [] if device.type == "cuda" or args.no_emulator else _built()
    facts = environment.describe(device) | ({"commit": args.commit} if args.commit else {})
    ceilings, stopped = None, False
    first = "ceilings of this card" if device.type == "cuda" else ""
    with bar(first, len(cases) * effort.passes) as update:
        if device.type == "cuda":
            ceilings = floors.measure(device)
        try:
            more = dict(with_third_party=not args.no_third_party, emulated=emulated)
            results = _run(cases, device, effort, args, update, floors=ceilings, **more)
        except Stopped as stop:
            if not stop.results:
                raise
            results, stopped = stop.results, True
    command = f"python -m mla_suite bench {shlex.join(sys.argv[2:])}".strip()
    facts |= {"note": "Stopped before its end: not every shape was measured, or not in every pass."} if stopped else {}
    return Report(facts, command, list(names), results, ceilings), stopped


def _run(
    cases: list[Case],
    device: torch.device,
    effort: Effort,
    args: argparse.Namespace,
    update: Callable[..., None],
    **more: Any,
) -> list[Result]:
    """The results of these cases; `update` is that of the progress bar."""
    from mla_suite.bench import run as runner

    def progress(what: str, done: int) -> None:
        update(description=what[:60], completed=done)

    return runner.run(cases, device, effort, backends=args.backend or (), progress=progress, **more)


def _built() -> list[str]:
    """Archs that have kernels here and can be emulated."""
    from mla_suite import archs as arch
    from mla_suite.build import manifest
    from mla_suite.build.locations import ObjectError

    try:
        built = {name for name, _ in manifest.installed().kernels}
    except ObjectError:  # nothing was built: the page and the table then say that bounds were not counted
        return []
    return [name for name in arch.names() if name in built and arch.get(name).emulable]


def _again(
    old: Report, report: Report, comparisons: list[Comparison], args: argparse.Namespace, effort: Effort
) -> list[Comparison]:
    """Measure what seems slower once more: only what is slower twice is."""
    from mla_suite.bench import record

    slow = {entry.new.key for entry in record.slower(comparisons)}
    if not slow:
        return comparisons
    suspects = {key[:2] for key in slow}
    cases = [case for case in _cases(args, report.sets) if (case.op, case.shape) in suspects]
    with bar("suspects", len(cases) * effort.passes) as update:
        repeated = _run(cases, _device(args), effort, args, update, floors=report.floors, with_third_party=False)
    second = {result.key: result for result in repeated if result.rounds and result.key in slow}
    report.results = [second.get(result.key, result) for result in report.results]
    return record.compare(old, report)


def _as_json(report: Report, comparisons: Sequence[Comparison]) -> dict[str, object]:
    verdicts = [
        {"op": c.new.op, "shape": c.new.shape, "backend": c.new.backend, "old_us": c.old.us, "new_us": c.new.us,
         "change": c.verdict.change, "allowed": c.verdict.allowed, "verdict": c.verdict.word}
        for c in comparisons
    ]  # fmt: skip
    return report.as_json() | ({"comparison": verdicts} if comparisons else {})


def _summary(comparisons: Sequence[Comparison], lost: int) -> str:
    count = {word: sum(c.verdict.word == word for c in comparisons) for word in ("slower", "faster", "same")}
    verdict = "[red]regression[/]" if count["slower"] or lost else "[green]no regression[/]"
    noisy = sum(c.verdict.allowed > 0.1 for c in comparisons)
    blind = f"; {noisy} too noisy to show a change of 10 %" if noisy else ""
    return (
        f"{verdict}: {len(comparisons)} shapes compared, {count['slower']} slower, {count['faster']} faster, "
        f"{count['same']} within noise, {lost} lost{blind}"
    )


def _show(console: Console, report: Report, comparisons: Sequence[Comparison], as_json: bool) -> None:
    from mla_suite.bench import table

    if as_json:
        print(json.dumps(_as_json(report, comparisons), indent=1))
        return
    facts = report.environment
    versions = " ".join(
        f"{name} {facts[name]}" for name in ("driver", "cuda", "rocm", "torch", "triton") if facts.get(name)
    )
    console.print(f"{facts['device']} ({facts['arch']}, {facts['compute_units']} units), {versions}, {facts['date']}")
    if report.floors:
        console.print(
            f"ceilings of this run: read {report.floors.gb_per_s:.0f} GB/s ({report.floors.source}), "
            f"bf16 matrix product {report.floors.tflops:.0f} TFLOP/s, "
            + (f"fp8 {report.floors.fp8_tflops:.0f} TFLOP/s" if report.floors.fp8_tflops else "fp8 not measured")
        )
    if not report.on_gpu:
        console.print(
            "No GPU: these are times of the reference on the CPU; bounds of emulated kernels come from counters."
        )
    tables = (table.times(report, comparisons), table.beside_published(report), table.counted(report))
    for shown in (*tables, table.failures(report.results)):
        if shown.rows:
            _print_table(console, shown)


def _print_table(console: Console, shown: Table) -> None:
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(title=shown.title, title_justify="left")
    for index, name in enumerate(shown.header):
        justify: Literal["left", "right"] = "right" if index in shown.numeric else "left"
        drawn.add_column(name, justify=justify, overflow="fold", no_wrap=name not in ("reason", "shape"))
    styles = {"slower": "red", "failed": "red", "faster": "green", "": None}
    for row, mark in zip(shown.rows, shown.marks, strict=True):
        drawn.add_row(*map(Text, row), style=styles[mark])  # a reason's brackets are no markup
    console.print(drawn)
