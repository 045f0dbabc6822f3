"""AMD's code-object manager (comgr) reads every code object that this tree ships: run under a user space's loader.

Per object: comgr accepts it, names the manifest's arch, its metadata are the manifest's numbers, and the kernel's whole
text is disassembled into the very mnemonics that the build's assembly has. Objects with a broken byte must be refused.
Prints one JSON object with the counts; the exit status is 1 with a sentence at the first difference.
"""

from __future__ import annotations

import argparse
import ctypes as c
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable

from virtual_hip.code_objects import Image

from mla_suite.build import ObjectError, manifest
from mla_suite.build.instances import instances
from mla_suite.build.manifest import KernelEntry
from mla_suite.emulator import assembly

EXECUTABLE = 8  # amd_comgr_data_kind_t
Handle = c.c_uint64
READ = c.CFUNCTYPE(c.c_uint64, c.c_uint64, c.c_void_p, c.c_uint64, c.c_void_p)
TEXT = c.CFUNCTYPE(None, c.c_char_p, c.c_void_p)
ADDRESS = c.CFUNCTYPE(None, c.c_uint64, c.c_void_p)

_FORMS = re.compile(r"_(?:e32|e64|dpp|sdwa|vi|gfx9|gfx9\d+)+$")
"""Suffixes by which a disassembler names an encoding that the compiler's text leaves to the assembler."""


class Difference(Exception):
    """comgr says otherwise than the manifest; the text is a sentence."""


class Comgr:
    """libamd_comgr through ctypes."""

    def __init__(self, path: str) -> None:
        self.library = c.CDLL(path)
        major, minor = c.c_size_t(), c.c_size_t()
        self.library.amd_comgr_get_version(c.byref(major), c.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def call(self, function: str, *arguments: object) -> None:
        if status := getattr(self.library, f"amd_comgr_{function}")(*arguments):
            raise Difference(f"amd_comgr_{function} says {status}")

    def text(self, function: str, handle: Handle) -> str:
        size = c.c_size_t()
        self.call(function, handle, c.byref(size), None)
        buffer = c.create_string_buffer(size.value)
        self.call(function, handle, c.byref(size), buffer)
        return buffer.value.decode()

    def open(self, image: bytes) -> Handle:
        data = Handle()
        self.call("create_data", EXECUTABLE, c.byref(data))
        self.call("set_data", data, c.c_size_t(len(image)), image)
        return data

    def metadata(self, data: Handle) -> dict[str, str]:
        """The strings of the object's only kernel."""
        root, kernels, kernel = Handle(), Handle(), Handle()
        self.call("get_data_metadata", data, c.byref(root))
        self.call("metadata_lookup", root, b"amdhsa.kernels", c.byref(kernels))
        size = c.c_size_t()
        self.call("get_metadata_list_size", kernels, c.byref(size))
        if size.value != 1:
            raise Difference(f"the metadata have {size.value} kernels")
        self.call("index_list_metadata", kernels, c.c_size_t(0), c.byref(kernel))
        found = {}
        for key in _METADATA:
            value = Handle()
            self.call("metadata_lookup", kernel, key.encode(), c.byref(value))
            found[key] = self.text("get_metadata_string", value)
            self.call("destroy_metadata", value)
        for node in (kernel, kernels, root):
            self.call("destroy_metadata", node)
        return found

    def disassemble(self, isa: str, code: bytes) -> list[str]:
        """One line per instruction."""
        held = (c.c_ubyte * len(code)).from_buffer_copy(code)
        first = c.addressof(held)
        lines: list[str] = []

        def read(address: int, to: int, size: int, _: object) -> int:
            count = max(0, min(size, len(code) - address))
            c.memmove(to, first + address, count)
            return count

        callbacks = READ(read), TEXT(lambda line, _: lines.append(line.decode())), ADDRESS(lambda *_: None)
        info, size, at = Handle(), c.c_uint64(), 0
        self.call("create_disassembly_info", isa.encode(), *callbacks, c.byref(info))
        while at < len(code):
            self.call("disassemble_instruction", info, c.c_uint64(at), None, c.byref(size))
            at += size.value
        self.call("destroy_disassembly_info", info)
        return lines


_METADATA = {
    ".symbol": lambda entry: f"{entry.symbol}.kd",
    ".kernarg_segment_size": None,
    ".group_segment_fixed_size": lambda entry: str(entry.lds),
    ".private_segment_fixed_size": lambda entry: str(entry.scratch),
    ".max_flat_workgroup_size": lambda entry: str(entry.threads),
    ".vgpr_count": lambda entry: str(entry.registers),
    ".agpr_count": lambda entry: str(entry.agprs),
    ".vgpr_spill_count": lambda entry: str(entry.spills),
}


def check(comgr: Comgr, entry: KernelEntry) -> int:
    """Instructions of a kernel that comgr reads as the manifest has it. Difference says what is otherwise."""
    image = entry.read_object()
    data = comgr.open(image)
    isa = comgr.text("get_data_isa_name", data)
    if not isa.startswith(f"amdgcn-amd-amdhsa--{entry.arch}"):
        raise Difference(f"the ISA is {isa}")
    found = comgr.metadata(data)
    for key, expected in _METADATA.items():
        if expected is not None and found[key] != expected(entry):
            raise Difference(f"{key} is {found[key]}, the manifest has {expected(entry)}")
    if not entry.params_size <= int(found[".kernarg_segment_size"]):
        raise Difference(f".kernarg_segment_size is {found['.kernarg_segment_size']} for {entry.params_size} bytes")
    comgr.call("release_data", data)
    read = [_mnemonic(line) for line in comgr.disassemble(isa, Image.of(entry).code)]
    written = [_mnemonic(line.text) for line in assembly.parse_kernel(entry.read_text(), entry.symbol).lines]
    if read != written:
        at = next(
            (i for i, (a, b) in enumerate(zip(read, written, strict=False)) if a != b), min(len(read), len(written))
        )
        raise Difference(
            f"instruction {at} of {len(written)}: comgr reads {read[at : at + 3]}, the text has {written[at : at + 3]}"
        )
    return len(read)


def _mnemonic(line: str) -> str:
    return _FORMS.sub("", line.split()[0])


def refuses(comgr: Comgr, image: bytes) -> bool:
    """Whether comgr sees that an object is broken."""
    try:
        return not comgr.text("get_data_isa_name", comgr.open(image)).startswith("amdgcn-amd-amdhsa--gfx9")
    except Difference:
        return True


def broken(image: bytes) -> Iterable[bytes]:
    """The object as no 64-bit one, of another machine, of an unknown chip, and truncated."""
    for offset in (4, 18, 48):  # in e_ident, e_machine, e_flags
        yield image[:offset] + bytes([image[offset] ^ 0xFF]) + image[offset + 1 :]
    yield image[:40]


def shipped(arch: str) -> list[KernelEntry]:
    """The kernels that a build of this tree makes for an arch, and none of those that a user's tuned rows had built.

    ObjectError names one that was not built.
    """
    made = manifest.installed()
    return [made.find(arch, item.id) for item in instances(arch)]


def main(library: str, archs: str) -> int:
    comgr = Comgr(library)
    objects: Counter[str] = Counter()
    instructions: Counter[str] = Counter()
    try:
        entries = [entry for arch in archs.split(",") for entry in shipped(arch)]
    except (ObjectError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for entry in entries:
        arch = entry.arch
        try:
            instructions[arch] += check(comgr, entry)
        except Difference as error:
            print(f"comgr {comgr.version}, {arch} {entry.id}: {error}", file=sys.stderr)
            return 1
        if not objects[arch] and not all(refuses(comgr, image) for image in broken(entry.read_object())):
            print(f"comgr {comgr.version} takes a broken copy of {arch} {entry.id}", file=sys.stderr)
            return 1
        objects[arch] += 1
    print(json.dumps({"comgr": comgr.version, "objects": objects, "instructions": instructions}))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="comgr's path")
    parser.add_argument("archs", help="names between commas")
    sys.exit(main(**vars(parser.parse_args())))
