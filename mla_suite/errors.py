"""Errors about what was asked of a command or an operator, and that of a check that found a difference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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


class CallError(Exception):
    """A call that is refused: `<function>: <given>; <possible>`. A word of the last two that is the name of an argument
    stands for that argument."""

    def __init__(self, function: str, given: str, possible: str) -> None:
        super().__init__(function, given, possible)

    def __str__(self) -> str:
        function, given, possible = self.args
        return f"{function}: {given}; {possible}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"  # Dynamo reports an error of an operator by it

    def said_by(self, function: str, words: Mapping[str, str]) -> CallError:
        """The error of an operator as a function that calls it says it.

        words  the operator's names of arguments -> the function's, where they differ
        """
        names = "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "$^"
        whole = re.compile(rf"(?<!\w)(?:{names})(?!\w)")
        _, *parts = self.args
        return type(self)(function, *[whole.sub(lambda name: words[name[0]], part) for part in parts])


def call_error(kind: type[Exception], function: str, given: str, possible: str) -> CallError:
    """The CallError that is also a `kind`: ValueError, TypeError, RuntimeError or NotImplementedError."""
    kinds: dict[type[Exception], type[CallError]] = {
        ValueError: CallValueError,
        TypeError: CallTypeError,
        RuntimeError: CallRuntimeError,
        NotImplementedError: CallNotImplementedError,
    }
    return kinds[kind](function, given, possible)


class CallValueError(CallError, ValueError):
    """An argument has a value, a shape or strides that it cannot have."""


class CallTypeError(CallError, TypeError):
    """An argument is of a type or dtype that it cannot be."""


class CallRuntimeError(CallError, RuntimeError):
    """Nothing runs the call here, though its arguments are what they may be."""


class CallNotImplementedError(CallError, NotImplementedError):
    """A server asks for something that its backend here does not do."""
