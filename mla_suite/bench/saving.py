"""Puts results into files so that nothing can lose what was measured."""

from __future__ import annotations

import os
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
