"""How the faces of other projects refuse what they do not do."""

from __future__ import annotations

from typing import NoReturn


def refuse(name: str, given: str, possible: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise one sentence: of which function, what was given, what is possible."""
    raise error(f"{name}: {given}; {possible}")
