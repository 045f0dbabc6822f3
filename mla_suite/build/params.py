"""Kernel parameters: one struct, declared once in `csrc/common/params/<kernel>.hpp`, mirrored here by parsing it.

The grammar is narrow on purpose, so that the mirror cannot misread what a compiler reads:

    namespace mla {                       // optional
    struct CombineParams {
      const float* partial_out;  // [splits, rows, D_V]
      int64_t out_stride;        // elements
      float softmax_scale;
    };

Types: `[const] T*` with T in void, float and the fixed-width integers; scalars int32_t, uint32_t, int64_t, uint64_t,
float; arrays of a scalar, `uint64_t map[16];`, which Python sees as the fields map_0 to map_15; arrays of a struct that
an included header of the same folder declares, `Pool pool[4];`, whose field cache Python sees as cache_0 to cache_3.
Natural alignment of the fields; the struct may ask for more, `struct alignas(64) DecodeTmaParams {`, which rounds its
size up. A pointer's line has its shape in the comment. The build compiles `static_asserts(...)` with every kernel, so
each compiler confirms the offsets that Python packs to.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from mla_suite.archs import CSRC

_SCALARS = {"int32_t": "i", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q", "float": "f"}
_POINTEES = ("void", "float", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t")
_STRUCT = re.compile(r"^struct\s+(?:alignas\((\d+)\)\s+)?(\w+)\s*\{[^\n]*\n(.*?)^\};", re.M | re.S)
_NAMESPACE = re.compile(r"^namespace\s+([\w:]+)\s*\{", re.M)
_INCLUDE = re.compile(r'^#include "common/params/(\w+)\.hpp"', re.M)
_FIELD = re.compile(r"^\s*(const\s+)?(\w+)\s*(\*)?\s*(\w+)\s*(?:\[(\d+)\])?\s*;\s*(?://\s*(.*?))?\s*$")


@dataclass(frozen=True)
class Field:
    """One member: C type as written, byte offset and size, its name in C++, which differs for an element of an array
    (map[2], pool[0].cache), and the comment of its line.
    """

    name: str
    ctype: str
    offset: int
    size: int
    member: str
    meaning: str

    @property
    def is_pointer(self) -> bool:
        return self.ctype.endswith("*")


@dataclass(frozen=True)
class ParamStruct:
    """The Python mirror of one parameter struct.

    `name` is its C++ name with namespace, `size` and `alignment` are its sizeof and alignof, `offsets` goes by field
    name, `header` is the include path.
    """

    name: str
    header: str
    fields: tuple[Field, ...]
    size: int
    alignment: int

    @property
    def offsets(self) -> dict[str, int]:
        return {item.name: item.offset for item in self.fields}

    def pack(self, **values: int | float) -> bytes:
        """The struct's bytes. Pointers are integers (`tensor.data_ptr()`, 0 for none).

        TypeError names every unknown or missing field; struct.error a value that does not fit its type.
        """
        names = [item.name for item in self.fields]
        unknown, missing = sorted(set(values) - set(names)), [name for name in names if name not in values]
        if unknown or missing:
            raise TypeError(f"{self.name}: unknown fields {unknown}, missing fields {missing}")
        return struct.pack(struct_format(self.fields, 0, self.size), *map(values.__getitem__, names))

    def unpack(self, data: bytes) -> dict[str, int | float]:
        """The field values in `data`, by name: the inverse of `pack`."""
        if len(data) != self.size:
            raise ValueError(f"{self.name}: {len(data)} bytes given, the struct has {self.size}")
        values = struct.unpack(struct_format(self.fields, 0, self.size), data)
        return {item.name: value for item, value in zip(self.fields, values, strict=True)}

    def static_asserts(self) -> str:
        """C++ text that makes a compiler refuse if its layout of this struct differs from Python's."""
        lines = [f'#include "{self.header}"']
        for item in self.fields:
            lines.append(
                f"static_assert(__builtin_offsetof({self.name}, {item.member}) == {item.offset} && "
                f'sizeof({self.name}::{item.member}) == {item.size}, "{self.name}.{item.member}: Python packs '
                f'{item.size} bytes at {item.offset}");'
            )
        lines.append(
            f'static_assert(sizeof({self.name}) == {self.size}, "{self.name}: Python packs {self.size} bytes");'
        )
        return "\n".join(lines) + "\n"


def parse(text: str, header: str, included: Mapping[str, ParamStruct] | None = None) -> ParamStruct:
    """The one struct declared in `text`. ValueError names header and line when it leaves the grammar.

    included  structs by the name that an array's line gives them
    """
    structs_by_name = included or {}
    structs = list(_STRUCT.finditer(text))
    if len(structs) != 1:
        raise ValueError(f"{header}: {len(structs)} parameter structs found; a header declares exactly one")
    match = structs[0]
    first_line = text[: match.start(3)].count("\n") + 1
    spaces = [found.group(1) for found in _NAMESPACE.finditer(text[: match.start()])]
    fields: list[Field] = []
    end = 0
    widest = 1
    for number, line in enumerate(match.group(3).splitlines(), first_line):
        if not line.split("//")[0].strip():
            continue
        found = _FIELD.match(line)
        where = f"{header}:{number}"
        if found is None:
            raise ValueError(f"{where}: {line.strip()!r} is not '<type> <name>;  // <meaning>'")
        const, base, star, name, length, comment = found.groups()
        if length is not None and (star or int(length) == 0):
            raise ValueError(f"{where}: array {name}[{length}]; an array has at least one element, and no pointers")
        if star and not comment:
            raise ValueError(f"{where}: pointer {name} has no comment; state its shape")
        nested = structs_by_name.get(base) if length is not None and not const and not star else None
        if nested is not None:
            members, stride, alignment = nested.fields, nested.size, nested.alignment
        else:
            ctype, stride = _type(where, base, bool(const), bool(star), structs_by_name)
            members, alignment = (Field("", ctype, 0, stride, "", comment or ""),), stride
        end = -(-end // alignment) * alignment
        for element in range(int(length or 1)):
            suffix, index = ("", "") if length is None else (f"_{element}", f"[{element}]")
            for member in members:
                field_name = (member.name or name) + suffix
                if any(item.name == field_name for item in fields):
                    raise ValueError(f"{where}: field {field_name} is declared twice")
                cpp_name = f"{name}{index}" + (f".{member.member}" if member.member else "")
                fields.append(replace(member, name=field_name, offset=end + member.offset, member=cpp_name))
            end += stride
        widest = max(widest, alignment)
    if not fields:
        raise ValueError(f"{header}: struct {match.group(2)} has no fields")
    widest = max(widest, int(match.group(1) or 1))
    size = -(-end // widest) * widest
    return ParamStruct("::".join([*spaces, match.group(2)]), header, tuple(fields), size, widest)


def _type(where: str, base: str, const: bool, star: bool, arrays_of: Iterable[str]) -> tuple[str, int]:
    """The C type of a pointer or scalar, and its size in bytes."""
    if star:
        if base not in _POINTEES:
            raise ValueError(f"{where}: pointer to {base}; possible are {', '.join(_POINTEES)}")
        return f"{'const ' if const else ''}{base}*", 8
    if base not in _SCALARS or const:
        possible = ", ".join([*_SCALARS, *(f"arrays of {known}" for known in arrays_of)])
        raise ValueError(f"{where}: scalar type {'const ' if const else ''}{base}; possible are {possible}")
    return base, struct.calcsize(_SCALARS[base])


def struct_format(fields: Iterable[Field], begin: int, end: int) -> str:
    """The struct-module format of the bytes from `begin` to `end`, with explicit padding, little endian."""
    text, at = "<", begin
    for item in fields:
        text += "x" * (item.offset - at) + ("Q" if item.is_pointer else _SCALARS[item.ctype])
        at = item.offset + item.size
    return text + "x" * (end - at)


@cache
def load(kernel: str, csrc: Path = CSRC) -> ParamStruct:
    """The parameter struct of `csrc/common/params/<kernel>.hpp`. FileNotFoundError or ValueError say what is wrong."""
    header = f"common/params/{kernel}.hpp"
    path = csrc / header
    if not path.is_file():
        raise FileNotFoundError(f"kernel parameters {kernel!r}: no header {header} under {csrc}")
    text = path.read_text(encoding="utf-8")
    included = [load(name, csrc) for name in _INCLUDE.findall(text)]
    return parse(text, header, {known.name.rpartition("::")[2]: known for known in included})


def reciprocal(n: int) -> tuple[int, int]:
    """(m, shift) by which kernels divide by n >= 1: x // n == x * m >> 31 + shift for 0 <= x < 2^31."""
    shift = (n - 1).bit_length()
    return -(-(1 << 31 + shift) // n), shift


@lru_cache(maxsize=1024)
def divisor(name: str, n: int) -> dict[str, int]:
    """The parameters by which kernels divide by n: `reciprocal`, under the names of the headers."""
    return dict(zip((f"{name}_reciprocal", f"{name}_shift"), reciprocal(n), strict=True))
