"""Exact counts of a large problem from short ones: equal sequences are emulated once, long contexts by their loop.

A work tile of a plan costs a constant for its beginning and end, and the same again for every `PERIOD` keys between,
because the loop over keys then takes the same branches. A sequence is therefore emulated with its tiles shortened by
whole periods, and the periods are added. A launch in which every sequence is empty counts what the workgroups cost
without keys; what a sequence adds to it does not depend on its neighbours. A test compares every counter with a whole
launch.

Kernels with fp8 softmax weights are the exception: a new largest score costs them a branch. Periods are counted without
any, so that their counts are of the least work: up to 3 % below those of random values. sparse_decode branches where an
index selects nothing, so its counts are those of the one sequence that is drawn, within 1 % of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch

from mla_suite.bench import inputs
from mla_suite.bench.inputs import PLAN, Call
from mla_suite.bench.sets import Case
from mla_suite.core import register
from mla_suite.core.dispatch import Choice
from mla_suite.core.op import Op
from mla_suite.emulator import Report, SanitizerError, configured
from mla_suite.launch import LaunchError
from mla_suite.ops.combine.samples import sample as combine_sample
from mla_suite.ops.decode import DecodeArgs
from mla_suite.ops.plan.metadata import OPEN, Plan, Word, WorkTile

PERIOD = 512
"""Keys after which the loop of a decode kernel repeats: a workgroup fetches this many keys' page numbers at a time."""
STEADY = 1024
"""Keys of a work tile that has a first and a last period, so another one between them adds what any other does."""
MAX_SIGNATURES = 16
"""With more kinds of sequences than this, all sequences are emulated, shortened, in one launch."""

SEQ_LENS = DecodeArgs.__match_args__.index("seq_lens")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Tile:
    """A work tile: how many keys it has, whether it writes a partial result, and whether it ends its sequence."""

    keys: int
    partial: bool
    last: bool

    @property
    def periods(self) -> int:
        """How many periods can be left out."""
        return max(0, (self.keys - STEADY) // PERIOD)

    @property
    def shortened(self) -> int:
        """Keys that remain without them."""
        return self.keys - self.periods * PERIOD


COUNTERS = tuple(
    entry.name
    for entry in fields(Report)
    if entry.name not in ("kernel", "arch", "findings", "names", "classes", "passes", "modelled", "groups")
)
"""The fields of a Report that count: arrays over instructions, and bytes by buffer."""


def total(parts: Sequence[tuple[int, Report]]) -> Report:
    """The sum of launches of one kernel, each counted as often as its integer says (it may be negative).

    ValueError when they are launches of two kernels, which a shorter problem may have chosen.
    """
    first = parts[0][1]
    for _, report in parts:
        if report.kernel != first.kernel or list(report.names) != list(first.names):
            raise ValueError(f"launches of {first.kernel} and of {report.kernel} are not added to each other")
    counts: dict[str, Any] = {}
    for name in COUNTERS:
        tables = [(factor, getattr(report, name)) for factor, report in parts]
        if isinstance(tables[0][1], dict):
            counts[name] = {key: sum(factor * table.get(key, 0) for factor, table in tables) for key in tables[0][1]}
        else:
            counts[name] = sum(factor * table for factor, table in tables)
    return replace(first, modelled=None, groups=None, **counts)


def launches(
    op: Op, choice: Choice, call: Call, *, time: bool = False
) -> tuple[list[Report], tuple[torch.Tensor, ...]]:
    """The reports of one call in the emulator that is active, and its outputs. SanitizerError for any finding."""
    with configured(collect=True, time=time) as reports:
        outputs = inputs.outputs_for(op, call)
        choice.backend.run(choice.supported.config, outputs, op.Args(*call.args, **call.kwargs))
    for report in reports:
        if report.findings:
            raise SanitizerError(report)
    return reports, outputs


@dataclass(frozen=True)
class Counted:
    """Reports of a problem, one per launch; and the relative error of what was executed."""

    reports: list[Report]
    error: float


_periods: dict[tuple[object, ...], Report] = {}


def period(case: Case, choice: Choice) -> Report:
    """Counts that one more period of a work tile adds, for all row tiles of a sequence whose scores are all equal.

    LaunchError when a second period adds something else than the first.
    """
    key = (choice.supported.config, case.facts["heads"], case.facts["q_len"], *sorted(case.options.items()))
    if key not in _periods:
        op = register.get(case.op)
        found = []
        for keys in (STEADY, STEADY + PERIOD, STEADY + 2 * PERIOD):
            args, kwargs = case.at([keys]).make(CPU)
            args[0].zero_()
            found.append(launches(op, choice, Call(args, kwargs | {"num_splits": 1}))[0][0])
        added = [total([(1, longer), (-1, shorter)]) for shorter, longer in pairwise(found)]
        if (added[0].times != added[1].times).any() or (added[0].lds_clocks_128 != added[1].lds_clocks_128).any():
            raise LaunchError(f"{found[0].kernel} has no steady state of {PERIOD} keys: count it whole")
        _periods[key] = added[0]
    return _periods[key]


def planned_decode(case: Case, call: Call, choice: Choice) -> Counted:
    """Counts of decode with a plan in the emulator that is active; `call` is that of `one_pool`."""
    op, config = register.get(case.op), choice.supported.config
    plan = Plan.read(call.args[PLAN])
    sequences = _tiles(plan, case.lens)
    lens = [sum(tile.shortened for tile in tiles) for tiles in sequences]
    short = Call((*call.args[:PLAN], _shortened(call.args[PLAN], plan, sequences), *call.args[PLAN + 1 :]), call.kwargs)

    def at(kept: Sequence[int]) -> tuple[list[Report], tuple[torch.Tensor, ...]]:
        args = list(short.args)
        args[SEQ_LENS] = torch.tensor(kept, dtype=torch.int32)
        args[PLAN] = short.args[PLAN].clone()  # a launch may write its counters
        return launches(op, choice, Call(tuple(args), short.kwargs))

    kinds = Counter(sequences)
    if len(kinds) > min(MAX_SIGNATURES, len(lens) // 2):
        reports, outputs = at(lens)
        error = _error(op, config, short, outputs, lens, 0)
    else:
        empty, _ = at([0] * len(lens))
        parts: list[list[tuple[int, Report]]] = [[(1, report)] for report in empty]
        error = 0.0
        for tiles, count in kinds.items():
            chosen = sequences.index(tiles)
            alone, outputs = at([keys if b == chosen else 0 for b, keys in enumerate(lens)])
            error = max(error, _error(op, config, short, outputs, lens, chosen))
            for sums, with_it, without in zip(parts, alone, empty, strict=True):
                sums += [(count, with_it), (-count, without)]
        reports = [total(sums) for sums in parts]
    left_out = sum(tile.periods for tiles in sequences for tile in tiles)
    if left_out:
        reports[0] = total([(1, reports[0]), (left_out, period(case, choice))])
    return Counted(reports, error)


def one_pool(case: Case) -> Call:
    """The call of a case with all of its metadata, over the pages that one sequence would have.

    Counts do not depend on values, so all sequences of decode may read the same keys.
    """
    if case.op == "sparse_decode":
        return Call(*case.at([0] * case.facts["batch"]).make(CPU))
    (q, cache, _, table, _, indices, *rest), kwargs = case.at([max(case.lens)]).make(CPU)
    q = q.expand(len(case.lens), *q.shape[1:]).contiguous()
    seq_lens = torch.tensor(case.lens, dtype=torch.int32)
    indptr = None
    if table is None:
        counts = [-(-length // cache.shape[1]) for length in case.lens]
        indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        indices = torch.cat([indices[:count] for count in counts])
    else:
        table = table.expand(len(case.lens), -1).contiguous()
    return inputs.with_plan(case, Call((q, cache, seq_lens, table, indptr, indices, *rest), kwargs))


def _tiles(plan: Plan, lens: Sequence[int]) -> list[tuple[Tile, ...]]:
    """The work tiles of each sequence, in order."""
    found: list[list[Tile]] = [[] for _ in lens]
    for sequence, first, end, row in plan.work_tiles:
        found[sequence].append(Tile(max(0, min(end, lens[sequence]) - first), row >= 0, end == OPEN))
    return [tuple(tiles) for tiles in found]


def _shortened(words: torch.Tensor, plan: Plan, sequences: Sequence[Sequence[Tile]]) -> torch.Tensor:
    """The plan with every work tile shortened: the same tiles of the same workgroups, at other keys."""
    words = words.clone()
    at = plan.header[Word.WORK_TILES]
    for tiles in sequences:
        first = 0
        for tile in tiles:
            words[at + WorkTile.FIRST_KEY] = first
            first += tile.shortened
            words[at + WorkTile.END_KEY] = OPEN if tile.last else first
            at += plan.header[Word.WORK_TILE_WORDS]
    return words


def _error(op: Op, config: Any, call: Call, outputs: tuple[torch.Tensor, ...], lens: Sequence[int], b: int) -> float:
    """Relative error of one sequence's results; ValueError when they are not right."""
    q, cache, _, table, indptr, indices, *rest = call.args
    if table is None:
        indices, indptr = indices[indptr[b] :], torch.tensor([0, len(indices) - int(indptr[b])], dtype=torch.int32)
    else:
        table = table[b : b + 1]
    length = torch.tensor([lens[b]], dtype=torch.int32)
    alone = Call((q[b : b + 1], cache, length, table, indptr, indices, *rest[:-1]), call.kwargs)
    return inputs.error(op, config, tuple(output[b : b + 1] for output in outputs), alone)


def sparse(case: Case, choice: Choice) -> Counted:
    """Counts of sparse_decode without a plan, of sequences that all select equally many keys.

    ValueError when sequences share workgroups.
    """
    op, config = register.get(case.op), choice.supported.config
    batch, tokens = case.facts["batch"], case.facts["batch"] * case.facts["q_len"]
    args, kwargs = case.at([0] * batch).make(CPU)
    nothing = [torch.zeros(batch, dtype=torch.int32) for _ in args[1]]
    empty, _ = launches(op, choice, Call((*args[:4], nothing, *args[5:]), kwargs))
    workgroups = int(empty[0].times[0]) * config.arch.wavefront // config.threads
    splits, rest = divmod(workgroups, tokens * config.tiles(case.facts["heads"]))
    if rest or not splits:
        raise ValueError(f"{workgroups} workgroups do not divide among {tokens} query tokens: count it whole")
    args, kwargs = case.at([0]).make(CPU)
    call = Call(args, kwargs | {"num_splits": splits})
    reports, outputs = launches(op, choice, call)
    error = inputs.error(op, config, outputs, call)
    counted = [total([(batch, reports[0])])]
    if len(empty) > 1:
        counted.append(_merge(case, tokens, splits))
    return Counted(counted, error)


def _merge(case: Case, tokens: int, splits: int) -> Report:
    """Counts of combine behind a sparse_decode in `splits` splits."""
    combine = register.get("combine")
    args, kwargs = combine_sample(tokens, case.facts["heads"], splits, sink=bool(case.options["sink"])).make(CPU)
    choice = combine.choose(combine.Args(*args, **kwargs))
    if choice.backend.name != "native":
        raise ValueError(f"the merge has no kernel: {choice}")
    return launches(combine, choice, Call(args, kwargs))[0][0]
