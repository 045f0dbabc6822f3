"""Engines that are measured in turns, each in a process that is stopped while it waits.

The cores of a host that others use as well differ in speed, and change: on an H200's a round took up to twice as
long as an equal one. So the engines' Python takes turns on one core, a round of each in about a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from vllm_model import Row, equal_tokens

MARK = "bench_vllm: "  # before the lines that a process answers with
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the profiler and the graphs are asked for in this process
    "VLLM_PLUGINS": "",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def serve(started: Row, answers: Mapping[str, Callable[..., Row]]) -> int:
    """In an engine's process: say what has started, then answer what is asked until nobody can ask any more."""
    _say(started)
    for line in sys.stdin:
        name, *given = json.loads(line)
        _say(answers[name](*given))
    return 0


def _say(value: Row) -> None:
    print(MARK + json.dumps(value), flush=True)


class Engine:
    """The process of a backend's engine: this program with `--alone BACKEND`, and with options of this engine's own."""

    def __init__(self, backend: str, *own: str) -> None:
        self.backend, self._core = backend, max(os.sched_getaffinity(0))
        command = [sys.executable, *sys.argv, "--alone", backend, *own]
        self._process = subprocess.Popen(
            command, env={**SETTINGS, **os.environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def started(self) -> Row:
        """What the engine says once it has started. From then on it runs only while it is asked something."""
        said = self._answer()
        os.sched_setaffinity(self._process.pid, {self._core})  # of its main thread alone
        return said

    def ask(self, *request: Any) -> Row:
        """The engine's answer to a name and its arguments."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._process.send_signal(signal.SIGSTOP)
                return dict(json.loads(line.removeprefix(MARK)))
            print(line, end="", flush=True)
        raise SystemExit(f"bench_vllm: the engine with {self.backend} ended with status {self._process.wait()}")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def timed(rounds: Sequence[Row]) -> Row:
    """The medians of an engine's rounds, and the least and the most tokens per second of one."""
    rates = [row["tokens_per_s"] for row in rounds]
    medians = {name: median(row[name] for row in rounds) for name in rounds[0]}
    return medians | {"least_tokens_per_s": min(rates), "most_tokens_per_s": max(rates)}


def gpu_share(row: Row) -> float:
    """How much of the time of an engine's step its CUDA graph takes."""
    return float(row["step_us"] * row["tokens_per_s"] / row["batch"] / 1e6)


def in_turns(
    engines: Sequence[Engine], shapes: Sequence[tuple[int, int]], rounds: int, keep: Callable[[Row], None]
) -> None:
    """Time `rounds` rounds of each (batch, context), all engines in each; then profile, and `keep` a row of each."""
    for batch, context in shapes:
        begun = [engine.ask("start", batch, context) for engine in engines]
        found = [[engine.ask("round") for engine in engines] for _ in range(rounds)]
        for engine, row, own in zip(engines, begun, zip(*found, strict=True), strict=True):
            shape = {"backend": engine.backend, "batch": batch, "context": context}
            keep(shape | row | engine.ask("profile", batch) | timed(own))


@contextlib.contextmanager
def started(engines: Sequence[Engine]) -> Iterator[None]:
    """Until the block ends, engines that start at once and then wait to be asked."""
    try:
        for engine in engines:
            begun = engine.started()
            print(f"{engine.backend}: engine in {begun['seconds']} s, pages of {begun['page']}", flush=True)
        yield
    finally:
        for engine in engines:
            engine.end()


def run(options: argparse.Namespace, same_tokens: bool, keep: Callable[[Row], None]) -> None:
    """Start the engines of all `options.backends` at once, check them one by one, and `keep` a row of each shape.

    same_tokens   compare greedy tokens with the first backend's
    """
    engines = [Engine(backend) for backend in options.backends.split(",")]
    with started(engines):
        first = None
        for engine in () if options.skip_check else engines:
            checked = engine.ask("check")
            print(f"{engine.backend}: {checked['compared']} attention outputs within {checked['error']:.1e} of fp32")
            if first is not None and same_tokens:
                print(f"  {equal_tokens(checked, first)}", flush=True)
            first = first or checked
        shapes = [(batch, context) for context in options.contexts for batch in options.batches]
        in_turns(engines, shapes, options.rounds, keep)
