"""A call of an operator in a file, from which it can be run again: plain tensors and arguments, read without pickle.

Of a cache only the pages are saved that the call reads, under their own numbers, so that addresses come out as they
were: a replay makes the whole cache again, zero elsewhere. Of a cache that is written, and of outputs, only sizes are.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from mla_suite.core import checks, dispatch, overlap

if TYPE_CHECKING:
    from mla_suite.core.check_mode import Call

VERSION = 1
MAX_FILES = 8
"""Files of a process. A wrong kernel is wrong in every layer and step, and the first calls show it."""
MAX_BYTES = 2 << 30
"""Tensors of one file."""
ALIGNMENT = 16
"""Which kernel serves a call depends on addresses modulo this many bytes."""
MAP_NORESERVE = 0x4000
"""Linux's flag of mappings that may be larger than memory; Python 3.10 does not name it."""

_numbers = itertools.count()


class Saved(NamedTuple):
    """A file as it was read.

    sentence   the report that came with it
    backend    the backend that served the call
    emulated   the arch that CPU tensors stood for, or None
    device     the type of the tensors' device
    outputs, tensors   descriptions, of which `tensor` makes tensors
    """

    op: str
    sentence: str
    backend: str
    emulated: str | None
    device: str
    outputs: list[Any]
    tensors: list[Any]
    options: tuple[Any, ...]


def save(call: Call, choice: dispatch.Choice, sentence: str) -> str:
    """Write the call to a new file; -> a sentence that names it, or says why there is none."""
    number = next(_numbers)
    if number >= MAX_FILES:
        return f"it is not saved, since this process has saved {MAX_FILES} calls"
    op, ids = call.op, call.op.pages(call.record) if call.op.pages is not None else {}
    tensors: list[Any] = []
    for name, value in zip(op.functional.arguments, call.tensors, strict=False):
        pages, written = iter(ids.get(name, ())), name in op.mutates
        several = isinstance(value, (list, tuple))
        described = [
            None if one is None else _Described(one, next(pages, None), written)
            for one in (value if several else [value])
        ]
        tensors.append(described if several else described[0])
    size = sum(one.bytes for one in pytree.tree_leaves(tensors) if one is not None)
    if size > MAX_BYTES:
        return f"it is not saved, since its tensors take {size} bytes and a file at most {MAX_BYTES}"
    emulated = dispatch.arch_of(call.tensors[0]) if call.tensors[0].is_cpu else None
    try:
        content = dict(
            version=VERSION,
            op=op.name,
            sentence=sentence,
            backend=choice.backend.name,
            emulated=None if emulated is None else emulated.name,
            device=call.tensors[0].device.type,
            outputs=[_Described(output, None, True).content() for output in call.outputs],
            tensors=pytree.tree_map(lambda one: None if one is None else one.content(), tensors),
            options=list(call.options),
        )
        path = _write(content, f"{op.name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{number}.pt")
    except (OSError, RuntimeError) as error:  # torch raises a RuntimeError of its own over that of a full disk
        return f"it is not saved: {error.__context__ or error}"
    return f"run it again with: python -m mla_suite replay {path}"


def _write(content: dict[str, Any], name: str) -> Path:
    """Write a file that appears whole or not at all."""
    folder = Path(os.environ.get("MLA_SUITE_CHECK_DIR") or _temporary())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}-", delete=False) as file:
        try:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, folder / name)
        except BaseException:
            os.unlink(file.name)
            raise
    return folder / name


@cache
def _temporary() -> str:
    """A folder of this process, which nobody else may enter."""
    return tempfile.mkdtemp(prefix="mla_suite_check_")


@dataclass(frozen=True)
class _Described:
    """A tensor to be saved: without values if the call writes it, of a cache with those of `pages` alone."""

    tensor: torch.Tensor
    pages: torch.Tensor | None
    written: bool

    @property
    def bytes(self) -> int:
        """How much of the tensor is saved."""
        if self.written:
            return 0
        count = self.tensor.numel() if self.pages is None else len(self.pages) * self.tensor[:1].numel()
        return count * self.tensor.element_size()

    def content(self) -> dict[str, Any]:
        tensor, values = self.tensor.detach(), None
        if not self.written:
            # Indexing knows no float8, but bytes.
            values = tensor.contiguous() if self.pages is None else tensor.view(torch.uint8)[self.pages]
        return dict(
            shape=list(tensor.shape),
            strides=list((tensor.contiguous() if checks.overlaps_itself(tensor) else tensor).stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            offset=tensor.data_ptr() % ALIGNMENT,
            pages=None if self.pages is None else self.pages.cpu(),
            values=None if values is None else values.cpu(),
        )


def load(path: Path) -> Saved:
    """Read a file that `save` wrote. OSError, or ValueError in a sentence, where it cannot be."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read: it is no call that check mode saved, or damaged") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"{path} is no call that check mode saved, or one of another version of mla_suite")
    return Saved(
        **{name: content[name] for name in Saved._fields if name != "options"}, options=tuple(content["options"])
    )


def tensor(content: Any, device: torch.device) -> Any:
    """The tensor, list of tensors or None that a description is of; zero where no values were saved."""
    if content is None:
        return None
    if isinstance(content, list):
        return [tensor(one, device) for one in content]
    shape, strides, dtype = content["shape"], content["strides"], getattr(torch, content["dtype"])
    reach = overlap.reach(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
    memory = _zeros(reach + ALIGNMENT, device)
    begin = content["offset"] - content["offset"] % dtype.itemsize
    made = memory[begin : begin + reach].view(dtype).as_strided(shape, strides)
    if content["pages"] is not None:
        made.view(torch.uint8)[content["pages"].to(device)] = content["values"].to(device)
    elif content["values"] is not None:
        made.copy_(content["values"])
    return made


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that are zero, from a multiple of more than ALIGNMENT on.

    On a CPU they take memory only where they are written: the cache of a server may be larger than this machine.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(mapped, dtype=torch.uint8)
