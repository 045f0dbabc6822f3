"""Private memory: every lane has its own bytes at the same addresses ("Flat Memory": scratch). What a store leaves is
read back a dword at a time, and what a load finds was stored a dword at a time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from isa_case import Case, active, anything, in_registers, random_mask, rows_from, vector_name, words
from isa_memory import WAIT, Part, loaded, register_forms, stored

U = np.uint32


def scratch_places(rng: np.random.Generator) -> Iterable[tuple[str, dict, dict, np.ndarray]]:
    """Text of address and base, registers, and the byte each lane means."""
    lanes = rng.integers(0, 8, 64) * 4
    yield "off, off offset:8", {}, {}, np.full(64, 8)
    yield "off, s9", {}, {"s9": 24}, np.full(64, 24)
    yield "v0, off offset:16", {0: lanes.astype(U)}, {}, lanes + 16
    yield "v0, s9 offset:4", {0: lanes.astype(U)}, {"s9": 12}, lanes + 16


def scratch_load(rng: np.random.Generator, op: str, part: Part) -> Iterable[Case]:
    for text, vgpr, sgpr, at in scratch_places(rng):
        mask, old, filling = random_mask(rng), words(rng, part.registers, 64), words(rng, 16, 64)
        fill = [f"scratch_store_dword off, v{40 + i}, off offset:{4 * i}" for i in range(16)]
        memory = np.ascontiguousarray(filling.T).view(np.uint8).reshape(64, 64)
        raw = np.stack([memory[lane, at[lane] : at[lane] + part.bytes] for lane in range(64)])
        want = np.where(active(mask), loaded(part, raw, old), old)
        line = f"{op} {vector_name(4, part.registers)}, {text}"
        before = {**vgpr, **rows_from(40, filling), **rows_from(4, old)}
        lines = [*fill, WAIT, line, WAIT]
        yield Case(lines, in_registers(4, want, line), before, sgpr, mask, scratch=64)


def scratch_store(rng: np.random.Generator, op: str, part: Part) -> Iterable[Case]:
    for text, vgpr, sgpr, at in scratch_places(rng):
        mask, value, noise = random_mask(rng), words(rng, part.registers, 64), words(rng, 64)
        address, base = text.split(", ")
        line = f"{op} {address}, {vector_name(4, part.registers)}, {base}"
        fill = [f"scratch_store_dword off, v3, off offset:{4 * i}" for i in range(16)]
        reads = [f"scratch_load_dword v{20 + i}, off, off offset:{4 * i}" for i in range(16)]
        memory = np.repeat(noise[:, None], 16, axis=1).view(np.uint8).reshape(64, 64)
        raw = stored(part, value)
        for lane in np.flatnonzero(active(mask)):
            memory[lane, at[lane] : at[lane] + part.bytes] = raw[lane]
        whole = "s_mov_b64 exec, -1"
        restore = "s_mov_b64 exec, s[20:21]"
        want = np.ascontiguousarray(memory).view(U).T
        before = {**vgpr, 3: noise, **rows_from(4, value)}
        lines = [whole, *fill, WAIT, restore, line, WAIT, whole, *reads, WAIT]
        yield Case(lines, in_registers(20, want, line), before, {**sgpr, "s20": mask}, mask, scratch=64)

    outside = f"{op} off, {vector_name(4, part.registers)}, off offset:{64 - part.bytes + 4}"
    yield Case([outside, WAIT], anything, scratch=64, findings=frozenset({"scratch_out_of_bounds"}))


register_forms("scratch", scratch_load, scratch_store)
