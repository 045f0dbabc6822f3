"""One instruction's text -> mnemonic, operands and modifiers."""

from __future__ import annotations

import functools
import re
import struct
from types import MappingProxyType
from typing import NamedTuple

from mla_suite.emulator.assembly import AssemblyError

NONE, VECTOR, SCALAR, LITERAL, OFF = range(5)
NEGATE, ABSOLUTE, SIGN_EXTEND, FLOAT_LITERAL = 1, 2, 4, 8
_SPECIAL = {
    "flat_scratch": (102, 2),
    "xnack_mask": (104, 2),
    "vcc": (106, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "m0": (124, 1),
    "exec": (126, 2),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
}
_ACCUMULATION = 256


class Operand(NamedTuple):
    """kind and flags as in csrc/emulator/program.hpp; `value` is a 64-bit pattern for literals."""

    kind: int
    first: int = 0
    registers: int = 0
    flags: int = 0
    value: int = 0


class Instruction(NamedTuple):
    name: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, int]


_REGISTER = re.compile(r"([vas])(?:(\d+)|\[(\d+)(?::(\d+))?\])$")
_FLOAT = re.compile(r"-?\d+\.\d*(?:[eE][+-]?\d+)?$")
_SYMBOL = re.compile(r"([.\w$]+)@(abs32|rel32)@(lo|hi)(?:\+(\d+))?$")
_ALIASES = {
    "v_mfma_f32_16x16x16bf16_1k": "v_mfma_f32_16x16x16_bf16",
    "v_mfma_f32_32x32x8bf16_1k": "v_mfma_f32_32x32x8_bf16",
    "v_mfma_f32_16x16x16f16": "v_mfma_f32_16x16x16_f16",
    "v_mfma_f32_32x32x8f16": "v_mfma_f32_32x32x8_f16",
    "v_mfma_f32_16x16x4f32": "v_mfma_f32_16x16x4_f32",
    "v_mfma_f32_32x32x2f32": "v_mfma_f32_32x32x2_f32",
}
_SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa)$")


def _address(token: str, symbols: dict[str, int]) -> Operand | None:
    """Half of the address of a symbol."""
    symbol = _SYMBOL.match(token)
    if symbol is None or symbol[1] not in symbols:
        return None
    shift = 32 if symbol[3] == "hi" else 0
    return Operand(LITERAL, 0, 0, 0, symbols[symbol[1]] >> shift & 0xFFFFFFFF)


# The tokens of kernels are registers and a few numbers, a hundred times each.
@functools.lru_cache(maxsize=1 << 13)
def read_operand(token: str) -> Operand | None:
    flags = 0
    inner = token
    if inner.startswith("sext("):
        inner, flags = inner[5:-1], flags | SIGN_EXTEND
    if inner.startswith("-") and not re.match(r"-[\d.]", inner):
        inner, flags = inner[1:], flags | NEGATE
    elif inner.startswith("neg("):
        inner, flags = inner[4:-1], flags | NEGATE
    if inner.startswith("|"):
        inner, flags = inner[1:-1], flags | ABSOLUTE
    elif inner.startswith("abs("):
        inner, flags = inner[4:-1], flags | ABSOLUTE
    register = _REGISTER.match(inner)
    if register:
        first = int(register[2] or register[3])
        count = int(register[4]) - first + 1 if register[4] else 1
        if register[1] == "s":
            return Operand(SCALAR, first, count, flags)
        return Operand(VECTOR, first + (_ACCUMULATION if register[1] == "a" else 0), count, flags)
    if inner in _SPECIAL:
        index, count = _SPECIAL[inner]
        return Operand(SCALAR, index, count, flags)
    if inner == "off":
        return Operand(OFF)
    if _FLOAT.match(inner):
        return Operand(LITERAL, 0, 0, flags | FLOAT_LITERAL, struct.unpack("<Q", struct.pack("<d", float(inner)))[0])
    try:
        return Operand(LITERAL, 0, 0, flags, int(inner, 0) & (1 << 64) - 1)
    except ValueError:
        return None


_HARDWARE = {"HW_REG_MODE": 1, "HW_REG_HW_ID": 4, "HW_REG_GPR_ALLOC": 5, "HW_REG_LDS_ALLOC": 6, "HW_REG_XCC_ID": 20}
_SELECTS = {"BYTE_0": 0, "BYTE_1": 1, "BYTE_2": 2, "BYTE_3": 3, "WORD_0": 4, "WORD_1": 5, "DWORD": 6}
_UNUSED = {"UNUSED_PAD": 0, "UNUSED_SEXT": 1, "UNUSED_PRESERVE": 2}
_FLAGS = {"sc0", "sc1", "nt", "lds", "offen", "idxen", "clamp", "gds", "fi", "bound_ctrl"}
_FLAGS |= {"row_mirror", "row_half_mirror"}
_NUMBERS = {"offset", "offset0", "offset1", "mul", "div", "row_mask", "bank_mask", "cbsz", "abid", "blgp", "bitop3"}
_LISTS = {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"}
_DPP = {"row_shl", "row_shr", "row_ror", "row_newbcast", "row_bcast", "wave_shl", "wave_shr", "wave_rol", "wave_ror"}
_DPP_ALL = _DPP | {"quad_perm", "row_mirror", "row_half_mirror"}


def _swizzle(text: str) -> int | None:
    """The 16-bit pattern of swizzle(MODE, ...)."""
    mode, *rest = [part.strip().strip('"') for part in text.split(",")]
    if mode == "QUAD_PERM":
        return 0x8000 | sum(int(lane) << 2 * i for i, lane in enumerate(rest))
    if mode == "SWAP":
        return int(rest[0]) << 10 | 31
    if mode == "REVERSE":
        return (int(rest[0]) - 1) << 10 | 31
    if mode == "BROADCAST":
        return int(rest[1]) << 5 | (32 - int(rest[0]))
    if mode == "BITMASK_PERM":
        keep = flip = force = 0
        for bit, letter in enumerate(reversed(rest[0])):
            keep |= (letter in "pi") << bit
            flip |= (letter == "i") << bit
            force |= (letter == "1") << bit
        return flip << 10 | force << 5 | keep
    return None


@functools.lru_cache(maxsize=1 << 12)
def _modifier(token: str) -> MappingProxyType[str, int] | None:
    """What one modifier says; None if the token is none, or its value is not understood."""
    out: dict[str, int] = {}
    try:
        return MappingProxyType(out) if _read_modifier(token, out) else None
    except (ValueError, IndexError):
        return None


def _read_modifier(token: str, out: dict[str, int]) -> bool:
    name, colon, value = token.partition(":")
    if name in _FLAGS:
        out[name] = 1
    elif colon and name in _NUMBERS and value.startswith("swizzle("):
        pattern = _swizzle(value[8:-1])
        if pattern is None:
            return False
        out["swizzle"] = pattern
    elif colon and name in _NUMBERS:
        out[name] = int(value, 0)
    elif colon and name in _LISTS:
        out[name] = sum(int(bit) << i for i, bit in enumerate(value.strip("[]").split(",")))
        if name == "op_sel_hi":
            out["has_op_sel_hi"] = 1
    elif colon and name in _DPP:
        out[name] = int(value, 0) + 1
    elif colon and name == "quad_perm":
        out[name] = sum(int(lane) << 2 * i for i, lane in enumerate(value.strip("[]").split(","))) + 1
    elif colon and name in ("dst_sel", "src0_sel", "src1_sel") and value in _SELECTS:
        out[name] = _SELECTS[value]
    elif colon and name == "dst_unused" and value in _UNUSED:
        out[name] = _UNUSED[value]
    elif token.startswith(("vmcnt(", "lgkmcnt(", "expcnt(")):
        counter, count = token[:-1].split("(")
        out[counter] = int(count, 0) + 1
    elif token.startswith("hwreg("):
        register, *field = [part.strip() for part in token[6:-1].split(",")]
        offset, size = (int(part, 0) for part in field) if field else (0, 32)
        number = _HARDWARE[register] if register in _HARDWARE else int(register, 0) if register.isdigit() else 63
        out["hwreg"] = number | offset << 6 | (size - 1) << 11
    else:
        return False
    return True


_TOKEN = re.compile(r"(?:[^\s,&()\[\]]|\[[^\]]*\]|\((?:[^()]|\([^()]*\))*\))+")


def _tokens(text: str) -> list[str]:
    """Operands and modifiers, which commas and blanks part; brackets protect both, and lose their blanks."""
    tokens = _TOKEN.findall(text)
    return [token.replace(" ", "") for token in tokens] if "(" in text or "[" in text else tokens


def parse_instruction(text: str, labels: dict[str, int], symbols: dict[str, int]) -> Instruction:
    """Mnemonic without its encoding suffix, operands in order, modifiers by name.

    AssemblyError names what is not understood.
    """
    mnemonic, _, rest = text.replace("\t", " ").partition(" ")
    modifiers: dict[str, int] = {}
    operands: list[Operand] = []
    for token in _tokens(rest):
        said = _modifier(token)
        if said is not None:
            modifiers.update(said)
            continue
        operand = _address(token, symbols) if "@" in token else read_operand(token)
        if operand is not None:
            operands.append(operand)
        elif mnemonic.startswith(("s_branch", "s_cbranch")):
            modifiers["target"] = labels.get(token, -1)
        else:
            raise AssemblyError(f"`{text}`: {token!r} is neither an operand nor a modifier the emulator knows")
    name = mnemonic
    while suffix := _SUFFIX.search(name):
        name = name[: suffix.start()]
        if suffix[1] in ("dpp", "sdwa"):
            modifiers[suffix[1]] = 1
    if _DPP_ALL & modifiers.keys() or modifiers.get("dpp"):
        modifiers["dpp"] = 1
        modifiers.setdefault("row_mask", 15)
        modifiers.setdefault("bank_mask", 15)
    if modifiers.get("sdwa"):
        for select in ("dst_sel", "src0_sel", "src1_sel"):
            modifiers.setdefault(select, _SELECTS["DWORD"])
        modifiers.setdefault("dst_unused", _UNUSED["UNUSED_PRESERVE"])  # as the assembler encodes it
    if name == "s_waitcnt" and operands:
        code = operands.pop().value
        modifiers["vmcnt"] = (code & 15 | code >> 10 & 48) + 1
        modifiers["lgkmcnt"] = (code >> 8 & 15) + 1
    if name == "ds_swizzle_b32" and "swizzle" not in modifiers:
        modifiers["swizzle"] = modifiers.pop("offset", 0)
    if len(operands) > 6:
        raise AssemblyError(f"`{text}`: {len(operands)} operands, the emulator takes 6")
    return Instruction(_ALIASES.get(name, name), tuple(operands), modifiers)
