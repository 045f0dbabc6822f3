"""Planted faults that a test must find: a default run takes a few of a file's, a full one (`-m full`) all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mla_suite.archs import CSRC


def each_of(faults: Mapping[str, Any], *in_default: str, place: Callable[..., tuple[str, str]]) -> pytest.MarkDecorator:
    """Parametrizes `name` by the names of the faults.

    `place` gives a source below csrc and what a fault breaks in it. A default run plants few faults and looks here for
    every place, so that none is left behind when a source changes.
    """
    assert set(in_default) <= set(faults)
    for name, fault in faults.items():
        source, right = place(*fault)
        once(CSRC / source, right, name)
    marks = {name: [] if name in in_default else [pytest.mark.full] for name in faults}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=own) for name, own in marks.items()])


def once(path: Path, right: str, fault: str = "a fault") -> str:
    """The source, in which a fault has one place."""
    text = path.read_text()
    assert text.count(right) == 1, f"{fault}: {path.name} has {text.count(right)} of {right!r}"
    return text


def plant(path: Path, right: str, broken: str) -> None:
    """Breaks the one place of a source that has this text."""
    path.write_text(once(path, right).replace(right, broken))
