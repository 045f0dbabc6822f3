"""Whether another project has the interface that an integration was made for.

What is found decides, signatures and attributes, and never a version's number: a newer release whose interface matches
works, with one warning, and one that differs is refused before anything is computed.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from mla_suite.integrations import refuse

_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Interface:
    """The installed release of another project, as one integration asks about it.

    integration  its name in errors
    version      of the installed release
    tested       oldest and newest release that the tests have run with, or whose signatures were read
    otherwise    what the user may do besides installing one of these
    """

    integration: str
    project: str
    version: str
    tested: tuple[str, str]
    otherwise: str

    def takes(
        self, what: str, function: Callable[..., Any], needed: Collection[str], known: Collection[str] | None = None
    ) -> None:
        """Refuse a function, or a dataclass with such fields, that does not take all of `needed`.

        needed  a tuple where the order counts, as for what is given by position
        known   what it may take besides; None: anything

        A wrapper with `*args, **kwargs` that does not name what it wraps, as a hook may be, is taken on trust.
        """
        kinds = {name: found.kind.name for name, found in inspect.signature(function).parameters.items()}
        if {"VAR_POSITIONAL", "VAR_KEYWORD"} <= set(kinds.values()):
            return
        found = [name for name, kind in kinds.items() if kind not in ("VAR_POSITIONAL", "VAR_KEYWORD")]
        if missing := [name for name in sorted(needed) if name not in found]:
            self.differs(what, f"takes no {', '.join(missing)}")
        if isinstance(needed, tuple) and (order := [name for name in found if name in needed]) != list(needed):
            self.differs(what, f"takes its arguments in another order: {', '.join(order)}")
        if known is not None and (new := [n for n in found if n not in needed and n not in known and n != "self"]):
            self.differs(what, f"takes {', '.join(new)}, whose meaning is not known here")

    def has(self, what: str, owner: Any, names: Collection[str]) -> None:
        """Refuse an object or a class without these attributes."""
        if missing := [name for name in names if not hasattr(owner, name)]:
            self.differs(what, f"has no {', '.join(missing)}")

    def implemented(self, what: str, own: type) -> None:
        """Refuse a base class that leaves methods to us which our class `own` does not have."""
        if missing := sorted(getattr(own, "__abstractmethods__", ())):
            self.differs(what, f"has methods that are not implemented here: {', '.join(missing)}")

    def differs(self, what: str, how: str) -> NoReturn:
        given = f"{what} of {self.project} {self.version} {how}"
        tested = " to ".join(dict.fromkeys(self.tested))
        possible = f"install {self.project} {tested}, or {self.otherwise}"
        refuse(self.integration, given, possible, TypeError)

    def warn_if_newer(self, stacklevel: int) -> None:
        """Warn once in a process of a release that is newer than the newest tested one."""
        newest = tuple(int(part) for part in self.tested[1].split("."))
        installed = tuple(int(number) for number in re.findall(r"\d+", self.version)[: len(newest)])
        if installed > newest and (self.project, self.version) not in _warned:
            _warned.add((self.project, self.version))
            warnings.warn(
                f"{self.integration}: {self.project} {self.version} is newer than {self.tested[1]}, the newest that "
                "mla_suite was tested with; its interface is the same",
                stacklevel=stacklevel + 1,
            )
