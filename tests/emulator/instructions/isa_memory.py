"""Loads and stores of scalar, global, flat and buffer memory, and loads that go straight to LDS. "Scalar Memory
Operations", "Vector Memory Operations" (buffer resource, range checking, memory buffer load to LDS), "Flat Memory"."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from isa_case import (
    ALL,
    ARCHS,
    LANE,
    Case,
    Custom,
    active,
    in_lds,
    in_memory,
    in_registers,
    random_mask,
    register,
    rows_from,
    vector_name,
    words,
)

from mla_suite.emulator import State

U = np.uint32


class Part(NamedTuple):
    """The bytes that a load or store moves, and their place in the register."""

    bytes: int
    extend: str = ""  # "", "zero", "sign"
    half: str = ""  # "", "low", "high": the other half is kept

    @property
    def registers(self) -> int:
        return max(self.bytes // 4, 1)


Maker = Callable[[np.random.Generator, str, Part], Iterable[Case]]
"""Yields the checks of an instruction, by its name and what it moves."""


LOADS = {
    "ubyte": Part(1, "zero"),
    "sbyte": Part(1, "sign"),
    "ushort": Part(2, "zero"),
    "sshort": Part(2, "sign"),
    "dword": Part(4),
    "dwordx2": Part(8),
    "dwordx3": Part(12),
    "dwordx4": Part(16),
    "short_d16": Part(2, "zero", "low"),
    "short_d16_hi": Part(2, "zero", "high"),
    "ubyte_d16": Part(1, "zero", "low"),
    "ubyte_d16_hi": Part(1, "zero", "high"),
    "sbyte_d16": Part(1, "sign", "low"),
    "sbyte_d16_hi": Part(1, "sign", "high"),
}
STORES = {
    "byte": Part(1),
    "short": Part(2),
    "byte_d16_hi": Part(1, half="high"),
    "short_d16_hi": Part(2, half="high"),
    "dword": Part(4),
    "dwordx2": Part(8),
    "dwordx3": Part(12),
    "dwordx4": Part(16),
}


def bytes_at(data: np.ndarray, offsets: np.ndarray, count: int) -> np.ndarray:
    """[64, count] bytes."""
    return data[offsets[:, None] + np.arange(count)]


def loaded(part: Part, raw: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Registers [n, 64] after a load of [64, bytes]."""
    if part.bytes >= 4:
        return np.ascontiguousarray(raw).view(U).T
    value = np.zeros(64, np.int64)
    for i in range(part.bytes):
        value |= raw[:, i].astype(np.int64) << 8 * i
    if part.extend == "sign":
        top = 1 << 8 * part.bytes - 1
        value = (value ^ top) - top
    if part.half:
        value = (value & 0xFFFF).astype(U).astype(np.int64)
        kept = old[0].astype(np.int64)
        value = kept & 0xFFFF0000 | value if part.half == "low" else kept & 0xFFFF | value << 16
    return (value & 0xFFFFFFFF).astype(U)[None]


def stored(part: Part, registers: np.ndarray) -> np.ndarray:
    """[64, bytes] of a store."""
    shifted = registers >> U(16) if part.half == "high" else registers
    return np.ascontiguousarray(shifted.T).view(np.uint8).reshape(64, -1)[:, : part.bytes]


def written(memory: np.ndarray, pieces: Iterable[tuple[np.ndarray, np.ndarray]], lanes: np.ndarray) -> np.ndarray:
    """Memory after these lanes have stored their bytes: (offsets [64], bytes [64, n]) of each piece."""
    after = memory.copy()
    for lane in np.flatnonzero(lanes):
        for at, raw in pieces:
            after[at[lane] : at[lane] + raw.shape[1]] = raw[lane]
    return after


def offsets_of(rng: np.random.Generator, part: Part, room: int) -> np.ndarray:
    step = min(part.bytes, 4)
    return rng.permutation(room // step - 8)[:64] * step


WAIT = "s_waitcnt vmcnt(0) lgkmcnt(0)"


def load(rng: np.random.Generator, op: str, part: Part) -> Iterable[Case]:
    flat = op.startswith("flat")
    data = rng.integers(0, 256, 1024 + 64, dtype=np.uint8)
    base = data.ctypes.data
    target = vector_name(4, part.registers)
    for variant in range(4):
        mask = ALL if variant == 0 else random_mask(rng)
        offsets, old = offsets_of(rng, part, 1024), words(rng, part.registers, 64)
        immediate = 0 if variant == 0 else int(rng.choice([4, 8, 16]))
        tail = f" offset:{immediate}" if immediate else ""
        sgpr: dict[int | str, int] = {}
        if variant % 2 and not flat:  # a scalar base and a 32-bit offset per lane
            address: object = offsets.astype(U)
            name, sgpr = "v0, s[2:3]", {"s2": base}
            if variant == 3:
                tail, immediate, sgpr = " offset:-16", 0, {"s2": base + 16}
        else:
            address = (base + offsets).astype(np.uint64)
            name = "v[0:1]" if flat else "v[0:1], off"
        want = np.where(active(mask), loaded(part, bytes_at(data, offsets + immediate, part.bytes), old), old)
        text = f"{op} {target}, {name}{tail}"
        vgpr = {0: address, **rows_from(4, old)}
        memory = [("data", data, "r")]
        yield Case([text, WAIT], in_registers(4, want, text), vgpr, sgpr, mask, memory=memory)


def store(rng: np.random.Generator, op: str, part: Part) -> Iterable[Case]:
    flat = op.startswith("flat")
    source = vector_name(4, part.registers)
    for variant in range(3):
        data = rng.integers(0, 256, 2048, dtype=np.uint8)
        mask = ALL if variant == 0 else random_mask(rng)
        step = max(part.bytes, 4)
        offsets = rng.permutation(1024 // step)[:64] * step if part.bytes < 16 else rng.permutation(64) * step
        value = words(rng, part.registers, 64)
        sgpr: dict[int | str, int] = {}
        if variant == 1 and not flat:
            address: object = offsets.astype(U)
            name, sgpr = f"v0, {source}, s[2:3]", {"s2": data.ctypes.data}
        else:
            address = (data.ctypes.data + offsets).astype(np.uint64)
            name = f"v[0:1], {source}" + ("" if flat else ", off")
        want = written(data, [(offsets, stored(part, value))], active(mask))
        text = f"{op} {name}"
        vgpr = {0: address, **rows_from(4, value)}
        yield Case([text, WAIT], in_memory(data, want, text), vgpr, sgpr, mask, memory=[("data", data, "rw")])


def register_forms(space: str, load: Maker, store: Maker) -> None:
    """All loads and stores of one way to address memory."""
    for verb, make, parts in (("load", load, LOADS), ("store", store, STORES)):
        for name, part in parts.items():
            register(Custom(f"{space}_{verb}_{name}", make, part))


register_forms("global", load, store)
register_forms("flat", load, store)


def resource(address: int, size: int, stride: int = 0, first: int = 4) -> dict[int | str, int]:
    """s[4:7]: base, stride, number of bytes (of records with a stride), and the raw data format word."""
    parts = address & 0xFFFFFFFF, address >> 32 | stride << 16, size, 0x00027000
    return {f"s{first + i}": word for i, word in enumerate(parts)}


class Addressing(NamedTuple):
    """How the lanes name their bytes: text after the data register, registers, and the offsets they mean."""

    text: str
    vgpr: dict[int | str, object]
    sgpr: dict[int | str, int]
    offsets: np.ndarray
    valid: np.ndarray


def addressings(rng: np.random.Generator, part: Part, data: np.ndarray, size: int) -> Iterable[Addressing]:
    """Raw buffers of `size` bytes and one of records, with lanes past the end."""
    base = data.ctypes.data
    step = min(part.bytes, 4)
    count = size // step
    far = (rng.permutation(count + 24)[:64] * step).astype(np.int64)
    yield Addressing("v0, s[4:7], 0 offen", {0: far.astype(U)}, resource(base, size), far, far + part.bytes <= size)
    moved = far + 12 + 8
    yield Addressing(
        "v0, s[4:7], s9 offen offset:12",
        {0: far.astype(U)},
        {**resource(base, size), "s9": 8},
        moved,
        moved + part.bytes <= size,
    )
    huge = np.where(LANE % 4 == 0, 0xFFFFFF00, far)  # wraps beyond 4 GiB are outside, not at the start
    yield Addressing("v0, s[4:7], 0 offen", {0: huge.astype(U)}, resource(base, size), huge, huge + part.bytes <= size)
    same = np.full(64, 16, np.int64)
    yield Addressing("off, s[4:7], 0 offset:16", {}, resource(base, size), same, np.ones(64, bool))
    stride, records = 16, size // 16
    index = rng.integers(0, records + 6, 64)
    at = index * stride
    yield Addressing("v0, s[4:7], 0 idxen", {0: index.astype(U)}, resource(base, records, stride), at, index < records)


def buffer_load(rng: np.random.Generator, op: str, part: Part) -> Iterable[Case]:
    """A lane whose bytes lie past the end reads 0 and touches nothing."""
    size = 480 if part.bytes < 12 else 720
    data = rng.integers(0, 256, size, dtype=np.uint8)
    for variant, mode in enumerate(addressings(rng, part, data, size)):
        mask = ALL if variant != 1 else random_mask(rng)
        old = words(rng, part.registers, 64)
        padded = np.concatenate([data, np.zeros(8192, np.uint8)])
        offsets = np.where(mode.offsets < size, mode.offsets, size)
        raw = bytes_at(padded, offsets, part.bytes)  # words past the end, one by one, are zero
        if "idxen" in mode.text:
            raw = np.where(mode.valid[:, None], raw, 0).astype(np.uint8)
        want = np.where(active(mask), loaded(part, raw, old), old)
        text = f"{op} {vector_name(4, part.registers)}, {mode.text}"
        vgpr = {**mode.vgpr, **rows_from(4, old)}
        yield Case([text, WAIT], in_registers(4, want, text), vgpr, mode.sgpr, mask, memory=[("data", data, "r")])


def buffer_store(rng: np.random.Generator, op: str, part: Part) -> Iterable[Case]:
    """A lane whose bytes lie past the end stores nothing."""
    size = 480
    for variant in range(3):
        data = rng.integers(0, 256, size, dtype=np.uint8)
        step = max(part.bytes, 4)
        offsets = (rng.permutation(size // step + 12)[:64] * step).astype(np.int64)
        while len(offsets) < 64:
            offsets = np.concatenate([offsets, [size + 4096 + step * len(offsets)]])
        mask = ALL if variant != 1 else random_mask(rng)
        value = words(rng, part.registers, 64)
        want = written(data, [(offsets, stored(part, value))], active(mask) & (offsets + part.bytes <= size))
        text = f"{op} {vector_name(4, part.registers)}, v0, s[8:11], 0 offen"
        sgpr = resource(data.ctypes.data, size, first=8)
        vgpr = {0: offsets.astype(U), **rows_from(4, value)}
        yield Case([text, WAIT], in_memory(data, want, text), vgpr, sgpr, mask, memory=[("data", data, "rw")])


register_forms("buffer", buffer_load, buffer_store)


# Loads to LDS: lane l writes at M0 + instruction offset + l x (bytes, at least a dword); no register is written.
DIRECT = {"ubyte": 1, "ushort": 2, "dword": 4, "dwordx3": 12, "dwordx4": 16}


def direct(rng: np.random.Generator, op: str, width: int) -> Iterable[Case]:
    place = max(width, 4)
    data = rng.integers(0, 256, 4096, dtype=np.uint8)
    for variant in range(4):
        buffered = op.startswith("buffer")
        mask = ALL if variant % 2 == 0 else random_mask(rng)
        immediate = 0 if variant < 2 else 16 if width != 12 else 12
        offsets = rng.permutation(128)[:64] * 16
        lds = rng.integers(0, 256, 64 * place + 128, dtype=np.uint8)
        size = 1500 if buffered else 4096
        want, m0 = lds.copy(), 32 if width != 12 else 48
        for lane in np.flatnonzero(active(mask)):
            at = m0 + immediate + lane * place
            start = offsets[lane] + immediate
            piece = data[start : start + width] if start + width <= size else np.zeros(width, np.uint8)
            want[at : at + place] = np.pad(piece, (0, place - width))
        tail = f" offset:{immediate}" if immediate else ""
        if buffered:
            text = f"{op} v0, s[4:7], 0 offen{tail} lds"
            sgpr = {**resource(data.ctypes.data, size), "m0": m0}
            vgpr: dict[int | str, object] = {0: offsets.astype(U)}
        elif variant == 1:
            text, sgpr = f"{op} v0, s[2:3]{tail}", {"s2": data.ctypes.data, "m0": m0}
            vgpr = {0: offsets.astype(U)}
        else:
            text, sgpr = f"{op} v[0:1], off{tail}", {"m0": m0}
            vgpr = {0: (data.ctypes.data + offsets).astype(np.uint64)}

        check = in_lds(want, text)
        yield Case([text, "s_waitcnt vmcnt(0)"], check, vgpr, sgpr, mask, lds=lds, memory=[("data", data, "r")])


for name, width in DIRECT.items():
    archs = ARCHS if width <= 4 else ("gfx950",)
    register(Custom(f"global_load_lds_{name}", direct, width, archs=archs))
    if name not in ("ubyte", "ushort"):
        register(Custom(f"buffer_load_{name}", direct, width, archs=archs))


def scalar_load(rng: np.random.Generator, op: str, count: int, buffered: bool) -> Iterable[Case]:
    data = words(rng, 64)
    target = f"s[32:{31 + count}]" if count > 1 else "s32"
    for base, offset, at in (("0", 0, 0), ("0x24", 0x24, 9), ("s20", 0x40, 16), ("s20 offset:0x10", 0x40, 20)):
        if buffered:
            text = f"{op} {target}, s[8:11], {base}"
            words_in = 24
            sgpr = resource(data.ctypes.data, 4 * words_in, first=8)
            want = np.where(np.arange(at, at + count) < words_in, data[at : at + count], 0)
        else:
            text, sgpr = f"{op} {target}, s[8:9], {base}", {"s8": data.ctypes.data}
            want = data[at : at + count]

        def check(state: State, want=want, text=text) -> None:
            np.testing.assert_array_equal(state.s[32 : 32 + count], want, err_msg=text)

        sgpr = {**sgpr, "s20": offset}
        yield Case([text, "s_waitcnt lgkmcnt(0)"], check, {}, sgpr, memory=[("data", data, "r")])


for suffix, count in (("", 1), ("x2", 2), ("x4", 4), ("x8", 8), ("x16", 16)):
    register(Custom(f"s_load_dword{suffix}", scalar_load, count, False))
    register(Custom(f"s_buffer_load_dword{suffix}", scalar_load, count, True))
