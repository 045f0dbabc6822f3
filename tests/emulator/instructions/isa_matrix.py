"""Matrix instructions, D = A B + C. "Matrix Arithmetic Instructions" (register layouts of A, B, C and D; FNUZ on CDNA3,
OCP on CDNA4; CDNA4 block-scaled formats).

With M = N rows and columns and G = 64 / M groups of lanes: lane l holds row (of A) or column (of B) l % M; its elements
of K follow each other in group l / M. Of D it holds column l % N; element i is row 8 (i / 4) + 4 (l / N) + i % 4 for 32
columns, 4 (l / N) + i for 16.
Sums of small integers are exact whatever the unit's order; random numbers are compared within f32 rounding of the sum
of magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from isa_case import ALL, ARCHS, LANE, Case, Custom, anything, generator, register, rows_from, vector_name, words
from isa_numbers import BITS, bf16_to_f32, f32_to_bf16, fp8_name, values_of

from mla_suite.emulator import State

U = np.uint32


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """[64, elements] of codes -> registers [words, 64], element 0 lowest."""
    total = codes.shape[1] * bits
    out = np.zeros((total // 32, 64), np.uint64)
    for e in range(codes.shape[1]):
        at = e * bits
        value = codes[:, e].astype(np.uint64) << np.uint64(at % 32)
        out[at // 32] |= value & np.uint64(0xFFFFFFFF)
        if at % 32 + bits > 32:
            out[at // 32 + 1] |= value >> np.uint64(32)
    return out.astype(U)


def depth(group: int, i: np.ndarray, own: int, k: int, halves: bool) -> np.ndarray:
    """Where element i of a lane group lies along K."""
    return i // 16 * (k // 2) + group * 16 + i % 16 if halves else group * own + i


def lanes_of(matrix: np.ndarray, halves: bool = False) -> np.ndarray:
    """[M, K] -> [64, own]: what each lane holds of A (of B, give it transposed)."""
    m, k = matrix.shape
    groups = 64 // m
    own = k // groups
    i = np.arange(own)
    return np.stack([matrix[lane % m, depth(lane // m, i, own, k, halves)] for lane in range(64)])


def result_rows(n: int) -> np.ndarray:
    """[64, results]: the row of D in each register of each lane."""
    i = np.arange(n * n // 64)
    return np.stack([8 * (i // 4) + 4 * (lane // n) + i % 4 for lane in LANE])


def spread(matrix: np.ndarray) -> np.ndarray:
    """[M, N] of 32-bit elements -> registers [results, 64]."""
    n = matrix.shape[1]
    return np.ascontiguousarray(matrix[result_rows(n), (LANE % n)[:, None]].T)


def gather(registers: np.ndarray, n: int) -> np.ndarray:
    out = np.zeros((n, n), registers.dtype)
    out[result_rows(n), (LANE % n)[:, None]] = registers.T
    return out


def on(arch: str, name: str) -> str:
    """The format that an arch means by a name."""
    return fp8_name(arch, name) if name in ("fp8", "bf8") else name


class Format:
    """Codes of one operand type and their values."""

    def __init__(
        self, bits: int, encode: Callable[[np.ndarray], np.ndarray], table: Callable[[np.ndarray], np.ndarray]
    ):
        self.bits, self.encode, self.values = bits, encode, table


def format_of(name: str, arch: str) -> Format:
    if name == "bf16":
        return Format(16, f32_to_bf16, lambda c: bf16_to_f32(c).astype(np.float64))
    if name == "f16":
        return Format(
            16,
            lambda x: x.astype(np.float16).view(np.uint16),
            lambda c: c.astype(np.uint16).view(np.float16).astype(np.float64),
        )
    if name in ("f32", "xf32"):
        keep = U(0xFFFFE000) if name == "xf32" else U(0xFFFFFFFF)
        return Format(
            32, lambda x: x.astype(np.float32).view(U) & keep, lambda c: (c & keep).view(np.float32).astype(np.float64)
        )
    if name == "i8":
        return Format(8, lambda x: x.astype(np.int8).view(np.uint8), lambda c: c.view(np.int8).astype(np.float64))
    table = values_of(on(arch, name)).astype(np.float64)
    codes_of = {value: code for code, value in reversed(list(enumerate(table.tolist()))) if value == value}
    return Format(
        BITS[on(arch, name)],
        lambda x: np.vectorize(lambda v: codes_of[v + 0.0])(x).astype(np.uint16),
        lambda c: table[c],
    )


def some_values(rng: np.random.Generator, name: str, arch: str, shape: tuple[int, int], exact: bool) -> np.ndarray:
    """Small integers that every format has, or numbers of the whole format."""
    if exact:
        return rng.integers(-3, 4, shape).astype(np.float64)
    if name in ("bf16", "f16", "f32", "xf32"):
        return rng.standard_normal(shape)
    if name == "i8":
        return rng.integers(-128, 128, shape).astype(np.float64)
    table = values_of(on(arch, name))
    return rng.choice(table[np.isfinite(table)], shape).astype(np.float64)


class Matrix:
    def __init__(
        self,
        op: str,
        n: int,
        k: int,
        a: str,
        b: str,
        archs=ARCHS,
        tail: str = "",
        scaled: bool = False,
        few: bool = False,
    ) -> None:
        self.op, self.n, self.k, self.a, self.b = op, n, k, a, b
        self.archs, self.tail, self.scaled, self.few = archs, tail, scaled, few

    def cases(self, arch: str) -> Iterable[Case]:
        rng = generator(self.op, self.tail, arch)
        variants = ("exact", "random") if self.few else ("exact", "random", "zero", "constant", "accumulation", "nan")
        for variant in variants:
            if variant == "nan" and self.a in ("i8", "e2m3", "e3m2", "e2m1"):
                continue
            yield self._case(arch, rng, variant)

    def _case(self, arch: str, rng: np.random.Generator, variant: str) -> Case:
        n, k, integer = self.n, self.k, self.a == "i8"
        formats = [format_of(self.a, arch), format_of(self.b, arch)]
        exact = variant != "random"
        a = formats[0].encode(some_values(rng, self.a, arch, (n, k), exact))
        b = formats[1].encode(some_values(rng, self.b, arch, (k, n), exact))
        c = rng.integers(-50, 50, (n, n)).astype(np.float64)
        if variant == "random" and not integer:
            c = rng.standard_normal((n, n)).astype(np.float32).astype(np.float64)
        eight = "f8f6f4" in self.op
        pieces = [
            pack(lanes_of(a, eight and formats[0].bits == 8), formats[0].bits),
            pack(lanes_of(np.ascontiguousarray(b.T), eight and formats[1].bits == 8), formats[1].bits),
        ]
        left, right = formats[0].values(a), formats[1].values(b)
        bad = None
        if variant == "nan":  # one NaN of A spoils a row
            code = {"bf16": 0x7FC0, "f16": 0x7E00, "f32": 0x7FC00000, "xf32": 0x7FC00000}.get(self.a)
            if code is None:
                table = values_of(on(arch, self.a))
                code = int(np.flatnonzero(np.isnan(table))[0])
            a[5, 1] = code
            pieces[0] = pack(lanes_of(a, eight and formats[0].bits == 8), formats[0].bits)
            bad = 5
        vgpr: dict[int | str, object] = {}
        first = [0, 16]
        for at, rows in zip(first, pieces, strict=True):
            vgpr |= rows_from(at, rows)
        scales = ""
        if self.scaled:
            factors, registers, select = self._scales(rng, n)
            vgpr |= rows_from(60, registers)
            blocks = np.repeat(np.arange(k // 32), 32)
            left, right = left * factors[0][:, blocks], right * factors[1][:, blocks].T
            scales = f", v60, v61{select}"
        results = n * n // 64
        sources = [vector_name(at, len(rows)) for at, rows in zip(first, pieces, strict=True)]
        c_raw = c.astype(np.int32).view(U) if integer else c.astype(np.float32).view(U)
        target, addend = 100, vector_name(100, results)
        if variant == "zero":
            c, addend = np.zeros_like(c), "0"
        elif variant == "constant":
            c, addend = (np.full_like(c, 7.0), "7") if integer else (np.full_like(c, 1.0), "1.0")
        elif variant == "accumulation":  # D and C in accumulation registers, A there too
            target, addend = 256 + 100, vector_name(256 + 100, results)
            sources[0] = vector_name(256, len(pieces[0]))
            vgpr |= rows_from(256, pieces[0])
        vgpr |= rows_from(target, spread(c_raw))
        destination = addend if variant == "accumulation" else vector_name(100, results)
        text = f"{self.op} {destination}, {sources[0]}, {sources[1]}, {addend}{scales}{self.tail}"
        with np.errstate(all="ignore"):
            want = left @ right + c
            magnitude = np.abs(left) @ np.abs(right) + np.abs(c)

        def check(state: State) -> None:
            got = gather(state.v[target : target + results], n)
            if integer:
                np.testing.assert_array_equal(got.view(np.int32).astype(np.float64), want, err_msg=text)
                return
            value = got.view(np.float32).astype(np.float64)
            rows = np.arange(n) != (-1 if bad is None else bad)
            if bad is not None:
                assert np.isnan(value[bad]).all(), text
            if variant == "random":
                # fp8 sums may pass the range of f32 with large scales; none here does
                assert (np.abs(value - want) <= 2.0**-23 * (magnitude + np.abs(want)) + 1e-37).all(), text
            else:
                np.testing.assert_array_equal(value[rows], want[rows], err_msg=text)

        return Case([text], check, vgpr)

    def _scales(self, rng: np.random.Generator, n: int) -> tuple[list[np.ndarray], list[np.ndarray], str]:
        """E8M0 bytes: lane l scales row (column) l % M in block l / M of 32 along K. op_sel and op_sel_hi pick a byte
        of each register."""
        chosen = [int(rng.integers(0, 4)) for _ in range(2)]
        factors, registers = [], []
        for byte in chosen:
            exponents = rng.integers(-3, 4, (n, 64 // n))
            raw = words(rng, 64) & ~U(0xFF << 8 * byte)
            raw |= (exponents[LANE % n, LANE // n] + 127).astype(U) << U(8 * byte)
            factors.append(2.0**exponents)
            registers.append(raw)
        low, high = [c & 1 for c in chosen], [c >> 1 for c in chosen]
        return factors, registers, f" op_sel:[{low[0]},{low[1]},0] op_sel_hi:[{high[0]},{high[1]},0]"


NEW = ("gfx950",)
for n, k in ((16, 16), (32, 8)):
    for kind in ("bf16", "f16"):
        register(Matrix(f"v_mfma_f32_{n}x{n}x{k}_{kind}", n, k, kind, kind))
for n, k in ((16, 32), (32, 16)):
    for kind in ("bf16", "f16"):
        register(Matrix(f"v_mfma_f32_{n}x{n}x{k}_{kind}", n, k, kind, kind, NEW))
    for a in ("fp8", "bf8"):
        for b in ("fp8", "bf8"):
            register(Matrix(f"v_mfma_f32_{n}x{n}x{k}_{a}_{b}", n, k, a, b))
    register(Matrix(f"v_mfma_i32_{n}x{n}x{k}_i8", n, k, "i8", "i8"))
    register(Matrix(f"v_mfma_i32_{n}x{n}x{2 * k}_i8", n, 2 * k, "i8", "i8", NEW))
for n, k in ((16, 4), (32, 2)):
    register(Matrix(f"v_mfma_f32_{n}x{n}x{k}_f32", n, k, "f32", "f32"))
    register(Matrix(f"v_mfma_f32_{n}x{n}x{2 * k}_xf32", n, 2 * k, "xf32", "xf32", ("gfx942",)))

# CDNA4 f8f6f4: cbsz and blgp name the formats of A and B.
FORMATS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
for n, k in ((16, 128), (32, 64)):
    for a, left in enumerate(FORMATS):
        for b, right in enumerate(FORMATS):
            tail = (f" cbsz:{a}" if a else "") + (f" blgp:{b}" if b else "")
            register(Matrix(f"v_mfma_f32_{n}x{n}x{k}_f8f6f4", n, k, left, right, NEW, tail, few=a != b))
            register(
                Matrix(f"v_mfma_scale_f32_{n}x{n}x{k}_f8f6f4", n, k, left, right, NEW, tail, scaled=True, few=a != b)
            )


def double(rng: np.random.Generator, op: str) -> Iterable[Case]:
    """16x16x4 f64: one element of A and B per lane; row 4 i + l / 16 of D in the i-th pair."""
    for exact in (True, False):
        a, b, c = rng.standard_normal((16, 4)), rng.standard_normal((4, 16)), rng.standard_normal((16, 16))
        if exact:
            a, b, c = np.rint(8 * a), np.rint(8 * b), np.rint(8 * c)
        rows, columns = 4 * np.arange(4)[:, None] + LANE // 16, LANE % 16
        vgpr: dict[int | str, object] = {
            0: np.ascontiguousarray(a[LANE % 16, LANE // 16]),
            2: np.ascontiguousarray(b[LANE // 16, LANE % 16]),
        }
        for i in range(4):
            vgpr[8 + 2 * i] = np.ascontiguousarray(c[rows[i], columns])
        want, magnitude = a @ b + c, np.abs(a) @ np.abs(b) + np.abs(c)

        def check(state: State, want=want, magnitude=magnitude, exact=exact, rows=rows, columns=columns) -> None:
            for i in range(4):
                low, high = (state.v[8 + 2 * i + w].astype(np.uint64) for w in (0, 1))
                got = (low | high << np.uint64(32)).view(np.float64)
                bound = 0 if exact else 2.0**-51 * magnitude[rows[i], columns]
                assert (np.abs(got - want[rows[i], columns]) <= bound).all()

        yield Case([f"{op} v[8:15], v[0:1], v[2:3], v[8:15]"], check, vgpr)


register(Custom("v_mfma_f64_16x16x4_f64", double))


def partial_exec(rng: np.random.Generator, op: str) -> Iterable[Case]:
    """Matrix instructions ignore EXEC, so one that runs under a partial EXEC is a mistake: it is reported."""
    text = f"{op} v[0:3], v[4:5], v[6:7], 0"
    yield Case([text], anything, exec_mask=ALL >> 1, findings=frozenset({"partial_exec_matrix"}))


register(Custom("v_mfma_f32_16x16x16_f16", partial_exec))
