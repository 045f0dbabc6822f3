"""Assembly text of one kernel: its instructions with their source lines, labels, descriptor, constants and arguments.

Reads what clang and Triton write with `-S` for gfx942 and gfx950.
"""

from __future__ import annotations

import posixpath
import re
import struct
from dataclasses import dataclass, field


class AssemblyError(ValueError):
    """The text cannot be executed: names the line, what stands there, and why."""


@dataclass(frozen=True)
class Line:
    """One instruction: its text, its line in the assembly file, and file:line of the source ('' if unknown)."""

    text: str
    number: int
    source: str


@dataclass
class KernelText:
    """One kernel of an assembly file. `descriptor` has the integers of its .amdhsa_ directives, `hidden` the byte
    offsets of hidden arguments by kind, `constants` the bytes of read-only symbols the code may address."""

    name: str
    lines: list[Line]
    labels: dict[str, int]
    descriptor: dict[str, int]
    hidden: dict[str, int] = field(default_factory=dict)
    constants: dict[str, bytes] = field(default_factory=dict)


def kernel_names(text: str) -> list[str]:
    """Kernels an assembly file describes, in its order."""
    return re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.M)


def target(text: str) -> str | None:
    """The gfx name the file was written for."""
    found = re.search(r"\.amdgcn_target\s+\"[^\"]*--(gfx\w+)", text)
    return found[1] if found else None


def parse_kernel(text: str, name: str) -> KernelText:
    """The kernel `name` of an assembly file. AssemblyError when it is not there."""
    start = re.search(rf"^{re.escape(name)}:", text, re.M)
    if start is None:
        raise AssemblyError(f"no kernel {name} in this assembly; it has {', '.join(kernel_names(text)) or 'none'}")
    kernel = parse_body(text, start.end(), name)
    descriptor = re.search(rf"^\s*\.amdhsa_kernel {re.escape(name)}$(.*?)^\s*\.end_amdhsa_kernel", text, re.M | re.S)
    if descriptor is None:
        raise AssemblyError(f"kernel {name} has no .amdhsa_kernel block")
    for key, value in re.findall(r"^\s*\.amdhsa_(\w+)\s+(-?(?:0x)?[0-9a-fA-F]+)\s*(?:;.*)?$", descriptor[1], re.M):
        kernel.descriptor[key] = int(value, 0)
    kernel.hidden.update(_hidden_arguments(text, name))
    return kernel


_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_LABEL = re.compile(r"([.\w$@]+):$")
_CONSTANT = re.compile(r"([.\w$]+)@rel32@lo")


def parse_body(text: str, begin: int, name: str) -> KernelText:
    """Instructions from offset `begin` to the end of the function."""
    kernel = KernelText(name, [], {}, {})
    files = {int(number): posixpath.normpath(posixpath.join(*path)) for number, *path in _FILE.findall(text)}
    first = text.count("\n", 0, begin) + 1
    end = text.find("\n.Lfunc_end", begin)
    body = text[begin : end if end >= 0 else len(text)]
    source = ""
    for offset, raw in enumerate(body.split("\n")):
        line = raw.split(";", 1)[0].split("//", 1)[0].strip()
        if not line:
            continue
        if line[0] == "." and not line.endswith(":"):
            location = _LOC.match(line)
            if location and location[2] != "0":
                source = f"{files.get(int(location[1]), '?')}:{location[2]}"
            elif line.startswith((".section", ".size")):
                break  # a descriptor follows the code within the function's range
            continue
        label = _LABEL.match(line)
        if label:
            kernel.labels[label[1]] = len(kernel.lines)
        else:
            kernel.lines.append(Line(line, first + offset, source))
    addressing = (line.text for line in kernel.lines if "@rel32@lo" in line.text)
    for symbol in {found for line in addressing for found in _CONSTANT.findall(line)}:
        kernel.constants[symbol] = _constant(text, symbol)
    return kernel


_WIDTHS = {".byte": "B", ".short": "H", ".long": "I", ".quad": "Q"}


def _constant(text: str, symbol: str) -> bytes:
    """Bytes of a read-only symbol."""
    start = re.search(rf"^{re.escape(symbol)}:", text, re.M)
    if start is None:
        raise AssemblyError(f"the code addresses {symbol}, which this file does not define")
    out = b""
    for raw in text[start.end() :].split("\n")[1:]:
        line = raw.split(";", 1)[0].strip()
        if not line:
            continue
        kind, _, rest = line.partition("\t") if "\t" in line else line.partition(" ")
        if kind in _WIDTHS:
            for item in rest.split(","):
                width = struct.calcsize(_WIDTHS[kind])
                out += (int(item.strip(), 0) & (1 << 8 * width) - 1).to_bytes(width, "little")
        elif kind == ".zero":
            out += bytes(int(rest.split(",")[0], 0))
        elif not line.startswith(".p2align"):
            break
    return out


def _hidden_arguments(text: str, name: str) -> dict[str, int]:
    """Offsets of hidden arguments of one kernel, from the metadata."""
    block = re.search(
        rf"^  - .*?\.symbol:\s+'?{re.escape(name)}\.kd", text[text.find("amdhsa.kernels:") :], re.M | re.S
    )
    if block is None:
        return {}
    own = block[0][block[0].rfind("\n  - ") + 1 :]
    return {
        kind: int(offset)
        for offset, kind in re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+\d+\s+\.value_kind:\s+(hidden_\w+)", own)
    }
