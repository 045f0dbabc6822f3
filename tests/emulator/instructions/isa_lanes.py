"""Selection, carries, the division helpers and moves between lanes. "Instructions": VOP1, VOP2, VOP3A and VOP3B."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from isa_case import ALL, LANE, Case, Custom, active, in_registers, mask_of, random_mask, register, vector_name, words
from isa_numbers import fma32
from isa_operands import F32_EDGES, draw, raw_of, same, typed

from mla_suite.emulator import State

U = np.uint32


def in_reals(register_number: int, want: np.ndarray) -> Callable[[State], None]:
    """The check that a register holds these f32 numbers; any NaN is one."""

    def check(state: State) -> None:
        assert same(state.v[register_number], want, "f32").all()

    return check


def conditional(rng, op):
    a, b, old, mask, pick = words(rng, 64), words(rng, 64), words(rng, 64), random_mask(rng), random_mask(rng)
    chosen, lanes = active(pick), active(mask)
    text = "v_cndmask_b32_e32 v2, v0, v1, vcc"
    yield Case([text], in_registers(2, np.where(chosen, b, a), text), {0: a, 1: b}, {"vcc": pick})
    text = "v_cndmask_b32_e64 v2, v0, v1, s[6:7]"
    want = np.where(lanes, np.where(chosen, b, a), old)
    yield Case([text], in_registers(2, want, text), {0: a, 1: b, 2: old}, {"s6": pick}, exec_mask=mask)
    text = "v_cndmask_b32_e64 v2, -v0, |v1|, vcc"
    want = np.where(chosen, b & U(0x7FFFFFFF), a ^ U(0x80000000))
    yield Case([text], in_registers(2, want, text), {0: a, 1: b}, {"vcc": pick})
    text = "v_cndmask_b32_e64 v2, 0, 1.0, vcc"
    yield Case([text], in_registers(2, np.where(chosen, U(0x3F800000), U(0)), text), {}, {"vcc": pick})
    text = "v_cndmask_b32_dpp v2, v0, v1, vcc quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"
    yield Case([text], in_registers(2, np.where(chosen, b, a[LANE ^ 1]), text), {0: a, 1: b}, {"vcc": pick})
    text = (
        "v_cndmask_b32_sdwa v2, v0, v1, vcc dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:BYTE_2"
    )
    picked = np.where(chosen, b >> U(16) & U(255), a >> U(16))
    want = (old & U(0xFFFF)) | picked << U(16)
    yield Case([text], in_registers(2, want, text), {0: a, 1: b, 2: old}, {"vcc": pick})


def carried(rng, op, sign: int, reverse: bool = False, carry_in: bool = False):
    """d and the carry (or borrow) of every lane; lanes without EXEC give 0."""
    for variant in range(3):
        a, b, old = draw(rng, "u32", 64), draw(rng, "u32", 64), words(rng, 64)
        if variant == 0:
            b = np.where(LANE % 3 == 0, a, b)
        mask, carry = (ALL if variant == 0 else random_mask(rng)), random_mask(rng)
        x, y = (b, a) if reverse else (a, b)
        total = x.astype(np.int64) + sign * (y.astype(np.int64) + (active(carry) if carry_in else 0))
        lanes = active(mask)
        want, flags = np.where(lanes, (total & 0xFFFFFFFF).astype(U), old), mask_of((total >> 32 != 0) & lanes)
        if variant == 2:
            tail = ", s[8:9]" if carry_in else ""
            text, target, sgpr = f"{op}_e64 v2, s[6:7], v0, v1{tail}", 6, {"s8": carry}
        else:
            tail = ", vcc" if carry_in else ""
            text, target, sgpr = f"{op}_e32 v2, vcc, v0, v1{tail}", 106, {"vcc": carry}

        def check(state: State, want=want, flags=flags, target=target, text=text) -> None:
            np.testing.assert_array_equal(state.v[2], want, err_msg=text)
            assert state.s64(target) == flags, (text, hex(state.s64(target)), hex(flags))

        yield Case([text], check, {0: a, 1: b, 2: old}, sgpr, exec_mask=mask)


def multiply_add(rng, op, kind: str):
    """D = S0 S1 + S2 in 64 bits; the carry out of the sum."""
    for variant in range(3):
        a, b, c = draw(rng, kind, 64), draw(rng, kind, 64), draw(rng, "u64", 64)
        old, mask = words(rng, 2, 64), ALL if variant == 0 else random_mask(rng)
        lanes = active(mask)
        signed = kind == "i32"
        x, y = (typed(v, kind).astype(np.int64).astype(object) for v in (a, b))
        addend = c.view(np.int64).astype(object) if signed else c.astype(object)
        total = x * y + addend
        inside = (total >= -(1 << 63)) & (total < 1 << 63) if signed else total < 1 << 64
        flags = mask_of(~inside.astype(bool) & lanes)
        halves = np.array([[int(t) >> shift & 0xFFFFFFFF for t in total] for shift in (0, 32)], U)
        want = np.where(lanes, halves, old)

        def check(state: State, want=want, flags=flags) -> None:
            np.testing.assert_array_equal(state.v[4:6], want)
            assert state.s64(6) == flags

        vgpr = {0: a, 1: b, 2: c, 4: old[0], 5: old[1]}
        yield Case([f"{op} v[4:5], s[6:7], v0, v1, v[2:3]"], check, vgpr, exec_mask=mask)


def division_operands(rng) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators over the whole range of exponents, and every pair of special values."""
    special = np.array(F32_EDGES, U)
    grid = np.stack([g.ravel() for g in np.meshgrid(special, special)])
    spread = rng.integers(0, 255, (2, 256)).astype(U) << U(23) | words(rng, 2, 256) & U(0x807FFFFF)
    both = np.concatenate([grid, spread], axis=1)
    return both[0].view(np.float32), both[1].view(np.float32)


# A compiler emits these for n / d: scaled operands, refinement, and the repair of results that it cannot represent.
DIVISION = [
    "v_div_scale_f32 v10, s[6:7], v1, v1, v0",
    "v_div_scale_f32 v11, vcc, v0, v1, v0",
    "v_rcp_f32_e32 v12, v10",
    "v_fma_f32 v13, -v10, v12, 1.0",
    "v_fma_f32 v12, v13, v12, v12",
    "v_mul_f32_e32 v14, v11, v12",
    "v_fma_f32 v15, -v10, v14, v11",
    "v_fma_f32 v14, v15, v12, v14",
    "v_fma_f32 v15, -v10, v14, v11",
    "v_div_fmas_f32 v15, v15, v12, v14",
    "v_div_fixup_f32 v2, v15, v1, v0",
]


def quotients(rng, op):
    """The three helpers together divide exactly: f32 division with one rounding, for every pair of operands."""
    numerators, denominators = division_operands(rng)
    for first in range(0, numerators.size, 64):
        n, d = numerators[first : first + 64], denominators[first : first + 64]
        with np.errstate(all="ignore"):
            want = raw_of((n.astype(np.float64) / d.astype(np.float64)).astype(np.float32), "f32")

        def check(state: State, want=want, n=n, d=d) -> None:
            fine = same(state.v[2], want, "f32")
            bad = np.flatnonzero(~fine)
            assert fine.all(), (
                n[bad[:4]],
                d[bad[:4]],
                state.v[2][bad[:4]].view(np.float32),
                want[bad[:4]].view(np.float32),
            )

        yield Case(DIVISION, check, {0: n, 1: d})


def fmas_unscaled(rng, op):
    a, b, c = (draw(rng, "f32", 64) for _ in range(3))
    with np.errstate(all="ignore"):
        want = raw_of(fma32(*(typed(x, "f32") for x in (a, b, c))), "f32")
    yield Case(["v_div_fmas_f32 v3, v0, v1, v2"], in_reals(3, want), {0: a, 1: b, 2: c}, {"vcc": 0})


def bit_counts(rng, op, high: bool):
    """MBCNT: ones of the mask below this lane, in its low or high half, plus the second source."""
    for mask in (ALL, random_mask(rng)):
        a, b, old = words(rng, 64), words(rng, 64), words(rng, 64)
        below = np.maximum(LANE - 32, 0) if high else np.minimum(LANE, 32)
        ones = np.array([bin(int(x) & (1 << int(n)) - 1).count("1") for x, n in zip(a, below, strict=True)])
        want = np.where(active(mask), (ones + b.astype(np.int64) & 0xFFFFFFFF).astype(U), old)
        text = f"{op} v2, v0, v1"
        yield Case([text], in_registers(2, want, text), {0: a, 1: b, 2: old}, exec_mask=mask)
    flags = random_mask(rng)
    half = flags >> 32 if high else flags & 0xFFFFFFFF
    below = np.maximum(LANE - 32, 0) if high else np.minimum(LANE, 32)
    want = np.array([bin(half & (1 << int(n)) - 1).count("1") for n in below], U)
    text = f"{op} v2, s6, 0"
    yield Case([text], in_registers(2, want, text), {}, {"s6": half})


def first_lane(rng, op):
    x = words(rng, 64)
    for mask in (ALL, 1 << 40, 0xFF00000000000000, 0):
        lane = (mask & -mask).bit_length() - 1 if mask else 0  # without any lane the first is read

        def check(state: State, lane=lane) -> None:
            assert state.s[9] == x[lane]

        yield Case(["v_readfirstlane_b32 s9, v0"], check, {0: x}, exec_mask=mask)


def read_lane(rng, op):
    x = words(rng, 64)
    for lane in (0, 31, 63):

        def check(state: State, lane=lane) -> None:
            assert state.s[9] == state.s[10] == state.s[11] == x[lane]

        lines = [f"v_readlane_b32 s9, v0, {lane}", "v_readlane_b32 s10, v0, s5", "v_readlane_b32 s11, v0, m0"]
        yield Case(lines, check, {0: x}, {"s5": lane, "m0": lane + 64}, exec_mask=0)


def write_lane(rng, op):
    x = words(rng, 64)
    for lane in (0, 17, 63):
        want = np.where(lane == LANE, U(0xDEADBEEF), x)
        text = f"v_writelane_b32 v0, s4, {lane}"
        yield Case([text], in_registers(0, want, text), {0: x}, {"s4": 0xDEADBEEF}, exec_mask=0)
        text = "v_writelane_b32 v0, s4, m0"
        yield Case([text], in_registers(0, want, text), {0: x}, {"s4": 0xDEADBEEF, "m0": lane}, exec_mask=1)


def swap(rng, op):
    a, b, mask = words(rng, 64), words(rng, 64), random_mask(rng)
    want = np.where(active(mask), np.stack([b, a]), np.stack([a, b]))
    yield Case(["v_swap_b32 v0, v1"], in_registers(0, want, "swapped"), {0: a, 1: b}, exec_mask=mask)


def permlane_swap(rng, op, distance: int):
    """CDNA4: odd rows (or the upper half) of the first register trade places with even rows (the lower half) of the
    second. Lanes that EXEC leaves out keep their values."""
    for mask in (ALL, random_mask(rng)):
        a, b = words(rng, 64), words(rng, 64)
        odd = LANE // distance % 2 == 1
        lanes = active(mask)
        first = np.where(odd & lanes, b[LANE ^ distance], a)
        second = np.where(~odd & lanes, a[LANE ^ distance], b)
        text = f"{op}_e32 v0, v1"
        yield Case([text], in_registers(0, np.stack([first, second]), text), {0: a, 1: b}, exec_mask=mask)


def copies(rng, op, source: int, target: int):
    """Moves to, from and between the accumulation registers ("Matrix Arithmetic Instructions")."""
    x, old, mask = words(rng, 64), words(rng, 64), random_mask(rng)
    want = np.where(active(mask), x, old)
    text = f"{op} {vector_name(target, 1)}, {vector_name(source, 1)}"
    yield Case([text], in_registers(target, want, text), {source: x, target: old}, exec_mask=mask)


def constant_fma(rng, op):
    """FMAAK adds the literal, FMAMK multiplies by it."""
    a, b = draw(rng, "f32", 64), draw(rng, "f32", 64)
    k = np.full(64, 0x40490FDB, U)
    order = (a, b, k) if op == "v_fmaak_f32" else (a, k, b)
    with np.errstate(all="ignore"):
        want = raw_of(fma32(*(typed(x, "f32") for x in order)), "f32")
    text = f"{op} v2, v0, v1, 0x40490fdb" if op == "v_fmaak_f32" else f"{op} v2, v0, 0x40490fdb, v1"
    yield Case([text], in_reals(2, want), {0: a, 1: b})


def circle(rng, op, function: Callable[[np.ndarray], np.ndarray]):
    """The argument is in turns; the manual's domain is -256 to 256."""
    x = rng.uniform(-256, 256, 64).astype(np.float32)
    x[:9] = [0, -0.0, 0.25, 0.5, 0.75, -0.25, 255.5, 1e-40, 100.125]
    want = function(2 * np.pi * (x.astype(np.float64) % 1))

    def check(state: State) -> None:
        np.testing.assert_allclose(state.v[1].view(np.float32), want, rtol=0, atol=2.0**-20)
        assert np.isnan(state.v[3].view(np.float32)).all()

    yield Case([f"{op}_e32 v1, v0", f"{op}_e32 v3, v2"], check, {0: x, 2: np.full(64, np.inf, np.float32)})


register(
    Custom("v_cndmask_b32", conditional),
    Custom("v_add_co_u32", carried, 1),
    Custom("v_sub_co_u32", carried, -1),
    Custom("v_subrev_co_u32", carried, -1, True),
    Custom("v_addc_co_u32", carried, 1, False, True),
    Custom("v_subb_co_u32", carried, -1, False, True),
    Custom("v_subbrev_co_u32", carried, -1, True, True),
    Custom("v_mad_u64_u32", multiply_add, "u32"),
    Custom("v_mad_i64_i32", multiply_add, "i32"),
    *(Custom(op, quotients) for op in ("v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32")),
    Custom("v_div_fmas_f32", fmas_unscaled),
    Custom("v_mbcnt_lo_u32_b32", bit_counts, False),
    Custom("v_mbcnt_hi_u32_b32", bit_counts, True),
    Custom("v_readfirstlane_b32", first_lane),
    Custom("v_readlane_b32", read_lane),
    Custom("v_writelane_b32", write_lane),
    Custom("v_swap_b32", swap),
    Custom("v_permlane16_swap_b32", permlane_swap, 16, archs=("gfx950",)),
    Custom("v_permlane32_swap_b32", permlane_swap, 32, archs=("gfx950",)),
    Custom("v_accvgpr_read_b32", copies, 259, 5),
    Custom("v_accvgpr_write_b32", copies, 5, 511),
    Custom("v_accvgpr_mov_b32", copies, 300, 257),
    Custom("v_fmaak_f32", constant_fma),
    Custom("v_fmamk_f32", constant_fma),
    Custom("v_sin_f32", circle, np.sin),
    Custom("v_cos_f32", circle, np.cos),
)
