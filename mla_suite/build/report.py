"""The cost of a compiled kernel, read from the compiler's own output.

AMD: the comment block and metadata of the assembly text, and its instructions. NVIDIA: ptxas's resource lines and the
launch bounds in the cubin. Counts of the main loop are static: both sides of a branch inside it are counted.
"""

from __future__ import annotations

import functools
import itertools
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mla_suite.build.locations import BuildError


@dataclass(frozen=True)
class Loop:
    """The main loop: its instructions by class, and the widest device-memory load of one lane in bytes."""

    instructions: int
    mix: Mapping[str, int]
    widest_load: int

    def count(self, *prefixes: str) -> int:
        """Instructions whose class begins with one of `prefixes`."""
        return sum(number for name, number in self.mix.items() if name.startswith(prefixes))

    @property
    def matrix(self) -> int:
        return self.count("v_mfma", "v_smfma")

    @property
    def lds_reads(self) -> int:
        return self.count("ds_read", "ds_load")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One kernel's cost. Bytes for sizes; registers are per lane; `threads` is the launch bound, 0 when unbounded.

    `agprs`, `sgprs` and `loop` belong to AMD; NVIDIA leaves them 0 and None. `lds` is static. `spills` counts spilled
    registers on AMD and spilled bytes on NVIDIA.
    """

    threads: int
    registers: int
    vgprs: int
    agprs: int = 0
    sgprs: int = 0
    lds: int
    scratch: int
    spills: int
    code_bytes: int
    loop: Loop | None = None


@dataclass(frozen=True, kw_only=True)
class Resources(Cost):
    """A kernel's cost, and what its build is refused for.

    `scalar_spills` of AMD's spilled registers are scalar. `params` is the size of the one parameter struct.
    `serialized` is ptxas's reason for making every wgmma wait for the one before, at 1.5 times the time, or "".
    """

    scalar_spills: int = 0
    params: int
    serialized: str = ""


_LOAD_BYTES = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4, "x2": 8, "x3": 12, "x4": 16}
_LOAD = re.compile(r"(?:global|buffer|flat)_load_(?:lds_)?(ubyte|sbyte|ushort|sshort|short|dword)(?:_d16\w*)?(x[234])?")
_CLASSES = (
    (re.compile(r"v_s?mfma|ds_|global_|buffer_|flat_|scratch_"), None),
    (re.compile(r"v_accvgpr"), "v_accvgpr"),
    (re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_"), "v_trans"),
    (re.compile(r"v_"), "valu"),
    (re.compile(r"s_(waitcnt|barrier|nop|cbranch|branch|load|setprio)"), None),
    (re.compile(r"s_"), "salu"),
)
_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa)$")


@functools.cache
def classify(opcode: str) -> str:
    """The class an instruction is counted under: matrix, LDS and memory instructions by name, the rest in groups."""
    opcode = _ENCODING.sub("", opcode)
    for pattern, name in _CLASSES:
        if pattern.match(opcode):
            if opcode.startswith("s_cbranch"):
                return "s_cbranch"
            return name or opcode
    return opcode


# Neither directives nor comments. The line break is looked for in half of the time that `^` takes.
_LABEL_OR_CODE = re.compile(r"\n(?:([.\w$]+):|[ \t]+(\w[^;\n]*))")


def loop_of(body: str) -> Loop | None:
    """The main loop of a kernel's body: most matrix instructions first, then most instructions.

    A loop that only wraps another (at least half of its work is in that one) gives way to it.
    """
    code: list[str] = []
    labels: dict[str, int] = {}
    for label, text in _LABEL_OR_CODE.findall(f"\n{body}"):
        if label:
            labels[label] = len(code)
        else:
            code.append(text)
    ends: dict[int, int] = {}  # a loop with two branches back to its head ends at the later one
    for index, text in enumerate(code):
        if text.startswith(("s_cbranch", "s_branch")):
            head = labels.get(text.split()[-1], len(code))
            if head <= index:
                ends[head] = max(ends.get(head, 0), index + 1)

    matrix = [0, *itertools.accumulate(text.startswith(("v_mfma", "v_smfma")) for text in code)]  # before each line

    def weight(span: tuple[int, int]) -> tuple[int, int]:
        return matrix[span[1]] - matrix[span[0]], span[1] - span[0]

    def wraps(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
        inside = outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]
        unit = 0 if weight(outer)[0] else 1
        return inside and 2 * weight(inner)[unit] >= weight(outer)[unit]

    mains = [span for span in ends.items() if not any(wraps(span, other) for other in ends.items())]
    if not mains:
        return None
    first, last = max(mains, key=weight)
    opcodes = [text.split()[0] for text in code[first:last]]
    loads = [_LOAD_BYTES[found[2] or found[1]] for op in opcodes if (found := _LOAD.match(op))]
    mix = Counter(classify(op) for op in opcodes)
    return Loop(len(opcodes), dict(sorted(mix.items())), max(loads, default=0))


def read_assembly(text: str, symbol: str) -> Resources:
    """Resources of kernel `symbol` in clang's AMDGPU assembly. BuildError when the text does not define it."""
    begin = text.find(f"\n{symbol}:")
    end = text.find("\n.Lfunc_end", begin)
    # Metadata keys are sorted, so the kernel's own name stands in the middle of its entry.
    entries = re.split(r"^  - (?=\.)", text[text.find(".amdgpu_metadata") :], flags=re.M)[1:]
    entry = next((part for part in entries if re.search(rf"^ +\.name: +{re.escape(symbol)}$", part, re.M)), None)
    if begin < 0 or end < 0 or entry is None:
        raise BuildError(f"the assembly defines no kernel {symbol}; name the entry MLA_SUITE_KERNEL")

    def stated(name: str) -> int:
        return number(rf"^; {name}\s*[:=] (\d+)", text[end:], f"assembly of {symbol} does not state {name}")

    def metadata(name: str) -> int:
        return number(rf"^[ -]*\.{name}: +(\d+)$", entry, f"metadata of {symbol} lacks .{name}")

    def number(pattern: str, where: str, lacking: str) -> int:
        found = re.search(pattern, where, re.M)
        if found is None:
            raise BuildError(f"the {lacking}; this compiler's output is not understood")
        return int(found.group(1))

    by_value = re.findall(r"\.offset: +(\d+)\n +\.size: +(\d+)\n +\.value_kind: +by_value", entry)
    if len(by_value) != 1 or by_value[0][0] != "0":
        raise BuildError(f"{symbol} takes {len(by_value)} parameters by value; a kernel takes exactly one struct")
    return Resources(
        threads=metadata("max_flat_workgroup_size"),
        registers=metadata("vgpr_count"),
        vgprs=stated("NumVgprs"),
        agprs=metadata("agpr_count"),
        sgprs=metadata("sgpr_count"),
        lds=metadata("group_segment_fixed_size"),
        scratch=metadata("private_segment_fixed_size"),
        spills=metadata("vgpr_spill_count") + metadata("sgpr_spill_count"),
        scalar_spills=metadata("sgpr_spill_count"),
        code_bytes=stated("codeLenInByte"),
        params=int(by_value[0][1]),
        loop=loop_of(text[begin:end]),
    )


def read_cubin(data: bytes, log: str, symbol: str) -> Resources:
    """Resources of kernel `symbol` in a cubin, with ptxas's `-v` lines. BuildError when either lacks it."""
    about = re.search(
        rf"Function properties for {re.escape(symbol)}\n\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\nptxas info\s+: Used (\d+) registers([^\n]*)",
        log,
    )
    sections = {section.name: section.body for section in elf_sections(data)}
    if about is None or f".text.{symbol}" not in sections:
        raise BuildError(f"the cubin or ptxas's report has no kernel {symbol}; name the entry MLA_SUITE_KERNEL")
    shared = re.search(r"(\d+) bytes smem", about.group(5))
    threads, params = 0, 0
    info = sections[f".nv.info.{symbol}"]
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        body = info[at + 4 : at + 4 + size] if form == 4 else b""
        if form == 4 and attribute in (0x05, 0x10):  # EIATTR_MAX_THREADS, EIATTR_REQNTID: x, y, z
            x, y, z = struct.unpack("<3I", body)
            threads = x * y * z
        elif form == 4 and attribute == 0x17:  # EIATTR_KPARAM_INFO, one per parameter; its size is the highest 14 bits
            params += struct.unpack("<8xI", body)[0] >> 18
        at += 4 + (size if form == 4 else 0)
    registers = int(about.group(4))
    return Resources(
        threads=threads,
        registers=registers,
        vgprs=registers,
        lds=int(shared.group(1)) if shared else 0,
        scratch=int(about.group(1)),
        spills=int(about.group(2)) + int(about.group(3)),
        code_bytes=len(sections[f".text.{symbol}"]),
        params=params,
        serialized=serialization(log, symbol),
    )


def serialization(log: str, symbol: str) -> str:
    """ptxas's reason for making every wgmma of kernel `symbol` wait for the one before; "" where they overlap."""
    symbol = re.escape(symbol)
    why = re.search(rf"wgmma\.mma_async instructions are serialized due to (.*) in the function '{symbol}'", log)
    return why.group(1) if why else ""


class Section(NamedTuple):
    """A section of an ELF file; `link` and `info` are as its type has them, and some have a size and no bytes."""

    name: str
    type: int
    flags: int
    address: int
    size: int
    link: int
    info: int
    body: bytes


def elf_sections(data: bytes) -> list[Section]:
    """The sections of an object in their order. BuildError for another file than a 64-bit little-endian ELF."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise BuildError("an object is not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_at = struct.unpack_from("<3H", data, 58)
    headers = [struct.unpack_from("<IIQQQQII", data, table + i * entry_size) for i in range(count)]
    names = data[headers[names_at][4] :]
    found = []
    for name, type_, flags, address, offset, size, link, info in headers:
        body = data[offset : offset + size] if type_ != 8 else b""
        found.append(
            Section(names[name : names.index(b"\0", name)].decode(), type_, flags, address, size, link, info, body)
        )
    return found
