"""AMD GPU instructions as text: what each does to which registers, and where control goes after it.

Understood are the assembly that clang writes and the listings of LLVM's disassembler (`llvm-objdump -d`). Registers are
triples (file, first, last) of 32-bit registers; VCC, M0 and EXEC are scalar registers by their operand numbers. What an
instruction does to a register is named by the classes of `table.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from hazards.table import passes_of

Register = tuple[str, int, int]

VCC: Register = ("s", 106, 107)
M0: Register = ("s", 124, 124)
EXEC: Register = ("s", 126, 127)
_NAMED: dict[str, Register] = {
    "flat_scratch": ("s", 102, 103),
    "flat_scratch_lo": ("s", 102, 102),
    "flat_scratch_hi": ("s", 103, 103),
    "vcc": VCC,
    "vcc_lo": ("s", 106, 106),
    "vcc_hi": ("s", 107, 107),
    "m0": M0,
    "exec": EXEC,
    "exec_lo": ("s", 126, 126),
    "exec_hi": ("s", 127, 127),
    "vccz": ("z", 0, 0),
    "src_vccz": ("z", 0, 0),
    "execz": ("z", 1, 1),
    "src_execz": ("z", 1, 1),
}
_REGISTER = re.compile(r"(?<![\w.])(?:(acc|[vsa])(\d+)|(acc|[vsa])\[(\d+)(?::(\d+))?\]|([a-z]\w*))(?![\w.])")
_ENCODING = re.compile(r"(_e32|_e64)?(_dpp|_sdwa)?$")
_MODIFIER = re.compile(r"\s(\w+):(\[[^\]]*\]|[^\s,]+)")
_TRANS = re.compile(r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos|exp_legacy|log_legacy)_f(16|32|64)")
_TWO_RESULTS = re.compile(r"v_((add|sub|subrev)c?_co|addc|subb_co|subbrev_co|subb|subbrev|div_scale|mad_[iu]64)_")
_CARRY_IN = re.compile(r"v_(cndmask|addc|subb|subbrev)_")
_ACCUMULATES = re.compile(r"v_(pk_)?(fmac|mac)_|v_dot\w*c_|v_writelane_|v_smfmac_")
_READS_ONLY = re.compile(r"ds_(write|store)|ds_(?!.*rtn)(add|sub|rsub|inc|dec|min|max|and|or|xor|mskor|cmpst|pk_add)")
_PARTIAL = re.compile(r"v_cvt_(scalef32_)?(sr_)?(pk_)?(fp8|bf8|fp4)_")


class Effect(NamedTuple):
    """One thing that an instruction did to a register, or does with it: see the classes of `table.py`."""

    kind: str
    register: Register


class Operation(NamedTuple):
    """Meaning of an instruction's text: `does` are producers, `needs` consumers. `passes` is 0 outside matrix ones."""

    opcode: str
    text: str
    does: tuple[Effect, ...]
    needs: tuple[Effect, ...]
    passes: int
    waits: int


class Instruction(NamedTuple):
    """An operation at a line (counted from 1), and the indices of the instructions that may follow it."""

    line: int
    operation: Operation
    follows: tuple[int, ...]


class UnknownFlow(ValueError):
    """Where a branch goes cannot be read from the text."""


@cache
def registers(operand: str) -> tuple[Register, ...]:
    """The registers named in an operand, `-v1`, `|a[0:3]|` and `s[0:1]` among them; none for a number."""
    found = []
    for match in _REGISTER.finditer(operand):
        file, number, wide, first, last, name = match.groups()
        if name is not None:
            if name in _NAMED:
                found.append(_NAMED[name])
            continue
        file = (file or wide)[0]
        low = int(number if number is not None else first)
        found.append((file, low, int(last) if last is not None else low))
    return tuple(found)


_OPERAND = re.compile(r"(?:[^,\[(]|\[[^\]]*\]|\([^)]*\))+")


def split_operands(rest: str) -> list[str]:
    """Operands between commas outside brackets, each without the modifiers that follow the last."""
    parts = (part.strip() for part in _OPERAND.findall(rest))
    # A modifier after the last operand is separated by a space only: `v1 offset:16`, `off sc0`.
    return [part.split()[0] for part in parts if part and not re.match(r"\w+:", part)]


@cache
def operation(text: str) -> Operation:
    """The operation in one line of assembly without its comment."""
    spelled, _, rest = text.partition(" ")
    suffix = _ENCODING.search(spelled)
    assert suffix is not None
    opcode = spelled[: suffix.start()]
    modifiers = dict(_MODIFIER.findall(" " + rest))
    words = set(re.sub(r"\[[^\]]*\]", "", rest).replace(",", " ").split())
    operands = split_operands(rest)
    dpp = suffix.group(2) == "_dpp" or any(re.match(r"(quad_perm|row_|wave_|bank_mask)", m) for m in modifiers)
    waits = int(operands[0], 0) + 1 if opcode == "s_nop" else 1
    if opcode.startswith(("v_mfma", "v_smfmac")):
        return _matrix(opcode, text, operands, modifiers, waits)
    if opcode.startswith("v_"):
        does, needs = _vector(opcode, operands, modifiers, dpp)
    elif opcode.startswith("ds_"):
        does, needs = _lds(opcode, operands)
    elif opcode.startswith(("global_", "flat_", "scratch_", "buffer_", "tbuffer_")):
        does, needs = _memory(opcode, operands, words)
    else:
        does, needs = _scalar(opcode, operands)
    return Operation(opcode, text, tuple(does), tuple(needs), 0, waits)


def _matrix(opcode: str, text: str, operands: Sequence[str], modifiers: dict[str, str], waits: int) -> Operation:
    shape = opcode.replace("_scale_", "_", 1)
    if opcode.endswith("f64"):
        name, kind = ("dgemm4" if "4x4x4" in opcode else "dgemm16"), "dgemm"
    elif re.search(r"x\d+(_\d+b)?_?f32$", opcode):
        name = kind = "sgemm"
    else:
        name = kind = "xdl"
    result = [Effect(name, r) for r in registers(operands[0])]
    passes = passes_of(opcode, int(modifiers.get("cbsz", 0)), int(modifiers.get("blgp", 0)))
    sparse = opcode.startswith("v_smfmac")
    c = registers(operands[0] if sparse else operands[3])
    others = [r for i, part in enumerate(operands[1:], 1) if sparse or i != 3 for r in registers(part)]
    does = [*result, *(Effect("xdl_c", r) for r in c if kind == "xdl")]
    needs = [Effect("matrix_read", r) for r in [*others, *c]]
    needs += [Effect("matrix_ab", r) for r in others] + [Effect(f"{kind}_c", r) for r in c]
    needs += [Effect("matrix_exec", EXEC)] + [Effect("any_read", r) for r in [*others, *c]]
    needs += [Effect("any_write", r.register) for r in result]
    return Operation(shape, text, tuple(does), tuple(needs), passes, waits)


def _vector(
    opcode: str, operands: Sequence[str], modifiers: dict[str, str], dpp: bool
) -> tuple[list[Effect], list[Effect]]:
    results = 0 if opcode in ("v_nop", "v_clrexcp") else 2 if _TWO_RESULTS.match(opcode) else 1
    written = [r for part in operands[:results] for r in registers(part)]
    sources = [registers(part) for part in operands[results:]]
    shifted = modifiers.get("dst_sel", "DWORD") != "DWORD" or _selects_part(opcode, modifiers, len(sources))
    keeps = shifted or bool(_PARTIAL.match(opcode) or _ACCUMULATES.match(opcode))
    keeps = keeps or (dpp and "bound_ctrl" not in modifiers) or modifiers.get("dst_unused") == "UNUSED_PRESERVE"
    if opcode.startswith(("v_swap_", "v_permlane16_swap", "v_permlane32_swap")):
        written += sources[0]
        sources.append(registers(operands[0]))
    if keeps:
        sources.append(tuple(r for r in written if r[0] in "va"))
    if opcode.startswith("v_cmpx"):
        written.append(EXEC)
    dot, trans = opcode.startswith("v_dot"), bool(_TRANS.fullmatch(opcode))
    does: list[Effect] = []
    needs: list[Effect] = []
    for r in written:
        if r[0] in "va":
            does.append(Effect("dot" if dot else "valu_vgpr", r))
            does += [Effect("trans", r)] if trans else []
            does += [Effect("shifted", r)] if shifted else []
            needs += [Effect("valu_write", r), Effect("any_write", r)]
        else:
            does.append(Effect("valu_exec" if r[1] >= EXEC[1] else "valu_sgpr", r))
    for position, found in enumerate(sources):
        for r in found:
            if r[0] in "va":
                # C of a dot product is its third source, or what it accumulates to.
                accumulated = position >= 2 or (keeps and position == len(sources) - 1)
                role = "any_read" if not dot else "dot_c" if accumulated else "dot_ab"
                needs += [Effect("valu_read", r), Effect(role, r)]
                needs += [] if trans else [Effect("non_trans_read", r)]
                needs += [Effect("dpp_read", r)] if dpp else []
                needs += [Effect("lane_read", r)] if opcode.startswith(("v_readlane", "v_readfirstlane")) else []
                needs += [Effect("permlane_read", r)] if opcode.startswith("v_permlane") else []
            elif r[0] == "z":
                needs.append(Effect("zero_flag", (VCC, EXEC)[r[1]]))
            elif opcode.startswith(("v_readlane", "v_writelane")) and position == 1:
                needs.append(Effect("lane_select", r))
            elif not (_CARRY_IN.match(opcode) and position == 2):
                needs.append(Effect("valu_sgpr", r))
    if opcode.startswith("v_div_fmas"):
        needs.append(Effect("div_fmas", VCC))
    if dpp:
        needs.append(Effect("dpp_exec", EXEC))
    if opcode.startswith(("v_readlane", "v_readfirstlane", "v_writelane")):
        needs.append(Effect("lane_exec", EXEC))
    if opcode.startswith("v_permlane"):
        needs.append(Effect("permlane_exec", EXEC))
    return does, needs


def _selects_part(opcode: str, modifiers: dict[str, str], sources: int) -> bool:
    """Whether op_sel moves the result inside its register: the elements behind those of the sources."""
    if "op_sel" not in modifiers or opcode.startswith(("v_pk_", "v_dot")):
        return False
    chosen = [int(bit) for bit in re.findall(r"\d", modifiers["op_sel"])]
    # The stochastic conversions choose a byte by two bits, the first of which stands where a third source's would.
    first = 2 if opcode.startswith("v_cvt_sr_") else sources
    return any(chosen[first:]) or (opcode.startswith("v_cvt_scalef32_sr_pk") and "fp4" in opcode)


def _lds(opcode: str, operands: Sequence[str]) -> tuple[list[Effect], list[Effect]]:
    results = 0 if _READS_ONLY.match(opcode) or opcode == "ds_nop" else 1
    written = [r for part in operands[:results] for r in registers(part)]
    read = [r for part in operands[results:] for r in registers(part)]
    needs = [Effect(kind, r) for r in read for kind in ("memory_read", "any_read")]
    needs += [Effect("any_write", r) for r in written]
    if "addtid" in opcode or opcode.startswith(("ds_gws", "ds_append", "ds_consume", "ds_ordered")):
        needs.append(Effect("m0_read", M0))
    return [], needs


def _memory(opcode: str, operands: Sequence[str], words: set[str]) -> tuple[list[Effect], list[Effect]]:
    to_lds = "_lds_" in opcode or "lds" in words
    buffer = opcode.startswith(("buffer_", "tbuffer_"))
    atomic, store = "_atomic_" in opcode, "_store_" in opcode
    returns = atomic and bool({"sc0", "glc"} & words)
    results = 0 if to_lds or store or (atomic and not returns) else 1
    if buffer and opcode.startswith(("buffer_wb", "buffer_inv")):
        results = 0
    written = [r for part in operands[:results] for r in registers(part)]
    read = [r for part in operands[0 if buffer and atomic else results :] for r in registers(part)]
    does = []
    if store or atomic:
        data = operands[0] if buffer else operands[(1 if returns else 0) + 1]
        wide = [r for r in registers(data) if r[0] in "va" and r[2] - r[1] >= 2]
        held = buffer and len(operands) > 3 and bool(registers(operands[3]))
        does = [Effect("wide_buffer_store" if held else "wide_store", r) for r in wide]
    needs = [Effect(kind, r) for r in read if r[0] in "va" for kind in ("memory_read", "any_read")]
    needs += [Effect("any_write", r) for r in written]
    needs += [Effect("vmem_sgpr", r) for r in read if r[0] == "s"]
    if to_lds:
        needs += [Effect("m0_read_by_buffer" if buffer and not store else "m0_read", M0), Effect("vmem_sgpr", M0)]
    return does, needs


def _scalar(opcode: str, operands: Sequence[str]) -> tuple[list[Effect], list[Effect]]:
    does: list[Effect] = []
    needs: list[Effect] = []
    if opcode.startswith(("s_setreg", "s_getreg")):
        operand = operands[0 if opcode.startswith("s_setreg") else 1]
        match = re.search(r"hwreg\(\s*(\w+)", operand)
        number = int(operand, 0) & 63 if match is None else _HWREG.get(match[1], -1)
        register = ("h", number, number)
        needs.append(Effect("getreg", register))
        if opcode.startswith("s_setreg"):
            does.append(Effect("setreg", register))
    elif opcode.startswith(("s_movrel", "s_sendmsg")):
        needs.append(Effect("m0_read", M0))
    if operands and not opcode.startswith(_NO_SALU_RESULT):
        does += [Effect("salu_m0", r) for r in registers(operands[0]) if r == M0]
    return does, needs


_HWREG = {"HW_REG_MODE": 1, "HW_REG_STATUS": 2, "HW_REG_TRAPSTS": 3, "HW_REG_HW_ID": 4}
_NO_SALU_RESULT = ("s_cmp", "s_bitcmp", "s_load", "s_buffer_load", "s_sendmsg", "s_setreg")
_CODE = re.compile(r"(v|s|ds|global|flat|scratch|buffer|tbuffer)_\w+")
_LABEL = re.compile(r"(?:[0-9a-f]{8,16} )?<?([\w.$@]+)>?:$")
_ADDRESS = re.compile(r"//\s*([0-9A-Fa-f]{8,16}):((?:\s[0-9A-Fa-f]{8})+)")


def instructions(lines: Iterable[str]) -> list[Instruction]:
    """The instructions of a text, in order, with what may follow each.

    UnknownFlow where a branch cannot be resolved.
    """
    code: list[tuple[int, Operation]] = []
    labels: dict[str, int] = {}
    addresses: dict[int, int] = {}
    ends: dict[int, int] = {}  # address behind the instruction at an index
    metadata = False
    for number, line in enumerate(lines, 1):
        if line.startswith("\t."):  # a directive; more than half of an assembly text names source lines
            metadata = (metadata or ".amdgpu_metadata" in line) and ".end_amdgpu_metadata" not in line
            continue
        found = None if metadata else _meaning(line)
        if isinstance(found, str):
            labels[found] = len(code)
        elif found is not None:
            place = _ADDRESS.search(line) if "//" in line else None
            if place:
                addresses[int(place[1], 16)] = len(code)
                ends[len(code)] = int(place[1], 16) + 4 * len(place[2].split())
            code.append((number, found))
    return [
        Instruction(number, found, _follows(index, found, len(code), labels, addresses, ends, number))
        for index, (number, found) in enumerate(code)
    ]


@cache
def _meaning(line: str) -> Operation | str | None:
    """The operation of a line, or the name of its label."""
    text = line.partition(";")[0].partition("//")[0].strip()
    if _CODE.match(text):
        return operation(" ".join(text.split()))
    label = _LABEL.match(text)
    return label[1] if label else None


def _follows(
    index: int,
    found: Operation,
    size: int,
    labels: dict[str, int],
    addresses: dict[int, int],
    ends: dict[int, int],
    line: int,
) -> tuple[int, ...]:
    opcode = found.opcode
    next_one = (index + 1,) if index + 1 < size else ()
    if opcode[0] != "s":
        return next_one
    if opcode.startswith(("s_endpgm", "s_rfe")):
        return ()
    if opcode.startswith(("s_setpc", "s_swappc", "s_cbranch_g_fork", "s_cbranch_i_fork", "s_cbranch_join")):
        raise UnknownFlow(f"line {line}: `{found.text}` goes where the text does not say")
    if not opcode.startswith(("s_branch", "s_cbranch", "s_call")):
        return next_one
    target = found.text.split()[-1]
    if target in labels:
        at = labels[target]
    elif index in ends and re.fullmatch(r"-?(0x)?[0-9a-fA-F]+", target):
        offset = int(target, 0)
        offset -= 65536 if offset >= 32768 else 0
        at = addresses.get(ends[index] + 4 * offset, -1)
    else:
        at = -1
    if at < 0:
        raise UnknownFlow(f"line {line}: the target of `{found.text}` is not in the text")
    if at >= size:
        return next_one if opcode.startswith("s_cbranch") else ()
    return (at,) if opcode.startswith("s_branch") else (*next_one, at)
