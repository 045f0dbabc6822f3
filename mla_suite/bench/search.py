"""Searches the configurations of our kernels on a shape: check each, time all briefly, then the best thoroughly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from mla_suite.archs import ArchSpec
from mla_suite.bench import inputs, runners
from mla_suite.bench.inputs import Call
from mla_suite.bench.runners import Runner
from mla_suite.bench.sets import Case
from mla_suite.bench.timer import Effort, Verdict, cold_turns, device_rounds, judge, median, spread
from mla_suite.core import register
from mla_suite.core.dispatch import Supported
from mla_suite.core.tuning import SearchSpace
from mla_suite.errors import UsageError

BRIEF = Effort(rounds=1, rest_s=0.05)
THOROUGH = Effort(rounds=2)
TURNS = 4  # of THOROUGH rounds, in turn with those of the others
FINALISTS = 3

Timer = Callable[[Runner, Sequence[Call], Effort], list[float]]


def space_of(op: str) -> SearchSpace | None:
    """Returns the search space of an operator's kernels; None where there is nothing to choose."""
    module = f"mla_suite.archs.{op}_search"
    return import_module(module).SPACE if find_spec(module) is not None else None


class Contender(NamedTuple):
    """A configuration, or another backend by its name, and its rounds."""

    config: Any
    runner: Runner
    rounds: list[float]

    @property
    def us(self) -> float:
        return median(self.rounds)


@dataclass(frozen=True)
class Outcome:
    """The result of a search for one shape.

    best            the fastest finalist other than the present configuration
    verdict         of best against present; worth storing only when it is `faster`
    baseline        the fastest other backend; None when there is none
    left_to         whether the baseline is faster than both beyond noise, and the table can leave the shape to it
    tried, refused  how many configurations were timed; and why others were not
    """

    case: Case
    problem: Any
    present: Contender
    best: Contender | None
    verdict: Verdict | None
    baseline: Contender | None
    left_to: bool
    tried: int
    refused: list[str]

    @property
    def kept(self) -> str | None:
        """Why nothing is to be stored, in a sentence; None when `best` is, or that the shape is left to another."""
        if self.left_to:
            return None
        if self.verdict is None or self.best is None:
            return "no other configuration could be run and was right"
        if self.verdict.word != "faster":
            return f"within the noise of the present configuration: {self.verdict}"
        if self.baseline is not None and self.best.us > self.baseline.us:
            return f"{self.baseline.config} takes {self.baseline.us:.2f} us, less than the best of these"
        return None


def on_device(runner: Runner, turns: Sequence[Call], effort: Effort) -> list[float]:
    """Rounds by graph replay."""
    return device_rounds(runner.run, turns, effort)


def search(
    case: Case,
    space: SearchSpace,
    arch: ArchSpec,
    device: torch.device,
    timer: Timer = on_device,
    progress: Callable[[str], None] = lambda what: None,
) -> Outcome:
    """Try every candidate on one shape. ValueError when our kernels do not take the shape, or are wrong as they are."""
    op = register.get(case.op)
    call = inputs.make(case, device)
    problem = op.problem(*call.args, **call.kwargs)
    backend = op.backends[0]
    answer = backend.supports(problem, arch)
    if not isinstance(answer, Supported):
        raise UsageError(f"{case.id}: {backend.name} does not take it: {answer.reason}")
    turns = inputs.rotation(call, cold_turns(case.sample.bytes, device, 2))

    present = Contender(answer.config, runners.configured(op, backend, answer.config, answer.reason), [])
    present.runner.error(call)
    tried, refused = list[Contender](), list[str]()
    for config in space.candidates(problem, arch):
        if config == answer.config:
            continue
        progress(str(config))
        runner = runners.configured(op, backend, config, "candidate")
        try:
            runner.error(call)
            tried.append(Contender(config, runner, timer(runner, turns, BRIEF)))
        except Exception as error:  # a candidate that cannot be built, launched or trusted is out, and says why
            refused.append(f"{config}: {' '.join(str(error).split())[:200]}")

    finalists = [each._replace(rounds=[]) for each in sorted(tried, key=lambda each: each.us)[:FINALISTS]]
    for _ in range(TURNS):  # in turn, so that what drifts drifts for all
        for each in (present, *finalists):
            each.rounds.extend(timer(each.runner, turns, THOROUGH))
    best = min(finalists, key=lambda each: each.us, default=None)
    verdict = judge(present.rounds, best.rounds) if best else None

    others = []
    for backend in op.backends[1:]:
        answer = backend.supports(problem, arch)
        # Users could be given any of them but the reference.
        if backend.name != "reference" and device.type in backend.devices and isinstance(answer, Supported):
            runner = runners.configured(op, backend, answer.config, answer.reason)
            runner.error(call)
            others.append(Contender(backend.name, runner, timer(runner, turns, BRIEF)))
    baseline, left_to = min(others, key=lambda each: each.us, default=None), False
    own = min((each for each in (present, best) if each), key=lambda each: each.us)
    if baseline is not None and baseline.us < own.us and space.leaves(baseline.config) is not None:
        rounds = [us for _ in range(TURNS) for us in timer(baseline.runner, turns, THOROUGH)]
        baseline = baseline._replace(rounds=rounds)
        left_to = judge(own.rounds, rounds).word == "faster"
    return Outcome(case, problem, present, best, verdict, baseline, left_to, len(tried), refused)


def cells(outcome: Outcome, space: SearchSpace, arch: ArchSpec, environment: Mapping[str, Any]) -> dict[str, object]:
    """The row of an outcome's best configuration, or of the backend that it leaves the shape to, with its provenance.

    ValueError when that cannot be given.
    """
    if not environment["commit"]:
        raise UsageError("the commit of this package is unknown (no git checkout); name it with --commit")
    chosen, beside = (outcome.baseline, outcome.present) if outcome.left_to else (outcome.best, outcome.baseline)
    assert chosen is not None, f"{outcome.case.id}: there is nothing to store"
    left, baseline = None, dict[str, object]()
    if beside is not None:
        baseline = dict(baseline=beside.config, baseline_microseconds=f"{beside.us:.3f}")
    if outcome.left_to:
        left, baseline["baseline"] = space.leaves(chosen.config), "native"
    named = ("cuda", "rocm", "torch", "triton")
    versions = " ".join(f"{name} {environment[name]}" for name in named if environment[name])
    return {
        **space.key(outcome.problem, arch),
        **(left or space.cells(outcome.problem, arch, chosen.config)),
        "kind": "measured",
        "microseconds": f"{chosen.us:.3f}",
        "spread_percent": f"{100 * spread(chosen.rounds) / chosen.us:.1f}",
        **baseline,
        "device": environment["device"],
        "compute_units": environment["compute_units"],
        "driver": environment["driver"] or "unknown",
        "software": versions,
        "date": environment["date"],
        "commit": environment["commit"],
    }
