"""The scalar unit: SOP1, SOP2, SOPK and SOPC ("Scalar ALU Operations"). Formulas on Python's integers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from isa_case import ALL, ARCHS, Case, generator, register

from mla_suite.emulator import State

EDGES = {32: [0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x8000, 0xFFFF, 0x00FF00FF, 0x00050003]}
EDGES[64] = [0, 1, 63, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0xFFFFFFFF00000000, 0x10000000020]


class Result(NamedTuple):
    """A destination, and SCC (None: unchanged)."""

    value: int | None
    scc: bool | None = None
    exec_mask: int | None = None


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> bits - 1 else x


class Scalar:
    """`widths` of destination and sources; the function gets unsigned sources, then keywords it asks for."""

    def __init__(
        self,
        op: str,
        widths: tuple[int, ...],
        function: Callable[..., Result],
        *,
        form: str = "{op} {d}, {s}",
        scc_in: bool = False,
        reads_destination: bool = False,
        immediate: Callable[[np.random.Generator], int] | None = None,
        execs: bool = False,
    ) -> None:
        self.op, self.widths, self.function, self.form = op, widths, function, form
        self.scc_in, self.reads_destination, self.immediate, self.execs = scc_in, reads_destination, immediate, execs
        self.archs = ARCHS

    def cases(self, arch: str) -> Iterable[Case]:
        rng = generator(self.op, arch)
        sources = self.widths[1:]
        tuples: list[list[int]] = []
        if len(sources) == 1:
            tuples += [[x] for x in EDGES[sources[0]]]
        elif sources:
            some = EDGES[sources[0]]
            tuples += [[x, y] for x in some for y in EDGES[sources[1]][::2]][:: 1 if len(some) < 6 else 2]
        else:
            tuples += [[]] * 8
        for _ in range(6):
            tuples.append([int(rng.integers(0, 1 << 63)) * 2 + int(rng.integers(0, 2)) & (1 << w) - 1 for w in sources])
        if len(sources) == 2:
            same = int(rng.integers(0, 1 << 32))
            tuples.append([same, same & (1 << sources[1]) - 1])
        for number, values in enumerate(tuples):
            yield self._case(rng, values, number)

    def _case(self, rng: np.random.Generator, values: list[int], number: int) -> Case:
        width, sources = self.widths[0], self.widths[1:]
        names, sgpr = [], {}
        for k, (value, bits) in enumerate(zip(values, sources, strict=True)):
            at = 8 + 4 * k
            names.append(f"s{at}" if bits == 32 else f"s[{at}:{at + 1}]")
            sgpr[f"s{at}"] = value & 0xFFFFFFFF
            if bits == 64:
                sgpr[f"s{at + 1}"] = value >> 32
        if len(values) == 2 and number % 5 == 4 and sources[1] == 32:  # constants in place of registers
            names[1], values = ("-16", [values[0], 0xFFFFFFF0]) if number % 2 else ("0x12345", [values[0], 0x12345])
            if sources[0] == 32 and number % 3 == 0:
                names[0], values = "64", [64, values[1]]
        arguments = list(values)
        if self.immediate is not None:
            constant = self.immediate(rng)
            names.append(str(constant) if constant < 0x8000 else hex(constant))
            arguments.append(constant)
        before = int(rng.integers(0, 1 << 63)) & (1 << max(width, 32)) - 1
        scc = bool(rng.integers(0, 2))
        mask = int(rng.integers(0, 1 << 63)) | 1 if self.execs else ALL
        options: dict[str, int | bool] = {}
        if self.scc_in:
            options["scc"] = scc
        if self.reads_destination:
            options["old"] = before
        if self.execs:
            options["mask"] = mask
        want = self.function(*arguments, **options)
        target = "s20" if width == 32 else "s[20:21]"
        text = self.form.format(op=self.op, d=target, s=", ".join(names))
        sgpr |= {"s20": before & 0xFFFFFFFF, "s21": before >> 32 if width == 64 else 0x77}
        result, flag = (before if want.value is None else want.value), (scc if want.scc is None else want.scc)

        def check(state: State) -> None:
            got = state.s64(20) if width == 64 else int(state.s[20])
            if width:
                assert got == result & (1 << width) - 1, (text, [hex(v) for v in arguments], hex(got), hex(result))
            assert state.scc == bool(flag), (text, [hex(v) for v in arguments], "scc", state.scc)
            if want.exec_mask is not None:
                assert state.s64(126) == want.exec_mask, text

        return Case([text], check, {}, sgpr, mask, scc=scc)


def logic(function: Callable[[int, int], int], bits: int) -> Callable[[int, int], Result]:
    def run(a: int, b: int) -> Result:
        value = function(a, b) & (1 << bits) - 1
        return Result(value, value != 0)

    return run


LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
for name, function in LOGIC.items():
    for bits in (32, 64):
        register(Scalar(f"s_{name}_b{bits}", (bits, bits, bits), logic(function, bits)))


def save_exec(function: Callable[[int, int], int]) -> Callable[..., Result]:
    def run(a: int, mask: int) -> Result:
        value = function(a, mask) & ALL
        return Result(mask, value != 0, value)

    return run


for name, function in (LOGIC | {"andn1": lambda a, b: ~a & b}).items():
    register(Scalar(f"s_{name}_saveexec_b64", (64, 64), save_exec(function), execs=True))


def checked(value: int, bits: int = 32) -> Result:
    """SCC: not zero."""
    value &= (1 << bits) - 1
    return Result(value, value != 0)


def overflowing(exact: int) -> Result:
    return Result(exact, not -(1 << 31) <= exact < 1 << 31)


for bits in (32, 64):
    shift = 63 if bits == 64 else 31
    kind = "i64" if bits == 64 else "i32"
    register(
        Scalar(f"s_lshl_b{bits}", (bits, bits, 32), lambda a, b, m=shift, n=bits: checked(a << (b & m), n)),
        Scalar(f"s_lshr_b{bits}", (bits, bits, 32), lambda a, b, m=shift, n=bits: checked(a >> (b & m), n)),
        Scalar(f"s_ashr_{kind}", (bits, bits, 32), lambda a, b, m=shift, n=bits: checked(signed(a, n) >> (b & m), n)),
        Scalar(f"s_mov_b{bits}", (bits, bits), lambda a: Result(a)),
        Scalar(f"s_cmov_b{bits}", (bits, bits), lambda a, scc: Result(a if scc else None), scc_in=True),
        Scalar(f"s_cselect_b{bits}", (bits, bits, bits), lambda a, b, scc: Result(a if scc else b), scc_in=True),
        Scalar(f"s_not_b{bits}", (bits, bits), lambda a, n=bits: checked(~a, n)),
        Scalar(f"s_brev_b{bits}", (bits, bits), lambda a, n=bits: Result(int(f"{a:0{n}b}"[::-1], 2))),
        Scalar(f"s_bcnt1_i32_b{bits}", (32, bits), lambda a: checked(bin(a).count("1"))),
        Scalar(f"s_ff1_i32_b{bits}", (32, bits), lambda a: Result((a & -a).bit_length() - 1)),
        Scalar(f"s_flbit_i32_b{bits}", (32, bits), lambda a, n=bits: Result(n - a.bit_length() if a else -1)),
        Scalar(f"s_bfm_b{bits}", (bits, 32, 32), lambda a, b, m=shift: Result(((1 << (a & m)) - 1) << (b & m))),
    )
register(Scalar("s_bcnt0_i32_b32", (32, 32), lambda a: checked(32 - bin(a).count("1"))))


def bit_field(bits: int, of_signed: bool) -> Callable[[int, int], Result]:
    """Offset in bits 4:0 (5:0) and width in 22:16 of the second source."""

    def run(a: int, b: int) -> Result:
        offset, width = b & bits - 1, min(b >> 16 & 0x7F, bits)
        if of_signed:
            return checked(signed(signed(a, bits) >> offset, width) if width else 0, bits)
        return checked(a >> offset & (1 << width) - 1, bits)

    return run


def bfe_operands(bits: int) -> Callable[[np.random.Generator], int]:
    return lambda rng: int(rng.integers(0, bits)) | int(rng.integers(0, bits + 1)) << 16


for bits in (32, 64):
    for letter in "ui":
        form = bit_field(bits, letter == "i")
        register(Scalar(f"s_bfe_{letter}{bits}", (bits, bits), form, immediate=bfe_operands(bits)))

register(
    Scalar("s_add_u32", (32, 32, 32), lambda a, b: Result(a + b, a + b >> 32 != 0)),
    Scalar("s_addc_u32", (32, 32, 32), lambda a, b, scc: Result(a + b + scc, a + b + scc >> 32 != 0), scc_in=True),
    Scalar("s_sub_u32", (32, 32, 32), lambda a, b: Result(a - b, b > a)),
    Scalar("s_subb_u32", (32, 32, 32), lambda a, b, scc: Result(a - b - scc, b + scc > a), scc_in=True),
    Scalar("s_add_i32", (32, 32, 32), lambda a, b: overflowing(signed(a) + signed(b))),
    Scalar("s_sub_i32", (32, 32, 32), lambda a, b: overflowing(signed(a) - signed(b))),
    Scalar("s_mul_i32", (32, 32, 32), lambda a, b: Result(a * b)),
    Scalar("s_mul_hi_u32", (32, 32, 32), lambda a, b: Result(a * b >> 32)),
    Scalar("s_mul_hi_i32", (32, 32, 32), lambda a, b: Result(signed(a) * signed(b) >> 32)),
    # SCC: the first operand is the one chosen
    Scalar("s_min_i32", (32, 32, 32), lambda a, b: Result(min(signed(a), signed(b)), signed(a) < signed(b))),
    Scalar("s_max_i32", (32, 32, 32), lambda a, b: Result(max(signed(a), signed(b)), signed(a) > signed(b))),
    Scalar("s_min_u32", (32, 32, 32), lambda a, b: Result(min(a, b), a < b)),
    Scalar("s_max_u32", (32, 32, 32), lambda a, b: Result(max(a, b), a > b)),
    Scalar("s_sext_i32_i8", (32, 32), lambda a: Result(signed(a, 8))),
    Scalar("s_sext_i32_i16", (32, 32), lambda a: Result(signed(a, 16))),
    Scalar("s_ff0_i32_b32", (32, 32), lambda a: Result((~a & a + 1).bit_length() - 1 if a != 0xFFFFFFFF else -1)),
    # how far from the top the first bit lies that differs from the sign
    Scalar(
        "s_flbit_i32",
        (32, 32),
        lambda a: Result(32 - (a ^ -(a >> 31) & 0xFFFFFFFF).bit_length() if a not in (0, 0xFFFFFFFF) else -1),
    ),
    Scalar("s_abs_i32", (32, 32), lambda a: checked(abs(signed(a)))),
    Scalar("s_absdiff_i32", (32, 32, 32), lambda a, b: checked(abs(signed(signed(a) - signed(b))))),
    Scalar("s_pack_ll_b32_b16", (32, 32, 32), lambda a, b: Result(a & 0xFFFF | (b & 0xFFFF) << 16)),
    Scalar("s_pack_lh_b32_b16", (32, 32, 32), lambda a, b: Result(a & 0xFFFF | b >> 16 << 16)),
    Scalar("s_pack_hh_b32_b16", (32, 32, 32), lambda a, b: Result(a >> 16 | b >> 16 << 16)),
    Scalar("s_bitset0_b32", (32, 32), lambda a, old: Result(old & ~(1 << a % 32)), reads_destination=True),
    Scalar("s_bitset1_b32", (32, 32), lambda a, old: Result(old | 1 << a % 32), reads_destination=True),
    Scalar(
        "s_wqm_b64", (64, 64), lambda a: checked(sum(0xF << 4 * quad for quad in range(16) if a >> 4 * quad & 0xF), 64)
    ),
)
for n in (1, 2, 3, 4):
    register(
        Scalar(f"s_lshl{n}_add_u32", (32, 32, 32), lambda a, b, n=n: Result((a << n) + b, (a << n) + b >> 32 != 0))
    )


def any16(rng: np.random.Generator) -> int:
    """SOPK's constant, sign-extended by the unit."""
    return int(rng.choice([0, 1, 0x7FFF, 0x8000, 0xFFFF, int(rng.integers(0, 65536))]))


constant = {"immediate": any16}
updates = {"reads_destination": True, **constant}
register(
    Scalar("s_movk_i32", (32,), lambda k: Result(signed(k, 16)), **constant),
    Scalar("s_cmovk_i32", (32,), lambda k, scc: Result(signed(k, 16) if scc else None), scc_in=True, **constant),
    Scalar("s_addk_i32", (32,), lambda k, old: overflowing(signed(old) + signed(k, 16)), **updates),
    Scalar("s_mulk_i32", (32,), lambda k, old: Result(signed(old) * signed(k, 16)), **updates),
)

ORDER: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def on_signed(order: Callable[[int, int], bool], bits: int) -> Callable[[int, int], Result]:
    """The comparison of signed numbers, the second of which has so many bits."""
    return lambda a, b: Result(None, order(signed(a), signed(b, bits)))


compare = {"form": "{op} {s}"}
for name, order in ORDER.items():
    register(
        Scalar(f"s_cmp_{name}_u32", (0, 32, 32), lambda a, b, f=order: Result(None, f(a, b)), **compare),
        Scalar(f"s_cmp_{name}_i32", (0, 32, 32), on_signed(order, 32), **compare),
        # the constant of an unsigned comparison is zero-extended, that of a signed one sign-extended
        Scalar(f"s_cmpk_{name}_u32", (0, 32), lambda a, k, f=order: Result(None, f(a, k)), **constant, **compare),
        Scalar(f"s_cmpk_{name}_i32", (0, 32), on_signed(order, 16), **constant, **compare),
    )
    if name in ("eq", "lg"):
        register(Scalar(f"s_cmp_{name}_u64", (0, 64, 64), lambda a, b, f=order: Result(None, f(a, b)), **compare))
register(
    Scalar("s_bitcmp0_b32", (0, 32, 32), lambda a, b: Result(None, not a >> b % 32 & 1), **compare),
    Scalar("s_bitcmp1_b32", (0, 32, 32), lambda a, b: Result(None, bool(a >> b % 32 & 1)), **compare),
)
