"""Searches the configurations of our kernels on a shape: check each, time all briefly, then the best thoroughly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from mla_suite.archs import ArchSpec
from mla_suite.bench import inputs, runners
from mla_suite.bench.inputs import Call, Right
from mla_suite.bench.runners import Runner
from mla_suite.bench.sets import Case
from mla_suite.bench.timer import Effort, Verdict, cold_turns, device_rounds, judge, median, spread
from mla_suite.core import register
from mla_suite.core.dispatch import Supported
from mla_suite.core.op import Op
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


@dataclass
class Outcome:
    """The result of a search for one shape.

    present, best   configurations; `best` is the fastest finalist other than the present one
    verdict         of best against present; worth storing only when it is `faster`
    baseline        the fastest other backend and its microseconds; None when there is none
    left_to         whether the baseline is faster than both beyond noise, and the table can leave the shape to it
    tried, refused  how many configurations were timed; and why others were not
    """

    case: Case
    problem: Any
    present: Any
    present_rounds: list[float]
    best: Any
    best_rounds: list[float]
    verdict: Verdict | None
    baseline: tuple[str, float] | None = None
    baseline_rounds: list[float] = field(default_factory=list)
    left_to: bool = False
    tried: int = 0
    refused: list[str] = field(default_factory=list)

    @property
    def kept(self) -> str | None:
        """Why nothing is to be stored, in a sentence; None when `best` is, or that the shape is left to another."""
        if self.left_to:
            return None
        if self.verdict is None:
            return "no other configuration could be run and was right"
        if self.verdict.word != "faster":
            return f"within the noise of the present configuration: {self.verdict}"
        if self.baseline is not None and median(self.best_rounds) > self.baseline[1]:
            return f"{self.baseline[0]} takes {self.baseline[1]:.2f} us, less than the best of these"
        return None


def on_device(runner: Runner, turns: Sequence[Call], effort: Effort) -> list[float]:
    """Rounds by graph replay."""
    assert runner.run is not None
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
    right = inputs.expected(case, call)
    turns = inputs.rotation(call, cold_turns(case.sample.bytes, device, 2))

    present = runners.configured(op, backend, answer.config, answer.reason)
    present.error(call, right)
    found = Outcome(case, problem, answer.config, [], None, [], None)
    times: list[tuple[float, Any, Runner]] = []
    for config in space.candidates(problem, arch):
        if config == answer.config:
            continue
        progress(str(config))
        runner = runners.configured(op, backend, config, "candidate")
        try:
            runner.error(call, right)
            times.append((median(timer(runner, turns, BRIEF)), config, runner))
        except Exception as error:  # a candidate that cannot be built, launched or trusted is out, and says why
            found.refused.append(f"{config}: {' '.join(str(error).split())[:200]}")
    found.tried = len(times)
    finalists = sorted(times, key=lambda entry: entry[0])[:FINALISTS]

    rounds: dict[int, list[float]] = {index: [] for index in range(-1, len(finalists))}
    for _ in range(TURNS):  # in turn, so that what drifts drifts for all
        for index in rounds:
            runner = present if index < 0 else finalists[index][2]
            rounds[index] += timer(runner, turns, THOROUGH)
    found.present_rounds = rounds[-1]
    if finalists:
        best = min(range(len(finalists)), key=lambda index: median(rounds[index]))
        found.best, found.best_rounds = finalists[best][1], rounds[best]
        found.verdict = judge(found.present_rounds, found.best_rounds)
    other = _baseline(op, problem, arch, call, turns, right, device, timer)
    if other is not None:
        name, us, runner = other
        own = min((found.present_rounds, found.best_rounds), key=lambda r: median(r) if r else float("inf"))
        if us < median(own) and space.leaves(name) is not None:
            for _ in range(TURNS):
                found.baseline_rounds += timer(runner, turns, THOROUGH)
            us = median(found.baseline_rounds)
            found.left_to = judge(own, found.baseline_rounds).word == "faster"
        found.baseline = name, us
    return found


def _baseline(
    op: Op,
    problem: Any,
    arch: ArchSpec,
    call: Call,
    turns: Sequence[Call],
    right: Right,
    device: torch.device,
    timer: Timer,
) -> tuple[str, float, Runner] | None:
    """The fastest other backend that users could be given, and a brief time; the reference is no baseline."""
    times = []
    for backend in op.backends[1:]:
        if backend.name == "reference" or device.type not in backend.devices:
            continue
        answer = backend.supports(problem, arch)
        if isinstance(answer, Supported):
            runner = runners.configured(op, backend, answer.config, answer.reason)
            runner.error(call, right)
            times.append((backend.name, median(timer(runner, turns, BRIEF)), runner))
    return min(times, key=lambda entry: entry[1]) if times else None


def cells(outcome: Outcome, space: SearchSpace, arch: ArchSpec, environment: Mapping[str, Any]) -> dict[str, object]:
    """The row of an outcome's best configuration, or of the backend that it leaves the shape to, with its provenance.

    ValueError when that cannot be given.
    """
    if not environment["commit"]:
        raise UsageError("the commit of this package is unknown (no git checkout); name it with --commit")
    rounds, baseline, chosen = outcome.best_rounds, outcome.baseline, None
    if outcome.left_to and outcome.baseline is not None:
        rounds, chosen = outcome.baseline_rounds, space.leaves(outcome.baseline[0])
        baseline = "native", median(outcome.present_rounds)
    us = median(rounds)
    beside = dict(baseline=baseline[0], baseline_microseconds=f"{baseline[1]:.3f}") if baseline else {}
    named = ("cuda", "rocm", "torch", "triton")
    versions = " ".join(f"{name} {environment[name]}" for name in named if environment[name])
    return {
        **space.key(outcome.problem, arch),
        **(chosen or space.cells(outcome.problem, arch, outcome.best)),
        "kind": "measured",
        "microseconds": f"{us:.3f}",
        "spread_percent": f"{100 * spread(rounds) / us:.1f}",
        **beside,
        "device": environment["device"],
        "compute_units": environment["compute_units"],
        "driver": environment["driver"] or "unknown",
        "software": versions,
        "date": environment["date"],
        "commit": environment["commit"],
    }
