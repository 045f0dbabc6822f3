"""Searches combine's configurations without a GPU, by the emulator's bound in clocks. A bound is never a time.

  python tools/counted_search.py gfx942,gfx950            search, and print the rows
  python tools/counted_search.py gfx942,gfx950 --write    search, and store them in the tuned tables

Every shape gets a row: the configuration with the lowest bound. Kernels that do not ship are compiled first, into this
user's cache. Ctrl-C ends a search early and keeps what it found.

The bound of a call is the largest of four. Memory: the bytes of all workgroups at the chip's rate. Of the compute unit
with the most workgroups: the clocks in which its SIMDs issue the vector instructions, the bank clocks of its LDS at 128
bytes a clock, and the clocks in which a wave issues its instructions, one in 4 clocks, once for every time that the
unit is filled. A workgroup's counts are those of one that is full, executed and compared with fp64. Neither latency nor
caches are in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from mla_suite import emulator
from mla_suite.archs import ArchSpec, combine_search
from mla_suite.archs import combine as combine_config
from mla_suite.archs.combine import CombineConfig
from mla_suite.bench import environment, sets, store
from mla_suite.bench.sets import Case
from mla_suite.cli import INTERRUPTED, each_emulated
from mla_suite.cli.tune import add_search_arguments, build_for_search
from mla_suite.core import register
from mla_suite.core.tuning import SearchSpace
from mla_suite.launch import emulate
from mla_suite.ops.combine import CombineArgs
from mla_suite.ops.combine import Problem as CombineProblem
from mla_suite.testing import Exact, assert_close

EQUAL = 1.01
CLOCKS_PER_ISSUE = 4  # of a wave: its SIMD takes an instruction of each kind every 4 clocks


@dataclass(frozen=True)
class GroupCounts:
    """Counts of one full workgroup: bytes of global memory, issue clocks of a wave, LDS bank clocks, instructions."""

    memory_bytes: float
    vector: float
    lds: float
    instructions: float


def exact(partial_out: torch.Tensor, partial_lse: torch.Tensor) -> Exact:
    """The merge of splits [splits, ...] by the formula."""
    lse, values = partial_lse.double(), partial_out.double()
    weights = torch.softmax(lse, 0)[..., None]
    return Exact((weights * values).sum(0), torch.logsumexp(lse, 0), (weights * values.abs()).sum(0))


@cache
def group_counts(point: CombineConfig, splits: int) -> GroupCounts:
    """Execute the kernel on `point.rows` rows of `splits` splits. ValueError when it is wrong or breaks a rule."""
    draw = torch.Generator().manual_seed(splits)
    partial_out = torch.randn(splits, point.rows, point.head_dim_v, generator=draw)
    partial_lse = torch.randn(splits, point.rows, generator=draw) * 3
    out = torch.empty(1, point.rows, point.head_dim_v, dtype=torch.bfloat16)
    lse = torch.empty(1, point.rows)
    native = register.get("combine").backends[0]
    with emulate(point.arch.name), emulator.configured(collect=True) as reports:
        native.run(point, (out, lse), CombineArgs(partial_out, partial_lse, num_splits=splits))
    assert_close(out[0], lse[0], exact(partial_out, partial_lse))
    (report,) = reports
    if report.findings:
        raise ValueError(f"{point.instance}: {report.findings[0]}")
    groups, waves = point.slices, point.slices * point.waves
    return GroupCounts(
        report.memory_bytes() / groups,
        report.valu_clocks() / waves,
        report.lds_clocks() / groups,
        report.instructions() / waves,
    )


def bound(point: CombineConfig, rows: int, splits: int) -> dict[str, float]:
    """Clocks below which `rows` rows over the batch cannot be combined, by what sets them."""
    arch, counts = point.arch, group_counts(point, splits)
    groups = point.grid(rows)
    busiest = -(-groups // arch.compute_units)
    bytes_per_clock = arch.memory_bytes_per_s / (arch.clock_mhz * 1e6)
    return {
        "memory": groups * counts.memory_bytes / bytes_per_clock,
        "vector": -(-busiest * point.waves // arch.simds) * counts.vector,
        "LDS": busiest * counts.lds,
        "issue": -(-busiest // point.resident) * CLOCKS_PER_ISSUE * counts.instructions,
    }


@dataclass(frozen=True)
class CountedOutcome:
    """The configuration with the lowest bound for one shape, and the rule's, with their bounds in clocks."""

    case: Case
    problem: CombineProblem
    best: CombineConfig
    clocks: float
    limiter: str
    rule: CombineConfig
    rule_clocks: float
    tried: int


def problem_of(case: Case) -> CombineProblem:
    """The problem of a case of combine, without its tensors."""
    batch, rows, splits = (case.facts[name] for name in ("batch", "heads", "splits"))
    return CombineProblem(batch, rows, 512, splits, torch.bfloat16, False, batch * splits)


def search(case: Case, arch: ArchSpec) -> CountedOutcome:
    """The configuration of lowest bound. Bounds within 1 % count as equal: then the rule's, else the one that issues
    the fewest instructions."""
    problem = problem_of(case)
    rows, splits = problem.rows * problem.batch, problem.num_splits
    ruled = combine_config.rule(arch, problem.head_dim_v, rows, splits)
    points = {point.instance: point for point in combine_search.candidates(problem, arch)}
    bounds = {name: bound(point, rows, splits) for name, point in sorted(points.items())}
    clocks = {name: max(parts.values()) for name, parts in bounds.items()}
    lowest = [name for name in clocks if clocks[name] <= EQUAL * min(clocks.values())]
    best = ruled.instance if ruled.instance in lowest else min(lowest, key=lambda name: bounds[name]["issue"])
    limiter = max(bounds[best], key=lambda name: bounds[best][name])
    return CountedOutcome(
        case, problem, points[best], clocks[best], limiter, ruled, clocks[ruled.instance], len(points)
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", metavar="ARCH", type=each_emulated, help="archs between commas")
    add_search_arguments(parser)
    parser.add_argument("--date", metavar="YYYY-MM-DD", help="date named in the rows (default: today)")
    args = parser.parse_args(argv)
    facts = environment.describe(torch.device("cpu"))
    commit, date = args.commit or str(facts["commit"]), args.date or str(facts["date"])
    if not commit:
        parser.error("the commit of this package is unknown (no git checkout); name it with --commit")
    try:
        found = {case.id: case for name in args.set or ["aiter-3468"] for case in sets.named(name, "combine")}
        cases = sets.matching(found, args.shapes)
    except ValueError as error:
        parser.error(str(error))
    space = combine_search.SPACE
    for arch in args.archs:
        rows: list[dict[str, object]] = []
        try:
            build_for_search(space, arch)
            for case in cases:
                rows.append(_row(search(case, arch), space, arch) | {"kind": "counted", "date": date, "commit": commit})
        except KeyboardInterrupt:
            print(f"stopped before the end, on {arch.name}; what was found is above", file=sys.stderr)
            if not rows:
                return INTERRUPTED
        path = store.path_for(space.form, arch.name, user=args.user)
        if args.write:
            store.write(space.form, arch.name, path, rows)
        print(f"{len(rows)} rows {'stored' if args.write else 'would be stored'} in {path}")
        if len(rows) < len(cases):
            return INTERRUPTED
    return 0


def _row(found: CountedOutcome, space: SearchSpace, arch: ArchSpec) -> dict[str, object]:
    print(
        f"{found.case.id} on {arch.name}: {found.best.instance} {found.clocks:.0f} clocks ({found.limiter}), the "
        f"lowest of {found.tried}; the rule's {found.rule.instance} {found.rule_clocks:.0f}"
    )
    return {**space.key(found.problem, arch), **space.cells(found.problem, arch, found.best)}


if __name__ == "__main__":
    sys.exit(main())
