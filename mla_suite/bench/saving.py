"""Puts results into files so that nothing can lose what was measured, whole or as a marked section of a document."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mla_suite.build import locations
from mla_suite.errors import UsageError


def write_whole(path: Path, text: str) -> None:
    """Put `text` at `path`: a crash, a full disk or Ctrl-C leaves the old file or the whole new one, never a part.

    A pipe or a terminal has nothing to keep and is written as it is, and so is a file in a folder of somebody else's,
    where no second file can be made. ValueError, in a sentence, when it cannot be written.
    """
    try:
        target = path.resolve()  # a link stays one
        target.parent.mkdir(parents=True, exist_ok=True)
        if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
            target.write_text(text, encoding="utf-8")
        else:
            locations.write_atomically(target, text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def section(text: str, name: str) -> str | None:
    """Returns the text between `<!-- name:begin ... -->` and `<!-- name:end -->`; None where they are not there."""
    found = _pattern(name).search(text)
    return found[2] if found else None


def write_section(path: Path, name: str, made: str) -> None:
    """Replace the section of a file. ValueError when the file cannot be read or written, or has no such section."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} cannot be read: it is no text in UTF-8") from error
    written, replaced = _pattern(name).subn(lambda found: f"{found[1]}{made}\n{found[3]}", text)
    if not replaced:
        raise UsageError(f"{path} has no <!-- {name}:begin --> and <!-- {name}:end --> lines to write between")
    write_whole(path, written)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}:begin.*?-->\n)(.*?)(<!-- {name}:end -->)", re.S)
