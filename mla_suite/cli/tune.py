"""Search an operator's configurations on this GPU, and store the best as rows of its tuned table.

  python -m mla_suite tune --op combine --set aiter-3468           search, and print the rows
  python -m mla_suite tune --op combine --set aiter-3468 --write   search, and store the rows
  python -m mla_suite tune --op decode --shapes b8-h32 kv512       only shapes whose names contain one of these
  python -m mla_suite tune --op decode --set aiter-3003 --write    crossovers: our tiles, or Triton
  python -m mla_suite tune --build                                 compile what tables name and is not built
  python -m mla_suite tune --lint                                  check every table there is
  python -m mla_suite tune --calibrate FILE                        the model of time's constants, as a GPU measured them

Each configuration is compared with the reference, then timed as `bench` does. A row is stored only if it beats the
present choice by more than the noise of both, and no other backend is faster. Where Triton is faster, a row of decode's
table leaves the shape to Triton.

A search of combine first compiles, into this user's cache, the kernels that it tries and that do not ship. Rows go to
the package's tables; with --user, or if the package is read-only, they go to the user's directory. A user's rows come
before shipped rows, and the next build makes the kernels that shipped rows name. Ctrl-C ends a search early and keeps
what it found.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mla_suite import archs
from mla_suite.archs import ArchSpec, combine_search
from mla_suite.bench import calibrate, environment, search, sets, store
from mla_suite.bench.search import Outcome
from mla_suite.bench.sets import Case
from mla_suite.build import BuildError
from mla_suite.cli import INTERRUPTED, bar, compiling
from mla_suite.core import dispatch, register, tuning
from mla_suite.core.tuning import SearchSpace
from mla_suite.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", help="the operator: combine or decode")
    add_search_arguments(parser)
    parser.add_argument("--build", action="store_true", help="compile the kernels that combine's tables name, and stop")
    parser.add_argument("--calibrate", metavar="FILE", type=Path, help="of tools/measure_amd.py; nothing is stored")
    parser.add_argument("--lint", action="store_true", help="check every table and stop")


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of any search: of which shapes, and where its rows go."""
    sets_of = "a set of `bench --list`, repeatable (default: aiter-3468 of combine, flashmla of decode)"
    parser.add_argument("--set", action="append", metavar="NAME", help=sets_of)
    parser.add_argument("--shapes", nargs="+", metavar="PART", help="only shapes whose names contain one of these")
    parser.add_argument("--write", action="store_true", help="store the rows that are worth it")
    parser.add_argument("--user", action="store_true", help="store in the user's directory")
    parser.add_argument("--commit", help="commit named in the rows, where it cannot be found out")


def run(args: argparse.Namespace) -> int:
    if args.calibrate:
        about, constants = calibrate.read(args.calibrate)
        print(about, *constants, "They belong into mla_suite/emulator/timing.py; nothing is stored.", sep="\n")
        return 0
    if args.lint:
        return lint()
    if args.build:
        return build_named()
    return _tune(args)


def build_named() -> int:
    """Compile the kernels that tables of combine name and that are not built; 1 where there is no compiler for them."""
    failed = 0
    for name in archs.names():
        try:
            with compiling() as step:
                print(f"{name}: {combine_search.build_named(archs.get(name), step)} kernels built")
        except BuildError as error:
            failed = 1
            print(f"{name}: {error}", file=sys.stderr)
    return failed


def build_for_search(space: SearchSpace, arch: ArchSpec) -> None:
    """Compile what a search tries beyond what is built, where there is a compiler for it."""
    try:
        with compiling() as step:
            built = space.build(arch, step)
        print(f"{arch.name}: {built} kernels built for the search")
    except BuildError as error:
        print(f"only what is built is searched: {error}", file=sys.stderr)
    dispatch.clear_caches()


def lint() -> int:
    """Print what is wrong with any table, the user's included; 1 if anything is."""
    findings = checked = 0
    tables = list(_tables())
    read = {path for _, _, path in tables}
    for path in sorted(path for path in tuning.SHIPPED.glob("*/tuned/*.csv") if path not in read):
        findings += 1
        print(f"{path}:1: no backend reads this table")
    for form, name, path in tables:
        checked += 1
        for finding in tuning.lint(form, name, path):
            findings += 1
            print(finding)
    print(f"{checked} tables checked, {findings} findings")
    return 1 if findings else 0


def _tables() -> Iterator[tuple[Any, str, Path]]:
    """(format, table's name, file) of every table that is there."""
    spaces = [space for op in register.registry() if (space := search.space_of(op)) is not None]
    for form, name in itertools.product([space.form for space in spaces], archs.names()):
        for folder in (tuning.SHIPPED / form.op / "tuned", tuning.user_directory() / form.op):
            if (folder / f"{name}.csv").is_file():
                yield form, name, folder / f"{name}.csv"


def _tune(args: argparse.Namespace) -> int:
    if args.op is None:
        raise UsageError("name an operator with --op: combine or decode")
    if not torch.cuda.is_available():
        raise UsageError("no GPU: configurations are compared by timing them, and an emulator's bounds are no times")
    device = torch.device("cuda")
    facts = environment.describe(device) | ({"commit": args.commit} if args.commit else {})
    if facts["arch"] not in archs.names():
        raise UsageError(f"this GPU is {facts['arch']}; tables exist for {', '.join(archs.names())}")
    arch = archs.get(str(facts["arch"]))
    space = _space(args.op)
    cases = _cases(args)
    if not space.plans:
        unplanned = (replace(case, planned=False) for case in cases)
        cases = list({case.id: case for case in unplanned}.values())
    build_for_search(space, arch)
    console = Console(width=None if sys.stdout.isatty() else 200)
    if not facts["commit"]:
        raise UsageError("the commit of this package is unknown (no git checkout); name it with --commit")
    rows: list[dict[str, object]] = []
    refused, stopped = 0, False
    with bar("", len(cases)) as update:
        try:
            for case in cases:

                def report(what: str, shape: str = case.shape) -> None:
                    update(description=f"{shape} {what}"[:60])

                try:
                    outcome = search.search(case, space, arch, device, progress=report)
                # It cannot be searched, or the device refuses all after a kernel's fault; what others gave is kept.
                except (ValueError, RuntimeError) as error:
                    refused += 1
                    console.print(f"{case.id}: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
                else:
                    if outcome.kept is None:
                        rows.append(search.cells(outcome, space, arch, facts))
                    console.print(_line(outcome), highlight=False, soft_wrap=True, markup=False)
                update(advance=1)
        except KeyboardInterrupt:
            stopped = True
    path = store.path_for(space.form, arch.name, user=args.user)
    for row in rows:
        print(store.line(space.form, row))
    if args.write and rows:
        store.write(space.form, arch.name, path, rows)
        print(f"{len(rows)} rows stored in {path}")
    elif rows:
        print(f"{len(rows)} rows would be stored in {path}; add --write")
    else:
        print("nothing to store: no configuration beats its present choice by more than noise")
    if refused:
        print(f"{refused} of {len(cases)} shapes could not be searched, see above", file=sys.stderr)
    if stopped:
        print(f"tune: stopped before the end, at {case.id}; what was found before is above", file=sys.stderr)
        return INTERRUPTED
    return 1 if refused else 0


def _space(op: str) -> SearchSpace:
    register.get(op)
    space = search.space_of(op)
    if space is None:
        tunable = ", ".join(name for name in register.registry() if search.space_of(name))
        raise UsageError(f"nothing about {op} can be tuned; operators that can: {tunable}")
    return space


def _cases(args: argparse.Namespace) -> list[Case]:
    default = {"combine": "aiter-3468"}.get(args.op, "flashmla")
    found = {case.id: case for name in args.set or [default] for case in sets.named(name, args.op)}
    return sets.matching(found, args.shapes)


def _line(outcome: Outcome) -> str:
    present = f"present {outcome.present.config} {outcome.present.us:.2f} us"
    if outcome.baseline is not None:
        present += f", {outcome.baseline.config} {outcome.baseline.us:.2f}"
    if outcome.left_to:
        return f"{outcome.case.id}: {present}; worth a row that leaves it to that"
    if outcome.best is None:
        return f"{outcome.case.id}: {present}; {outcome.kept}"
    best = f"best {outcome.best.config} {outcome.best.us:.2f} us ({outcome.verdict})"
    refused = f", {len(outcome.refused)} refused" if outcome.refused else ""
    return f"{outcome.case.id}: {present}; {best} of {outcome.tried}{refused}; {outcome.kept or 'worth a row'}"
