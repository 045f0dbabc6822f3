"""The error of a command that was asked for something it cannot do, and that of a check that found a difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """The message alone tells the user what is wrong; any other exception of a command keeps its traceback."""


class WrongResult(RuntimeError):
    """A call of an operator gave a result that is further from the exact one than the stated bounds allow."""


@contextmanager
def usage() -> Iterator[None]:
    """While the block runs, a ValueError is about what the user asked for: a problem that an operator refuses."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error
