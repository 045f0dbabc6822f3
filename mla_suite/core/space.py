"""What a tuner may try: the configurations of one backend, and the table in which the best of them is kept.

An operator that can be tuned has a module `search` with `SPACES`, a `Space` per backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mla_suite.core.arch import Arch
from mla_suite.core.tuning import Format, Value


@dataclass(frozen=True)
class Space:
    """The configurations of one backend of one operator.

    candidates  (problem, arch) -> configurations that are legal there; each is given to the backend's `run`
    form        what its table holds
    table       arch name -> the table's name: its file without `.csv`
    facts       (problem, arch) -> values of the table's key columns
    cells       (problem, arch, configuration) -> values of its configuration columns
    """

    candidates: Callable[[Any, Arch], Iterable[Any]]
    form: Format
    table: Callable[[str], str]
    facts: Callable[[Any, Arch], Mapping[str, Value]]
    cells: Callable[[Any, Arch, Any], Mapping[str, Value]]
