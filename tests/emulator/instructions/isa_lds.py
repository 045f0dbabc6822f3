"""LDS reads and writes, transposing reads, and the moves between lanes that go through the LDS unit. "Local Data
Share" and the DS instructions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from isa_case import (
    ALL,
    LANE,
    Case,
    Custom,
    active,
    in_lds,
    in_registers,
    random_mask,
    register,
    rows_from,
    vector_name,
    words,
)
from isa_memory import LOADS, STORES, Part, bytes_at, loaded, stored, written

U = np.uint32
WAIT = "s_waitcnt lgkmcnt(0)"
KINDS = {"dwordx2": "b64", "dwordx3": "b96", "dwordx4": "b128", "dword": "b32"}
KINDS |= {"ubyte": "u8", "sbyte": "i8", "ushort": "u16", "sshort": "i16"}


def names_here(parts: dict[str, Part], more: dict[str, str]) -> dict[str, Part]:
    """Loads or stores by the names that LDS has for them: a kind, with what follows it."""
    kinds = KINDS | more
    return {kinds[name.split("_")[0]] + name[len(name.split("_")[0]) :]: part for name, part in parts.items()}


READS = names_here(LOADS, {"short": "u16"})
WRITES = names_here(STORES, {"byte": "b8", "short": "b16"})


def step_of(part: Part) -> int:
    return 4 if part.bytes == 12 else part.bytes


def read(rng: np.random.Generator, op: str, part: Part) -> Iterable[Case]:
    lds = rng.integers(0, 256, 2048, dtype=np.uint8)
    for variant in range(3):
        mask, offset = ALL if variant == 0 else random_mask(rng), 0 if variant == 0 else 16 * variant
        at = rng.integers(0, 1900 // step_of(part), 64) * step_of(part)
        old = words(rng, part.registers, 64)
        want = np.where(active(mask), loaded(part, bytes_at(lds, at + offset, part.bytes), old), old)
        first = 0 if variant == 2 and not part.half else 4  # the destination may be the address
        text = f"{op} {vector_name(first, part.registers)}, v0" + (f" offset:{offset}" if offset else "")
        vgpr = {**rows_from(first, old), 0: at.astype(U)}
        if first == 0:
            want[0] = np.where(active(mask), want[0], at)
        yield Case([text, WAIT], in_registers(first, want, text), vgpr, exec_mask=mask, lds=lds)


def write(rng: np.random.Generator, op: str, part: Part) -> Iterable[Case]:
    for variant in range(3):
        lds = rng.integers(0, 256, 2048, dtype=np.uint8)
        mask, offset = ALL if variant == 0 else random_mask(rng), 0 if variant == 0 else 16 * variant
        at = rng.permutation(1900 // max(part.bytes, 4))[:64] * max(part.bytes, 4)
        value = words(rng, part.registers, 64)
        want = written(lds, [(at + offset, stored(part, value))], active(mask))
        text = f"{op} v0, {vector_name(4, part.registers)}" + (f" offset:{offset}" if offset else "")
        vgpr = {0: at.astype(U), **rows_from(4, value)}
        yield Case([text, WAIT], in_lds(want, text), vgpr, exec_mask=mask, lds=lds)


def read_two(rng: np.random.Generator, op: str, size: int, unit: int) -> Iterable[Case]:
    """Offsets count in elements, or in 64 elements for the st64 forms."""
    lds = rng.integers(0, 256, 8192, dtype=np.uint8)
    for first, second in ((0, 1), (3, 2), (1, 0)):
        mask = random_mask(rng)
        at, old = rng.integers(0, 64, 64) * size, words(rng, size // 2, 64)
        both = [bytes_at(lds, at + o * unit, size) for o in (first, second)]
        want = np.where(active(mask), np.concatenate(both, axis=1).view(U).T, old)
        text = f"{op} {vector_name(4, size // 2)}, v0 offset0:{first} offset1:{second}"
        vgpr = {0: at.astype(U), **rows_from(4, old)}
        yield Case([text, WAIT], in_registers(4, want, text), vgpr, exec_mask=mask, lds=lds)


def write_two(rng: np.random.Generator, op: str, size: int, unit: int) -> Iterable[Case]:
    for first, second in ((0, 1), (3, 2)):
        lds, mask = rng.integers(0, 256, 8192, dtype=np.uint8), random_mask(rng)
        # Lanes four elements apart, so that no two write the same bytes; st64 offsets lie 64 elements apart.
        at = rng.permutation(64) * size * (1 if unit > 8 else 4)
        value = words(rng, size // 2, 64)
        raw = np.ascontiguousarray(value.T).view(np.uint8).reshape(64, 2 * size)
        want = written(lds, [(at + first * unit, raw[:, :size]), (at + second * unit, raw[:, size:])], active(mask))
        half = size // 4
        names = f"{vector_name(4, half)}, {vector_name(4 + half, half)}"
        text = f"{op} v0, {names} offset0:{first} offset1:{second}"
        vgpr = {0: at.astype(U), **rows_from(4, value)}
        yield Case([text, WAIT], in_lds(want, text), vgpr, exec_mask=mask, lds=lds)


for name, part in READS.items():
    register(Custom(f"ds_read_{name}", read, part))
for name, part in WRITES.items():
    register(Custom(f"ds_write_{name}", write, part))
for size in (4, 8):
    for stem, unit in (("2", size), ("2st64", 64 * size)):
        register(Custom(f"ds_read{stem}_b{8 * size}", read_two, size, unit))
        register(Custom(f"ds_write{stem}_b{8 * size}", write_two, size, unit))


def transposed(rng: np.random.Generator, op: str, bits: int, size: int) -> Iterable[Case]:
    """CDNA4 "LDS transpose loads": sixteen lanes name the pieces of a tile of `rows` x 16 elements, row by row; lane i
    of them receives column i, row 0 lowest."""
    elements = 8 * size // bits
    lds = rng.integers(0, 256, 4096, dtype=np.uint8)
    for scattered in (False, True):
        pieces = rng.permutation(200)[:64] if scattered else LANE
        at = pieces * (16 if size == 12 else size)
        raw = bytes_at(lds, at, size)
        fields = np.zeros((64, elements), np.int64)
        for e in range(elements):
            for b in range(bits):
                position = e * bits + b
                fields[:, e] |= (raw[:, position // 8].astype(np.int64) >> position % 8 & 1) << b
        tile = fields.reshape(4, elements, 16)  # group, row, column
        want = np.zeros((size // 4, 64), np.int64)
        for group in range(4):
            for row in range(elements):
                position = row * bits
                for column in range(16):
                    value = int(tile[group, row, column]) << position % 32
                    want[position // 32, group * 16 + column] |= value & 0xFFFFFFFF
                    if value >> 32:
                        want[position // 32 + 1, group * 16 + column] |= value >> 32
        text = f"{op} {vector_name(4, size // 4)}, v0"
        yield Case([text, WAIT], in_registers(4, want.astype(U), text), {0: at.astype(U)}, lds=lds)


for name, bits, size in (("b64_tr_b16", 16, 8), ("b64_tr_b8", 8, 8), ("b64_tr_b4", 4, 8), ("b96_tr_b6", 6, 12)):
    register(Custom(f"ds_read_{name}", transposed, bits, size, archs=("gfx950",)))


def pull(rng: np.random.Generator, op: str) -> Iterable[Case]:
    """DS_BPERMUTE: lane l receives lane (address / 4) % 64; a lane without EXEC gives 0."""
    for mask, offset in ((ALL, 0), (random_mask(rng), 0), (ALL, 12)):
        source, data, old = rng.integers(0, 64, 64), words(rng, 64), words(rng, 64)
        lanes, address = active(mask), (source * 4 + rng.integers(0, 4, 64) * 256).astype(U)
        taken = (source + offset // 4) % 64
        want = np.where(lanes, np.where(lanes[taken], data[taken], 0), old).astype(U)
        text = f"{op} v2, v0, v1" + (f" offset:{offset}" if offset else "")
        yield Case([text, WAIT], in_registers(2, want, text), {0: address, 1: data, 2: old}, exec_mask=mask)


def push(rng: np.random.Generator, op: str) -> Iterable[Case]:
    """DS_PERMUTE: lane l sends to lane address / 4; who is sent nothing receives 0."""
    for mask in (ALL, random_mask(rng)):
        target, data, old = rng.permutation(64), words(rng, 64), words(rng, 64)
        lanes = active(mask)
        sent = np.zeros(64, U)
        sent[target[lanes]] = data[lanes]
        want = np.where(lanes, sent, old)
        text = f"{op} v2, v0, v1"
        vgpr = {0: (target * 4).astype(U), 1: data, 2: old}
        yield Case([text, WAIT], in_registers(2, want, text), vgpr, exec_mask=mask)


SWIZZLES: dict[str, np.ndarray] = {
    "swizzle(QUAD_PERM,3,0,2,1)": (LANE & ~3) | np.array([3, 0, 2, 1])[LANE & 3],
    "swizzle(SWAP,16)": LANE ^ 16,
    "swizzle(SWAP,1)": LANE ^ 1,
    "swizzle(REVERSE,8)": (LANE & ~7) | 7 - LANE % 8,
    "swizzle(REVERSE,32)": (LANE & ~31) | 31 - LANE % 32,
    "swizzle(BROADCAST,8,3)": (LANE & ~7) | 3,
    "swizzle(BROADCAST,32,17)": (LANE & 32) | 17,
    'swizzle(BITMASK_PERM,"01pip")': (LANE & 32) | (LANE & 7 | 8) ^ 2,
    "0x401f": LANE ^ 16,
}


def swizzle(rng: np.random.Generator, op: str) -> Iterable[Case]:
    for pattern, source in SWIZZLES.items():
        data, old, mask = words(rng, 64), words(rng, 64), random_mask(rng)
        lanes = active(mask)
        want = np.where(lanes, np.where(lanes[source], data[source], 0), old).astype(U)
        text = f"{op} v2, v0 offset:{pattern}"
        yield Case([text, WAIT], in_registers(2, want, text), {0: data, 2: old}, exec_mask=mask)


register(Custom("ds_bpermute_b32", pull), Custom("ds_permute_b32", push), Custom("ds_swizzle_b32", swizzle))
