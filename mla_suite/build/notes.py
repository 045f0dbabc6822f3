"""Up to date or not: the note beside a compiler's output holds one hash over its inputs and its own bytes.

Times decide nothing: a copy may keep an older one, and a file system may count whole seconds. The bytes count, since a
crash may leave a file that was named but never reached the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mla_suite.build.locations import sha256


class Note(NamedTuple):
    """The note at `path` on `outputs`, files that are made together."""

    path: Path
    outputs: tuple[Path, ...]

    def sources(self) -> tuple[str, ...]:
        """The names given to `write`; () where there is no note."""
        return tuple(self.path.read_text(encoding="utf-8").split("\n")[1:-1]) if self.path.is_file() else ()

    def holds(self, inputs: Iterable[str]) -> bool:
        """Whether the outputs are there, with the bytes that were made from these inputs."""
        if not all(path.is_file() for path in (self.path, *self.outputs)):
            return False
        return self.path.read_text(encoding="utf-8").split("\n")[0] == self._hash(inputs)

    def write(self, inputs: Iterable[str], sources: Sequence[str] = ()) -> None:
        """Notes that the outputs were made from `inputs`, beside the names of `sources` among them."""
        self.path.write_text("\n".join([self._hash(inputs), *sources, ""]), encoding="utf-8")

    def _hash(self, inputs: Iterable[str]) -> str:
        return sha256("\n".join([*inputs, *(sha256(path.read_bytes()) for path in self.outputs)]).encode())
