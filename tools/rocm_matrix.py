"""The table of ROCm versions in docs/rocm.md: each tox environment writes its own row, dated, when asked to record."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "rocm.md"
HEAD = "| tox -e | Debian packages | on | shown |\n|---|---|---|---|\n"


def put(env: str, packages: Sequence[str], shown: str, page: Path = PAGE) -> None:
    """Puts the row of an environment, of today, in its alphabetical place, instead of an older one."""
    text = page.read_text()
    begin = text.index(HEAD) + len(HEAD)
    end = re.compile(r"^(?!\|)", re.M).search(text, begin)
    stop = end.start() if end else len(text)
    rows = {line.split("|")[1].strip(): line for line in text[begin:stop].splitlines()}
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    rows[f"`{env}`"] = f"| `{env}` | {', '.join(packages)} | {today} | {shown} |"
    page.write_text(text[:begin] + "".join(f"{rows[key]}\n" for key in sorted(rows)) + text[stop:])
