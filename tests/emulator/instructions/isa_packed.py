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
    vector_name,
    words,
)
from isa_numbers import fma16, fma32
from isa_operands import REAL, SIGN_BIT, draw, flushed, raw_of, same, typed
from isa_real import maximum, minimum, strict

from mla_suite.emulator import State

U = np.uint32


def _flags(rng: np.random.Generator, count: int) -> list[int]:
    return [int(rng.integers(0, 2)) for _ in range(count)]


def _list(name: str, flags: list[int]) -> str:
    return f" {name}:[{','.join(map(str, flags))}]"


class Packed:
    """Two results: of the halves of registers or, for f32, of pairs of registers. op_sel and op_sel_hi pick the parts
    that the low and the high result read."""

    def __init__(self, op: str, kind: str, count: int, function: Callable[..., np.ndarray], archs=ARCHS) -> None:
        self.op, self.kind, self.count, self.function, self.archs = op, kind, count, function, archs
        self.pairs = kind == "f32"

    def _registers(self, parts: np.ndarray) -> np.ndarray:
        """[2, 64] parts -> the registers that hold them."""
        return parts if self.pairs else (parts[0] & U(0xFFFF) | parts[1] << U(16))[None]

    def _parts(self, registers: np.ndarray) -> np.ndarray:
        return registers if self.pairs else np.stack([registers[0] & U(0xFFFF), registers[0] >> U(16)])

    def cases(self, arch: str) -> Iterable[Case]:
        rng = generator(self.op, arch)
        width = 2 if self.pairs else 1
        for variant in range(6):
            raw = [self._registers(np.stack([draw(rng, self.kind, 64) for _ in range(2)])) for _ in range(self.count)]
            mask = random_mask(rng) if variant == 1 else ALL
            change = flushed if variant == 2 and self.kind in REAL else lambda value: value
            names, sgpr = [vector_name(width * k, width) for k in range(self.count)], {}
            if variant == 5 and self.pairs:  # a pair of scalars as the first source
                raw[0] = np.broadcast_to(raw[0][:, :1], raw[0].shape).copy()
                names[0], sgpr = "s[4:5]", {"s4": int(raw[0][0, 0]), "s5": int(raw[0][1, 0])}
            text = f"{self.op} {vector_name(20, width)}, {', '.join(names)}"
            low, high, negative = [0] * self.count, [1] * self.count, [[0] * self.count] * 2
            if variant >= 3:
                low, high = _flags(rng, self.count), _flags(rng, self.count)
                text += _list("op_sel", low) + _list("op_sel_hi", high)
                if self.kind in REAL:
                    negative = [_flags(rng, self.count), _flags(rng, self.count)]
                    text += _list("neg_lo", negative[0]) + _list("neg_hi", negative[1])
            old, lanes, want = words(rng, width, 64), active(mask), []
            for picks, signs in zip((low, high), negative, strict=True):
                sources = []
                for registers, pick, sign in zip(raw, picks, signs, strict=True):
                    bits = self._parts(registers)[pick] ^ U(sign << SIGN_BIT[self.kind] if sign else 0)
                    sources.append(change(typed(bits, self.kind)))
                with np.errstate(all="ignore"):
                    want.append(raw_of(change(np.asarray(self.function(*sources))), self.kind))

            def check(state: State, want=want, old=old, lanes=lanes, text=text) -> None:
                registers = state.v[20 : 20 + width]
                np.testing.assert_array_equal(registers[:, ~lanes], old[:, ~lanes])
                for half, (got, wanted) in enumerate(zip(self._parts(registers), want, strict=True)):
                    bad = np.flatnonzero(~same(got, wanted, self.kind) & lanes)
                    assert not bad.size, (text, half, bad, *(list(map(hex, x[bad[:3]])) for x in (got, wanted)))

            vgpr = {**rows_from(0, np.concatenate(raw)), **rows_from(20, old)}
            mode = FLUSH if change is flushed else DENORMALS
            yield Case([text], check, vgpr, sgpr, mask, mode=mode)


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
    Packed("v_pk_add_f32", "f32", 2, lambda a, b: a + b),
    Packed("v_pk_mul_f32", "f32", 2, lambda a, b: a * b),
    Packed("v_pk_fma_f32", "f32", 3, fma32),
    Packed("v_pk_add_f16", "f16", 2, lambda a, b: a + b),
    Packed("v_pk_mul_f16", "f16", 2, lambda a, b: a * b),
    Packed("v_pk_max_f16", "f16", 2, maximum),
    Packed("v_pk_min_f16", "f16", 2, minimum),
    Packed("v_pk_maximum3_f16", "f16", 3, lambda *x: strict(maximum)(*x).astype(np.float16), ("gfx950",)),
    Packed("v_pk_minimum3_f16", "f16", 3, lambda *x: strict(minimum)(*x).astype(np.float16), ("gfx950",)),
    Packed("v_pk_fma_f16", "f16", 3, fma16),
    Packed("v_pk_add_u16", "u16", 2, lambda a, b: a + b),
    Packed("v_pk_add_i16", "i16", 2, lambda a, b: a + b),
    Packed("v_pk_sub_u16", "u16", 2, lambda a, b: a - b),
    Packed("v_pk_sub_i16", "i16", 2, lambda a, b: a - b),
    Packed("v_pk_mul_lo_u16", "u16", 2, lambda a, b: a * b),
    Packed("v_pk_mad_u16", "u16", 3, lambda a, b, c: a * b + c),
    Packed("v_pk_mad_i16", "i16", 3, lambda a, b, c: a * b + c),
    Packed("v_pk_lshlrev_b16", "u16", 2, lambda a, b: b << (a & 15)),
    Packed("v_pk_lshrrev_b16", "u16", 2, shift_right),
    Packed("v_pk_ashrrev_i16", "i16", 2, shift_right),
    Packed("v_pk_max_i16", "i16", 2, np.maximum),
    Packed("v_pk_min_i16", "i16", 2, np.minimum),
    Packed("v_pk_max_u16", "u16", 2, np.maximum),
    Packed("v_pk_min_u16", "u16", 2, np.minimum),
)
