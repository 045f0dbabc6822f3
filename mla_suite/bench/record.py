"""Results of a run, as a JSON file, and the comparison of two of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mla_suite.bench import floors, noise, saving
from mla_suite.bench.floors import Floors
from mla_suite.bench.noise import Verdict
from mla_suite.errors import UsageError

FORMAT = 1
ENVIRONMENT = ("arch", "device", "compute_units", "date")
"""Fields in which every run says where it was measured; the rest of its environment may be absent."""


@dataclass
class Result:
    """One backend, or package, on one shape.

    op, shape, backend   what it is compared by
    facts                numbers to group by: batch, heads, q_len, kv_len or splits
    config, reason       what the backend was run with, and why
    bytes, flops         the least a kernel must do
    rounds               microseconds per call on the device (CPU: of the call); empty when it was not timed
    host_rounds          microseconds until an eager call returns; on a CPU empty
    sustained_us         microseconds per call on the device at the end of `--sustained` seconds without a pause;
                         0 where not measured
    floor_us, bound      the larger of the two floors, and which it is; 0 and '' where none was measured
    error, checked       relative error, and against what: fp64, reference, or definition (it is the reference itself)
    failure              why there is no time, in a sentence; '' when there is one
    wrong                the failure is a wrong result, not an unsupported case
    counted              bounds per compute unit from the emulator's counters, clocks by name; never times
    instructions         wave instructions of all launches, from the same counters; 0 where nothing was counted
    """

    op: str
    shape: str
    backend: str
    facts: dict[str, int]
    bytes: int
    flops: int
    config: str = ""
    reason: str = ""
    rounds: list[float] = field(default_factory=list)
    host_rounds: list[float] = field(default_factory=list)
    sustained_us: float = 0.0
    floor_us: float = 0.0
    bound: str = ""
    error: float = 0.0
    checked: str = ""
    failure: str = ""
    wrong: bool = False
    counted: dict[str, float] = field(default_factory=dict)
    instructions: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.shape, self.backend

    @property
    def us(self) -> float:
        return noise.median(self.rounds) if self.rounds else 0.0

    @property
    def host_us(self) -> float:
        return noise.median(self.host_rounds) if self.host_rounds else 0.0

    @property
    def spread_percent(self) -> float:
        return 100 * noise.spread(self.rounds) / self.us if self.rounds else 0.0

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.us / 1e3 if self.rounds else 0.0

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6 if self.rounds else 0.0

    @property
    def over_floor(self) -> float:
        """Time over floor; 0 where no floor was measured."""
        return self.us / self.floor_us if self.rounds and self.floor_us else 0.0


@dataclass
class Report:
    """A whole run.

    environment   as `environment.describe` finds it; a `note` that a person added to a file is shown with its numbers
    """

    environment: dict[str, Any]
    command: str
    sets: list[str]
    results: list[Result]
    floors: Floors | None = None

    @property
    def on_gpu(self) -> bool:
        return self.environment["arch"] != "cpu"

    def save(self, path: Path) -> None:
        """Write the run as JSON, whole or not at all. ValueError when it cannot be written."""
        saving.write_whole(path, json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        """Numbers as measured, and those derived from them for readers that do not want to compute."""
        derived = ("us", "host_us", "spread_percent", "gb_per_s", "tflops", "over_floor")
        rows = [asdict(r) | {"derived": {name: round(getattr(r, name), 4) for name in derived}} for r in self.results]
        return {
            "format": FORMAT,
            "environment": self.environment,
            "command": self.command,
            "sets": self.sets,
            "floors": self.floors.as_json() if self.floors else None,
            "results": rows,
        }


def load(path: Path) -> Report:
    """A saved run. ValueError, in a sentence, for a file that is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as the JSON of an earlier run: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        given = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise UsageError(f"{path} is not a run in format {FORMAT} (it says {given!r}); save one with bench --save")
    known = {entry.name for entry in fields(Result)}
    try:
        for name in ENVIRONMENT:
            found["environment"][name]
        results = [Result(**{name: row[name] for name in known if name in row}) for row in found["results"]]
        ceilings = floors.from_json(found["floors"]) if found["floors"] else None
        report = Report(dict(found["environment"]), str(found["command"]), list(found["sets"]), results, ceilings)
        for result in report.results:
            _check(result)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} lacks a part of a run, or one is of another kind: {error!r}") from error
    return report


def _check(result: Result) -> None:
    for us in (*result.rounds, *result.host_rounds):
        if not us > 0:
            raise TypeError(f"{result.op} {result.shape} {result.backend} has a round of {us} microseconds")


@dataclass(frozen=True)
class Comparison:
    """One shape in two runs."""

    old: Result
    new: Result
    verdict: Verdict


def compare(old: Report, new: Report) -> list[Comparison]:
    """Every shape that both runs timed, judged by both runs' spread. Raises ValueError for runs of two machines.

    Where the ceilings of the new run are lower than those of the old, the card itself was slower: so much is allowed.
    """
    need_same_machine(old, new.environment)
    earlier = {result.key: result for result in old.results if result.rounds}
    return [
        Comparison(
            earlier[new_.key],
            new_,
            noise.judge(earlier[new_.key].rounds, new_.rounds, _drift(old.floors, new.floors, new_.bound)),
        )
        for new_ in new.results
        if new_.rounds and new_.key in earlier
    ]


def need_same_machine(old: Report, environment: Mapping[str, Any]) -> None:
    """ValueError when a run's times and those measured in `environment` say nothing about each other."""
    for name in ("arch", "device"):
        before, now = old.environment[name], environment[name]
        if before != now:
            raise UsageError(
                f"the old run was on {name} {before!r}, this one on {now!r}: times of two machines are not compared; "
                "compare each with its floors"
            )


MAX_DRIFT = 0.03
"""Cards of one model differ by 2.5 % in memory-bound work; a ceiling that fell further is a fault worth failing for."""


def _drift(old: Floors | None, new: Floors | None, bound: str) -> float:
    if old is None or new is None or not bound:
        return 0.0
    rates = (old.gb_per_s, new.gb_per_s) if bound == "memory" else (old.tflops, new.tflops)
    return min(max(rates[0] / rates[1] - 1, 0.0), MAX_DRIFT)


def missing(old: Report, new: Report) -> Iterator[tuple[Result, str]]:
    """Yields each result the old run timed and the new one could not, with the reason: as much a regression as time."""
    tried: Mapping[tuple[str, str, str], Result] = {result.key: result for result in new.results}
    for result in old.results:
        if result.rounds and result.key in tried and not tried[result.key].rounds:
            yield result, tried[result.key].failure


def slower(comparisons: Sequence[Comparison]) -> list[Comparison]:
    return [entry for entry in comparisons if entry.verdict.word == "slower"]
