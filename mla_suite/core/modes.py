"""Debug mode and check mode, in which calls of operators go through torch's dispatcher and more is looked at.

Both belong to a context, as `contextvars` has them: a thread that begins has those of the environment.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

ON_DIFFERENCE = ("warn", "raise")


def asked(name: str, value: str, effect: str) -> bool:
    """Whether a variable of the environment has the value that has an effect. A warning says that another has none."""
    if value not in ("", "0", effect):
        logging.getLogger("mla_suite").warning("%s is %r, which has no effect; it takes %s", name, value, effect)
    return value == effect


class Check:
    """A switched-on check mode: it counts the calls of each operator, in every thread that shares it."""

    def __init__(self, every: int, on_difference: str) -> None:
        self.every, self.on_difference = every, on_difference
        self._calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    def due(self, op: str) -> bool:
        """Count a call of an operator; whether it is the first, or n calls after the last that was due."""
        return next(self._calls[op]) % self.every == 0


class Modes(NamedTuple):
    """The modes of a context in which any is on."""

    debug: bool
    check: Check | None


def _made(debug: bool, check: Check | None) -> Modes | None:
    return Modes(debug, check) if debug or check is not None else None


def _check_asked(value: str) -> Check | None:
    """The check mode that `MLA_SUITE_CHECK` asks for."""
    every = int(value) if value.isdecimal() else 0
    asked("MLA_SUITE_CHECK", value, str(every) if every else "a whole number n, to check every n-th call")
    return Check(every, "warn") if every else None


_modes: ContextVar[Modes | None] = ContextVar(
    "mla_suite_modes",
    default=_made(  # noqa: B039  # one count of calls for all contexts is meant
        asked("MLA_SUITE_DEBUG", os.environ.get("MLA_SUITE_DEBUG", ""), "1"),
        _check_asked(os.environ.get("MLA_SUITE_CHECK", "")),
    ),
)
current: Callable[[], Modes | None] = _modes.get  # without a frame of Python's: every call of an operator asks


def debugging() -> bool:
    """Whether debug mode is on."""
    modes = current()
    return modes is not None and modes.debug


@contextmanager
def debug(on: bool = True) -> Iterator[None]:
    """While the block runs, check values inside tensors (page ids, lengths, slots) before an operator writes anything.

    Off by default because reading lengths on the host waits for the device. `MLA_SUITE_DEBUG=1` turns it on for a
    process (read once at import). Tensors on the CPU are always checked.
    """
    modes = current()
    with _in(_made(on, None if modes is None else modes.check)):
        yield


@contextmanager
def check(every: int = 1, *, on_difference: str = "warn") -> Iterator[None]:
    """While the block runs, compare every n-th call of each operator with the reference, on the call's own inputs.

    every          n; the first call is checked, and then each n-th. 0 turns it off
    on_difference  `warn` logs the first value that is further off than the stated bounds allow, `raise` raises that as
                   a `WrongResult`

    The call is saved to a file that `python -m mla_suite replay FILE` runs again, in the folder `MLA_SUITE_CHECK_DIR`
    or a new temporary one. `MLA_SUITE_CHECK=n` turns it on for a process (read once at import). A call that the
    reference serves has nothing to be compared with, and one that a CUDA graph captures cannot be: both pass unchecked.
    """
    if not isinstance(every, int) or every < 0:
        raise ValueError(
            f"check: every is {every!r}; it takes a whole number n, to check every n-th call, or 0 for none"
        )
    if on_difference not in ON_DIFFERENCE:
        raise ValueError(f"check: on_difference is {on_difference!r}; it takes {' or '.join(ON_DIFFERENCE)}")
    with _in(_made(debugging(), Check(every, on_difference) if every else None)):
        yield


@contextmanager
def _in(modes: Modes | None) -> Iterator[None]:
    token = _modes.set(modes)
    try:
        yield
    finally:
        _modes.reset(token)
