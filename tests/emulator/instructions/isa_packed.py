"""Packed instructions: VOP3P, with op_sel, op_sel_hi, neg_lo and neg_hi. "Packed math" of "Vector ALU Operations"."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from isa_case import (
    ALL,
    ARCHS,
    DENORMALS,
    DX10_CLAMP,
    FLUSH,
    Case,
    active,
    generator,
    in_registers,
    random_mask,
    register,
    rows_from,
    words,
)
from isa_numbers import fma16, fma32
from isa_operands import draw, flushed, raw_of, same, typed
from isa_real import maximum, minimum, strict

from mla_suite.emulator import State

U = np.uint32


def _flags(rng: np.random.Generator, count: int) -> list[int]:
    return [int(rng.integers(0, 2)) for _ in range(count)]


def _list(name: str, flags: list[int]) -> str:
    return f" {name}:[{','.join(map(str, flags))}]"


class Packed16:
    """Two halves per register; op_sel and op_sel_hi pick the halves that the low and the high result read."""

    def __init__(self, op: str, kind: str, count: int, function: Callable[..., np.ndarray], archs=ARCHS) -> None:
        self.op, self.kind, self.count, self.function, self.archs = op, kind, count, function, archs

    def cases(self, arch: str) -> Iterable[Case]:
        rng = generator(self.op, arch)
        for variant in range(6):
            raw = [draw(rng, self.kind, 64) & U(0xFFFF) | draw(rng, self.kind, 64) << U(16) for _ in range(self.count)]
            mask = random_mask(rng) if variant == 1 else ALL
            mode = FLUSH if variant == 2 and self.kind == "f16" else DENORMALS
            selects = variant >= 3
            low = _flags(rng, self.count) if selects else [0] * self.count
            high = _flags(rng, self.count) if selects else [1] * self.count
            negative = [[0] * self.count, [0] * self.count]
            text = f"{self.op} v20, " + ", ".join(f"v{k}" for k in range(self.count))
            if selects:
                text += _list("op_sel", low) + _list("op_sel_hi", high)
            if selects and self.kind == "f16":
                negative = [_flags(rng, self.count), _flags(rng, self.count)]
                text += _list("neg_lo", negative[0]) + _list("neg_hi", negative[1])
            old = words(rng, 64)
            results = []
            for half, picks in enumerate((low, high)):
                sources = []
                for k in range(self.count):
                    bits = raw[k] >> U(16) if picks[k] else raw[k] & U(0xFFFF)
                    bits = bits ^ U(0x8000) if negative[half][k] else bits
                    value = typed(bits, self.kind)
                    sources.append(flushed(value) if mode == FLUSH else value)
                with np.errstate(all="ignore"):
                    value = np.asarray(self.function(*sources))
                results.append(raw_of(flushed(value) if mode == FLUSH else value, self.kind) & U(0xFFFF))
            lanes = active(mask)

            def check(state: State, results=results, old=old, lanes=lanes, text=text) -> None:
                got = state.v[20]
                np.testing.assert_array_equal(got[~lanes], old[~lanes])
                for half, want in enumerate(results):
                    fine = same(got >> U(16 * half) & U(0xFFFF), want, self.kind) | ~lanes
                    bad = np.flatnonzero(~fine)
                    assert not bad.size, (text, half, bad, *(list(map(hex, x[bad[:3]])) for x in (got, want)))

            yield Case([text], check, {**rows_from(0, raw), 20: old}, exec_mask=mask, mode=mode)


class Packed32:
    """A pair of f32 registers per operand."""

    def __init__(self, op: str, count: int, function: Callable[..., np.ndarray]) -> None:
        self.op, self.count, self.function, self.archs = op, count, function, ARCHS

    def cases(self, arch: str) -> Iterable[Case]:
        rng = generator(self.op, arch)
        for variant in range(6):
            raw = [np.stack([draw(rng, "f32", 64), draw(rng, "f32", 64)]) for _ in range(self.count)]
            mask = random_mask(rng) if variant == 1 else ALL
            mode = FLUSH if variant == 2 else DENORMALS
            low, high = [0] * self.count, [1] * self.count
            negative = [[0] * self.count, [0] * self.count]
            names = [f"v[{2 * k}:{2 * k + 1}]" for k in range(self.count)]
            sgpr: dict[int | str, int] = {}
            if variant == 5:  # a pair of scalars as the first source
                raw[0] = np.broadcast_to(raw[0][:, :1], raw[0].shape).copy()
                names[0], sgpr = "s[4:5]", {"s4": int(raw[0][0, 0]), "s5": int(raw[0][1, 0])}
            text = f"{self.op} v[20:21], {', '.join(names)}"
            if variant >= 3:
                low, high = _flags(rng, self.count), _flags(rng, self.count)
                negative = [_flags(rng, self.count), _flags(rng, self.count)]
                text += _list("op_sel", low) + _list("op_sel_hi", high)
                text += _list("neg_lo", negative[0]) + _list("neg_hi", negative[1])
            old = words(rng, 2, 64)
            want = []
            for half, picks in enumerate((low, high)):
                sources = []
                for k in range(self.count):
                    value = typed(raw[k][picks[k]] ^ U(0x80000000 * negative[half][k]), "f32")
                    sources.append(flushed(value) if mode == FLUSH else value)
                with np.errstate(all="ignore"):
                    value = self.function(*sources)
                want.append(raw_of(flushed(value) if mode == FLUSH else value, "f32"))
            lanes = active(mask)

            def check(state: State, want=want, old=old, lanes=lanes, text=text) -> None:
                for half in range(2):
                    np.testing.assert_array_equal(state.v[20 + half][~lanes], old[half][~lanes])
                    fine = same(state.v[20 + half], want[half], "f32") | ~lanes
                    assert fine.all(), (text, half, np.flatnonzero(~fine))

            registers = {2 * k + w: raw[k][w] for k in range(self.count) for w in range(2)}
            yield Case([text], check, {**registers, **rows_from(20, old)}, sgpr, mask, mode=mode)


class MovePair:
    """V_PK_MOV_B32: op_sel picks a word of the first source for the low result, and of the second for the high one."""

    op, archs = "v_pk_mov_b32", ARCHS

    def cases(self, arch: str) -> Iterable[Case]:
        rng = generator(self.op, arch)
        for low in (0, 1):
            for high in (0, 1):
                raw, mask = words(rng, 4, 64), random_mask(rng)
                old, lanes = words(rng, 2, 64), active(mask)
                want = np.where(lanes, np.stack([raw[low], raw[2 + high]]), old)
                text = f"v_pk_mov_b32 v[20:21], v[0:1], v[2:3] op_sel:[{low},{high}]"
                before = {**rows_from(0, raw), **rows_from(20, old)}
                yield Case([text], in_registers(20, want, text), before, exec_mask=mask)


class Mixed:
    """V_FMA_MIX*: op_sel_hi makes a source 16 bits wide and op_sel then picks its half; neg and abs as usual."""

    archs = ARCHS

    def __init__(self, op: str) -> None:
        self.op = op

    def cases(self, arch: str) -> Iterable[Case]:
        rng = generator(self.op, arch)
        for variant in range(8):
            mask = random_mask(rng) if variant == 1 else ALL
            narrow, high = (_flags(rng, 3), _flags(rng, 3)) if variant else ([0] * 3, [0] * 3)
            raw, sources, names = [], [], []
            for k in range(3):
                if narrow[k]:
                    bits = draw(rng, "f16", 64) & U(0xFFFF) | draw(rng, "f16", 64) << U(16)
                    value = typed(bits >> U(16) if high[k] else bits, "f16").astype(np.float32)
                else:
                    high[k] = 0
                    bits = draw(rng, "f32", 64)
                    value = typed(bits, "f32")
                absolute, negative = _flags(rng, 2) if variant > 1 else (0, 0)
                value = np.abs(value) if absolute else value
                sources.append(-value if negative else value)
                names.append(("-" if negative else "") + (f"|v{k}|" if absolute else f"v{k}"))
                raw.append(bits)
            clamp = variant == 7
            text = f"{self.op} v20, {', '.join(names)}{_list('op_sel', high)}{_list('op_sel_hi', narrow)}"
            text += " clamp" if clamp else ""
            with np.errstate(all="ignore"):
                value = fma32(*sources)
                if clamp:
                    value = np.where(np.isnan(value), np.float32(0), np.clip(value, 0, 1)).astype(np.float32)
                half = value.astype(np.float16)
            old, lanes = words(rng, 64), active(mask)

            def check(state: State, value=value, half=half, old=old, lanes=lanes, text=text) -> None:
                got = state.v[20]
                np.testing.assert_array_equal(got[~lanes], old[~lanes])
                if self.op == "v_fma_mix_f32":
                    fine = same(got, raw_of(value, "f32"), "f32")
                else:
                    shift, kept = (0, 0xFFFF0000) if "lo" in self.op else (16, 0xFFFF)
                    np.testing.assert_array_equal(got & U(kept), old & U(kept))
                    fine = same(got >> U(shift) & U(0xFFFF), raw_of(half, "f16"), "f16")
                assert (fine | ~lanes).all(), (text, np.flatnonzero(~fine & lanes))

            yield Case([text], check, {**dict(enumerate(raw)), 20: old}, exec_mask=mask, mode=DENORMALS | DX10_CLAMP)


def shift_right(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return b >> (a & 15).astype(b.dtype)


register(
    MovePair(),
    *(Mixed(op) for op in ("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")),
    Packed32("v_pk_add_f32", 2, lambda a, b: a + b),
    Packed32("v_pk_mul_f32", 2, lambda a, b: a * b),
    Packed32("v_pk_fma_f32", 3, fma32),
    Packed16("v_pk_add_f16", "f16", 2, lambda a, b: a + b),
    Packed16("v_pk_mul_f16", "f16", 2, lambda a, b: a * b),
    Packed16("v_pk_max_f16", "f16", 2, maximum),
    Packed16("v_pk_min_f16", "f16", 2, minimum),
    Packed16("v_pk_maximum3_f16", "f16", 3, lambda *x: strict(maximum)(*x).astype(np.float16), ("gfx950",)),
    Packed16("v_pk_minimum3_f16", "f16", 3, lambda *x: strict(minimum)(*x).astype(np.float16), ("gfx950",)),
    Packed16("v_pk_fma_f16", "f16", 3, fma16),
    Packed16("v_pk_add_u16", "u16", 2, lambda a, b: a + b),
    Packed16("v_pk_add_i16", "i16", 2, lambda a, b: a + b),
    Packed16("v_pk_sub_u16", "u16", 2, lambda a, b: a - b),
    Packed16("v_pk_sub_i16", "i16", 2, lambda a, b: a - b),
    Packed16("v_pk_mul_lo_u16", "u16", 2, lambda a, b: a * b),
    Packed16("v_pk_mad_u16", "u16", 3, lambda a, b, c: a * b + c),
    Packed16("v_pk_mad_i16", "i16", 3, lambda a, b, c: a * b + c),
    Packed16("v_pk_lshlrev_b16", "u16", 2, lambda a, b: b << (a & 15)),
    Packed16("v_pk_lshrrev_b16", "u16", 2, shift_right),
    Packed16("v_pk_ashrrev_i16", "i16", 2, shift_right),
    Packed16("v_pk_max_i16", "i16", 2, np.maximum),
    Packed16("v_pk_min_i16", "i16", 2, np.minimum),
    Packed16("v_pk_max_u16", "u16", 2, np.maximum),
    Packed16("v_pk_min_u16", "u16", 2, np.minimum),
)
