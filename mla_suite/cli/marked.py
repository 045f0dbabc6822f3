"""Sections of a file that a command writes, between lines that name the section."""

from __future__ import annotations

import re
from pathlib import Path

from mla_suite.bench import saving


def section(text: str, name: str) -> str | None:
    """Returns the text between `<!-- name:begin ... -->` and `<!-- name:end -->`; None where they are not there."""
    found = _pattern(name).search(text)
    return found[2] if found else None


def write(path: Path, name: str, made: str) -> None:
    """Replace the section of a file. ValueError when the file cannot be read or written, or has no such section."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    written, replaced = _pattern(name).subn(lambda found: f"{found[1]}{made}\n{found[3]}", text)
    if not replaced:
        raise ValueError(f"{path} has no <!-- {name}:begin --> and <!-- {name}:end --> lines to write between")
    saving.write_whole(path, written)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}:begin.*?-->\n)(.*?)(<!-- {name}:end -->)", re.S)
