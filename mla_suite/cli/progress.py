"""The progress bar of commands that take long, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def bar(first: str, total: int, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Yields rich's `Progress.update` of one task, which begins with a description and a number of steps."""
    columns = (TextColumn("{task.description:60}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, quiet=quiet)) as shown:
        yield partial(shown.update, shown.add_task(first, total=total))


@contextmanager
def compiling() -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (finished compiler steps, their total). The bar appears with the first step."""
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    shown = Progress(*columns, console=console, disable=not console.is_terminal)
    task = shown.add_task("", total=None)

    def step(number: int, of: int) -> None:
        shown.start()
        shown.update(task, completed=number, total=of)

    try:
        yield step
    finally:
        shown.stop()
