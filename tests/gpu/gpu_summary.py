"""The table that ends the GPU suite."""

from __future__ import annotations

from collections import Counter

WORDS = {"passed": "ok", "failed": "FAILED", "skipped": "refused", "error": "ERROR"}


def table(cells: dict[tuple[str, str], Counter[str]]) -> list[str]:
    """A line per subject and check, subjects together: how many passed, failed and were refused."""
    width = max((len(subject) for subject, _ in cells), default=0)
    reach = max((len(check) for _, check in cells), default=0)
    lines, before = [], ""
    for subject, check in sorted(cells):
        counts = cells[subject, check]
        result = ", ".join(f"{counts[word]} {WORDS[word]}" for word in WORDS if counts[word])
        lines.append(f"{subject if subject != before else '':{width}}  {check:{reach}}  {result}")
        before = subject
    return lines
