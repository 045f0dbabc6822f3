"""Kernels in GPU memory, found by their bytes: which entry of the manifest a dispatch means.

A name can be given to anything, so a dispatch is traced from its kernel descriptor to the code it points to, and both,
with every other read-only byte of the code object around them, are compared with what the build made.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mla_suite.build.manifest import KernelEntry
from mla_suite.build.report import elf_sections

Read = Callable[[int, int], bytes | None]
"""(GPU address, bytes) -> the bytes, or None where they do not lie in GPU memory."""

DESCRIPTOR_BYTES = 64
_HEAD_BYTES = 64
_PT_LOAD, _WRITABLE = 1, 2
_DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM


class ForeignKernel(Exception):
    """A dispatch of code that the manifest does not hold; the text is a sentence."""


@dataclass(frozen=True)
class Image:
    """A code object as a loader maps it: its kernel's descriptor and code, and the read-only segments around them.

    Addresses are relative to where the object is loaded.
    """

    entry: KernelEntry
    descriptor_address: int
    descriptor: bytes
    code_address: int
    code: bytes
    segments: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(cls, entry: KernelEntry) -> Image:
        """The image of a manifest's kernel. An error says that the object is no ELF file with that kernel."""
        data = entry.read_object()
        symbols = _symbols(data)
        loads = [load for load in _program_headers(data) if load[0] == _PT_LOAD]
        if entry.symbol not in symbols or f"{entry.symbol}.kd" not in symbols:
            raise ValueError(f"{entry.object} has no kernel {entry.symbol}")

        def read(address: int, size: int) -> bytes:
            for _, _, offset, start, held in loads:
                if start <= address and address + size <= start + held:
                    return data[offset + address - start : offset + address - start + size]
            raise ValueError(f"{entry.object} has no bytes at {address:#x}")

        descriptor_address, _ = symbols[f"{entry.symbol}.kd"]
        code_address, code_bytes = symbols[entry.symbol]
        return cls(
            entry,
            descriptor_address,
            read(descriptor_address, DESCRIPTOR_BYTES),
            code_address,
            read(code_address, code_bytes),
            tuple((start, read(start, held)) for _, flags, _, start, held in loads if not flags & _WRITABLE),
        )


class KernelIndex:
    """The kernels of one arch, by the first bytes of their code."""

    def __init__(self, arch: str, entries: Iterable[KernelEntry]) -> None:
        self.arch = arch
        self._by_head: dict[bytes, list[Image]] = {}
        self.count = 0
        for entry in entries:
            image = Image.of(entry)
            self._by_head.setdefault(image.code[:_HEAD_BYTES], []).append(image)
            self.count += 1

    def find(self, descriptor: int, read: Read) -> KernelEntry:
        """The entry whose object lies in GPU memory around a kernel descriptor.

        ForeignKernel says what lies there instead: nothing, a damaged copy, or code that the manifest does not hold.
        """
        held = read(descriptor, DESCRIPTOR_BYTES)
        if held is None:
            raise ForeignKernel(f"a dispatch names a kernel at {descriptor:#x}, where no GPU memory is allocated")
        (entry_offset,) = struct.unpack_from("<q", held, 16)
        code = descriptor + entry_offset
        head = read(code, _HEAD_BYTES) or b""
        damaged = ""
        for image in self._by_head.get(head, ()):
            damage = _damage(image, descriptor, read)
            if not damage:
                return image.entry
            damaged = damaged or damage
        damaged = damaged or self._with_damaged_head(held, head)
        raise ForeignKernel(
            damaged
            or f"the kernel at {descriptor:#x} (code {head[:8].hex()}...) is none of the {self.count} that the "
            f"manifest has for {self.arch}; the virtual GPU executes only these, so no kernels of HIP's own either, "
            "which hipMemset and copies within GPU memory are made of"
        )

    def _with_damaged_head(self, descriptor: bytes, head: bytes) -> str:
        """A sentence where a kernel has this descriptor and all but a few of the first bytes of code."""
        for images in self._by_head.values():
            for image in images:
                wrong = [i for i, (a, b) in enumerate(zip(image.code, head, strict=False)) if a != b]
                if image.descriptor == descriptor and len(wrong) <= _HEAD_BYTES // 4:
                    return _sentence(image, image.code_address + wrong[0], head[wrong[0]], image.code[wrong[0]])
        return ""


def _damage(image: Image, descriptor: int, read: Read) -> str:
    """A sentence on the first byte in GPU memory that is not the object's, or ''."""
    base = descriptor - image.descriptor_address
    for start, expected in image.segments:
        held = read(base + start, len(expected))
        if held is None:
            return f"{image.entry.id} begins at {base:#x}, but GPU memory ends within it; it was not executed"
        if held != expected:
            first = next(i for i, (a, b) in enumerate(zip(held, expected, strict=True)) if a != b)
            return _sentence(image, start + first, held[first], expected[first])
    return ""


def _sentence(image: Image, address: int, held: int, expected: int) -> str:
    return (
        f"the copy of {image.entry.id} in GPU memory is damaged: byte {address:#x} of the code object is {held:#04x}, "
        f"the manifest's has {expected:#04x}; it was not executed"
    )


def _program_headers(data: bytes) -> list[tuple[int, int, int, int, int]]:
    """(type, flags, file offset, address, bytes in the file) of every segment."""
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    found = []
    for i in range(count):
        kind, flags, start, address, _, held = struct.unpack_from("<IIQQQQ", data, offset + i * size)
        found.append((kind, flags, start, address, held))
    return found


def _symbols(data: bytes) -> dict[str, tuple[int, int]]:
    """Address and size by name, of the dynamic symbol table, which no tool strips."""
    sections = elf_sections(data)
    found = {}
    for table in sections:
        if table.type == _DYNAMIC_SYMBOLS:
            strings = sections[table.link].body
            for name, _, _, _, address, size in struct.iter_unpack("<IBBHQQ", table.body):
                found[strings[name : strings.index(b"\0", name)].decode()] = (address, size)
    return found
