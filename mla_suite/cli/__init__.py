"""`python -m mla_suite <command>`, one file per command.

A command module has `add_arguments(parser)` and `run(args) -> int`, and its docstring is its `--help`. What it raises
as a UsageError is a sentence about its arguments: it is printed, and the exit status is 2; after Ctrl-C it is 130.
`positive`, `sizes`, `writable`, `emulated` and `each_emulated` are types of arguments that several programs take; each
refuses in a sentence, before anything has begun.
`bar` and `compiling` are the progress bars of those that take long, on stderr; where that is no terminal, lines.
A command is imported when it is asked for: `build` works without torch, and none waits for what others need.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mla_suite.errors import UsageError

if TYPE_CHECKING:
    from mla_suite.archs import ArchSpec

INTERRUPTED = 130
LINE_EVERY_S = 10.0  # of a build of hundreds of steps, whose output is no terminal

COMMANDS = {
    "demo": "decode a small DeepSeek-style model through torch.compile and compare it with the eager reference",
    "build": "compile the kernels for AMD and NVIDIA GPUs; needs no GPU",
    "kernels": "show what was built: registers, LDS, spills, occupancy, instruction counts",
    "formats": "print the byte map of every KV cache format",
    "bench": "measure the operators on named shapes, each result checked first",
    "emulate": "run an operator on an emulated AMD GPU: numbers, sanitizer findings, counters and bounds",
    "replay": "run a call again that check mode found wrong, and compare it with the reference",
    "tune": "search configurations on this GPU and store the best with their provenance",
    "explain": "say which backend would run a problem, and why",
}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}; it takes a whole number of 1 or more")
    return int(text)


def sizes(text: str) -> tuple[int, ...]:
    """Numbers between commas."""
    return tuple(positive(part.strip()) for part in text.split(","))


def writable(text: str) -> Path:
    """A file for results."""
    from mla_suite.bench import saving

    try:
        saving.require_writable(Path(text))
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from error
    return Path(text)


def emulated(text: str) -> ArchSpec:
    """An arch whose machine code the emulator executes."""
    from mla_suite.launch import emulate

    try:
        with emulate(text) as arch:
            return arch
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def each_emulated(text: str) -> list[ArchSpec]:
    """Such archs between commas."""
    return [emulated(part) for part in text.split(",")]


@contextmanager
def bar(first: str, total: int, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Yields rich's `Progress.update` of one task, which begins with a description and a number of steps.

    Where the output is no terminal, each new description is a line of its own, with the seconds since the first.
    """
    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        yield _lines(first, quiet=quiet)
        return
    columns = TextColumn("{task.description:60}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as shown:
        yield partial(shown.update, shown.add_task(first, total=total))


def _lines(first: str, *, quiet: bool) -> Callable[..., None]:
    started = time.perf_counter()

    def update(*, description: str | None = None, **_: object) -> None:
        if description and not quiet:
            print(f"{time.perf_counter() - started:7.1f} s  {description}", file=sys.stderr, flush=True)

    update(description=first)
    return update


@contextmanager
def compiling() -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (finished compiler steps, their total). The bar appears with the first step.

    Its description, which is a line where the output is no terminal, changes every ten seconds and at the end.
    """
    update: Callable[..., None] | None = None
    last = 0.0

    def step(number: int, of: int) -> None:
        nonlocal update, last
        said = f"compiling {number} of {of}"
        if update is None:
            update, last = stack.enter_context(bar(said, of)), time.perf_counter()
        elif number == of or time.perf_counter() - last >= LINE_EVERY_S:
            update(description=said)
            last = time.perf_counter()
        update(completed=number, total=of)

    with ExitStack() as stack:
        yield step
