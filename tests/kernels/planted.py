"""Planted faults that a test must find: a default run takes a few of a file's, a full one (`-m full`) all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def each_of(faults: Mapping[str, object], *in_default: str) -> pytest.MarkDecorator:
    """Parametrizes `name` by the names of the faults."""
    assert set(in_default) <= set(faults)
    marks = {name: [] if name in in_default else [pytest.mark.full] for name in faults}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=own) for name, own in marks.items()])


def plant(path: Path, right: str, broken: str) -> None:
    """Breaks the one place of a source that has this text."""
    text = path.read_text()
    assert text.count(right) == 1, f"{path.name} has {text.count(right)} of {right!r}"
    path.write_text(text.replace(right, broken))
