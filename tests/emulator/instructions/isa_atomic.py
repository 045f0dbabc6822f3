"""Read-modify-write on global memory and LDS. "Instructions": MUBUF, FLAT/GLOBAL and DS atomics; sc0 (or the rtn form)
returns the value before. Lanes of one instruction act one after another, so their sum does not depend on the order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
from isa_memory import WAIT, resource
from isa_numbers import bf16_to_f32, f32_to_bf16
from isa_operands import draw, pieces

from mla_suite.emulator import State

Update = Callable[[np.ndarray, np.ndarray], np.ndarray]
U = np.uint32


def signed(function: Update) -> Update:
    def run(old: np.ndarray, data: np.ndarray) -> np.ndarray:
        kind = np.int64 if old.dtype == np.uint64 else np.int32
        return function(old.view(kind), data.view(kind)).view(old.dtype)

    return run


def real(function: Update) -> Update:
    def run(old: np.ndarray, data: np.ndarray) -> np.ndarray:
        kind = np.float64 if old.dtype == np.uint64 else np.float32
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(function(old.view(kind), data.view(kind)).astype(kind)).view(old.dtype)

    return run


def halves(to_real: Callable, from_real: Callable) -> Update:
    def run(old: np.ndarray, data: np.ndarray) -> np.ndarray:
        out = np.zeros_like(old)
        for shift in (0, 16):
            x, y = (to_real((v >> U(shift) & U(0xFFFF)).astype(np.uint16)) for v in (old, data))
            with np.errstate(all="ignore"):
                out |= from_real(x + y).astype(U) << U(shift)
        return out

    return run


INTEGER: dict[str, Update] = {
    "add": lambda old, data: old + data,
    "sub": lambda old, data: old - data,
    "and": lambda old, data: old & data,
    "or": lambda old, data: old | data,
    "xor": lambda old, data: old ^ data,
    "umin": np.minimum,
    "umax": np.maximum,
    "smin": signed(np.minimum),
    "smax": signed(np.maximum),
    "inc": lambda old, data: np.where(old >= data, 0, old + old.dtype.type(1)),
    "dec": lambda old, data: np.where((old == 0) | (old > data), data, old - old.dtype.type(1)),
    "swap": lambda old, data: data,
}
PACKED = {
    "pk_add_f16": halves(lambda x: x.view(np.float16), lambda x: x.view(np.uint16)),
    "pk_add_bf16": halves(bf16_to_f32, f32_to_bf16),
}
REAL = {"add": real(lambda a, b: a + b), "min": real(np.fmin), "max": real(np.fmax)}


def finite(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Numbers whose sums round, as raw words."""
    x = rng.standard_normal(64) * 2.0 ** rng.integers(-3, 8, 64)
    if kind == "f64":
        return x.view(np.uint64)
    if kind == "f32":
        return x.astype(np.float32).view(U)
    both = np.stack([x, x[::-1]])
    raw = both.astype(np.float16).view(np.uint16) if kind == "f16" else f32_to_bf16(both.astype(np.float32))
    return raw[0].astype(U) | raw[1].astype(U) << U(16)


def drawn(rng: np.random.Generator, kind: str) -> np.ndarray:
    return draw(rng, kind, 64) if kind in ("u32", "u64") else finite(rng, kind)


def all_of(checks: list[Callable[[State], None]]) -> Callable[[State], None]:
    def check(state: State) -> None:
        for each in checks:
            each(state)

    return check


def returned(first: int, rows: np.ndarray, lanes: np.ndarray, text: str) -> Callable[[State], None]:
    def check(state: State) -> None:
        got = state.v[first : first + len(rows)]
        np.testing.assert_array_equal(got[:, lanes], rows[:, lanes], err_msg=text)

    return check


def operation(
    rng: np.random.Generator, kind: str, update: Update | None
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """What memory holds, the operands, and what it holds then.

    Without an `update` the first operand is swapped in where memory holds the second.
    """
    old, data = drawn(rng, kind), drawn(rng, kind)
    if update:
        return old, [data], update(old, data).astype(old.dtype)
    compare = np.where(LANE % 2 == 0, old, drawn(rng, kind))
    return old, [data, compare], np.where(old == compare, data, old)


def memory_atomic(rng: np.random.Generator, op: str, kind: str, update: Update | None) -> Iterable[Case]:
    space = op.split("_")[0]
    size = 8 if kind in ("u64", "f64") else 4
    for variant in range(4):
        returns, mask = variant % 2 == 1, ALL if variant < 2 else random_mask(rng)
        (old, operands, new), noise = operation(rng, kind, update), words(rng, 2, 64)
        place = rng.permutation(64)
        lanes = active(mask) & (place < (56 if space == "buffer" else 64))  # the resource ends before the last eight
        buffer = np.zeros(64, old.dtype)
        buffer[place] = old
        want = buffer.copy()
        want[place[lanes]] = new[lanes]
        words_each = size // 4
        payload = np.concatenate([pieces(operand) for operand in operands])
        vgpr, data_name = rows_from(4, payload), vector_name(4, len(payload))
        result, sgpr = 12, {}
        if space == "buffer":
            result = 4  # the old value replaces the data
            vgpr[0] = (place * size).astype(U)
            sgpr = resource(buffer.ctypes.data, 56 * size, first=8)
            text = f"{op} {data_name}, v0, s[8:11], 0 offen" + (" sc0" if returns else "")
        else:
            vgpr |= rows_from(12, noise[:words_each])
            target = vector_name(12, words_each) + ", " if returns else ""
            if space == "global" and variant == 1:
                vgpr[0], sgpr = (place * size).astype(U), {"s2": buffer.ctypes.data}
                text = f"{op} {target}v0, {data_name}, s[2:3]"
            else:
                vgpr[0] = (buffer.ctypes.data + place * size).astype(np.uint64)
                text = f"{op} {target}v[0:1], {data_name}" + (", off" if space == "global" else "")
            text += " sc0" if returns else ""
        checks = [in_memory(buffer, want, text)]
        if returns:
            checks.append(returned(result, pieces(old), lanes, text))
        yield Case([text, WAIT], all_of(checks), vgpr, sgpr, mask, memory=[("data", buffer, "rw")])


for space in ("global", "flat", "buffer"):
    for name, update in INTEGER.items():
        for suffix, kind in (("", "u32"), ("_x2", "u64")):
            register(Custom(f"{space}_atomic_{name}{suffix}", memory_atomic, kind, update))
    for suffix, kind in (("", "u32"), ("_x2", "u64")):
        register(Custom(f"{space}_atomic_cmpswap{suffix}", memory_atomic, kind, None))
    for name, kind in (("add_f32", "f32"), ("add_f64", "f64"), ("min_f64", "f64"), ("max_f64", "f64")):
        register(Custom(f"{space}_atomic_{name}", memory_atomic, kind, REAL[name.split("_")[0]]))
    for name, kind in (("pk_add_f16", "f16"), ("pk_add_bf16", "bf16")):
        op = f"{space}_atomic_{name}"
        archs = ("gfx950",) if op == "buffer_atomic_pk_add_bf16" else ARCHS
        register(Custom(op, memory_atomic, kind, PACKED[name], archs=archs))


def accumulate(rng: np.random.Generator, op: str) -> Iterable[Case]:
    """Every lane adds to the same place: nothing is lost."""
    counter = np.array([5], U)

    def check(state: State) -> None:
        assert counter[0] == 5 + 64 * 3
        assert sorted(state.v[2].tolist()) == [5 + 3 * i for i in range(64)]

    lines = ["global_atomic_add v2, v0, v1, s[0:1] sc0", WAIT]
    memory = [("n", counter, "rw")]
    yield Case(lines, check, {0: 0, 1: np.full(64, 3, U)}, {"s0": counter.ctypes.data}, memory=memory)


register(Custom("global_atomic_add", accumulate))

# LDS
LDS_INTEGER = {"add_u": "add", "sub_u": "sub", "inc_u": "inc", "dec_u": "dec", "min_u": "umin", "max_u": "umax"}
LDS_INTEGER |= {"min_i": "smin", "max_i": "smax", "and_b": "and", "or_b": "or", "xor_b": "xor"}


def lds_atomic(rng: np.random.Generator, op: str, kind: str, update: Update | None) -> Iterable[Case]:
    """Of a comparison's operands ds_cmpst names the one that is stored last."""
    size = 8 if kind in ("u64", "f64") else 4
    returns = "_rtn_" in op
    for variant in range(2):
        mask = ALL if variant == 0 else random_mask(rng)
        (old, operands, new), noise = operation(rng, kind, update), words(rng, size // 4, 64)
        place, offset = rng.permutation(64), 0 if variant == 0 else 16
        lds = np.zeros(64 + offset // size, old.dtype)
        lds[place + offset // size] = old
        lanes = active(mask)
        want = lds.copy()
        want[place[lanes] + offset // size] = new[lanes]
        vgpr = {0: (place * size).astype(U), **rows_from(12, noise)}
        names = [*([vector_name(12, size // 4)] if returns else []), "v0"]
        for at, operand in zip((4, 6), reversed(operands), strict=False):
            vgpr |= rows_from(at, pieces(operand))
            names.append(vector_name(at, size // 4))
        text = f"{op} {', '.join(names)}" + (f" offset:{offset}" if offset else "")

        results = np.where(lanes, pieces(old), noise) if returns else noise
        check = all_of([in_lds(want, text), in_registers(12, results, text)])
        yield Case([text, "s_waitcnt lgkmcnt(0)"], check, vgpr, exec_mask=mask, lds=lds.view(np.uint8))


for form in ("", "rtn_"):
    for name, update in LDS_INTEGER.items():
        stem, letter = name.split("_")
        for bits in (32, 64):
            register(Custom(f"ds_{stem}_{form}{letter}{bits}", lds_atomic, f"u{bits}", INTEGER[update]))
    for stem in ("add", "min", "max"):
        for bits in (32, 64):
            register(Custom(f"ds_{stem}_{form}f{bits}", lds_atomic, f"f{bits}", REAL[stem]))
    for bits in (32, 64):
        register(Custom(f"ds_cmpst_{form}b{bits}", lds_atomic, f"u{bits}", None))
for bits in (32, 64):
    register(Custom(f"ds_wrxchg_rtn_b{bits}", lds_atomic, f"u{bits}", INTEGER["swap"]))
for form in ("", "rtn_"):
    for kind in ("f16", "bf16"):
        register(Custom(f"ds_pk_add_{form}{kind}", lds_atomic, kind, PACKED[f"pk_add_{kind}"]))
