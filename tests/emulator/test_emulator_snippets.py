"""Single instructions through run_snippet: what the front end, the operand decoding and the masks do with them."""

import numpy as np
import pytest

from mla_suite.emulator import AssemblyError, Emulator, Memory, assembly, run_snippet

LANE = np.arange(64, dtype=np.uint32)
rng = np.random.default_rng(13)


def floats(n=64):
    return rng.standard_normal(n).astype(np.float32)


def as_f32(row):
    return row.view(np.float32)


def test_partial_exec_keeps_the_other_lanes(arch):
    state = run_snippet(arch, "v_add_u32_e32 v2, v0, v1", {"v0": LANE, "v1": 100, "v2": 7}, exec_mask=0xFF00)
    np.testing.assert_array_equal(state.v[2], np.where((LANE >= 8) & (LANE < 16), LANE + 100, 7))


def test_source_modifiers_and_constants(arch):
    x = floats()
    lines = ["v_fma_f32 v1, -v0, |v0|, 1.0", "v_mul_f32_e64 v2, v0, 0.15915494 clamp", "v_add_f32_e64 v3, v0, v0 mul:4"]
    state = run_snippet(arch, lines, {"v0": x})
    np.testing.assert_array_equal(
        as_f32(state.v[1]), (1 - x.astype(np.float64) * abs(x.astype(np.float64))).astype(np.float32)
    )
    np.testing.assert_array_equal(as_f32(state.v[2]), np.clip(x * np.float32(0.15915494), 0, 1))
    np.testing.assert_array_equal(as_f32(state.v[3]), x * 8)


def test_fma_rounds_once(arch):
    a = np.full(64, 1 + 2.0**-12, np.float32)
    c = np.full(64, -(1 + 2.0**-11), np.float32)
    state = run_snippet(arch, "v_fma_f32 v3, v0, v0, v1", {"v0": a, "v1": c})
    np.testing.assert_array_equal(as_f32(state.v[3]), np.float32(2.0**-24))


def test_denormals_follow_the_mode(arch):
    tiny = np.full(64, 1e-40, np.float32)
    kept = run_snippet(arch, "v_add_f32_e32 v1, v0, v0", {"v0": tiny})
    flushed = run_snippet(arch, "v_add_f32_e32 v1, v0, v0", {"v0": tiny}, mode=0)
    np.testing.assert_array_equal(as_f32(kept.v[1]), tiny + tiny)
    assert not as_f32(flushed.v[1]).any()
    less = "v_cmp_lt_f32_e32 vcc, 0, v0"
    assert [run_snippet(arch, less, {"v0": tiny}, mode=mode).s64(106) for mode in (0xF0, 0)] == [(1 << 64) - 1, 0]
    # Its class is looked at as it stands: positive denormal, not zero.
    for mode in (0xF0, 0):
        line = "v_cmp_class_f32_e64 vcc, v0, v1"
        assert run_snippet(arch, line, {"v0": tiny, "v1": 1 << 7}, mode=mode).s64(106) == (1 << 64) - 1
        assert run_snippet(arch, line, {"v0": tiny, "v1": 1 << 6}, mode=mode).s64(106) == 0
    changed = run_snippet(
        arch, ["s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0", "v_add_f32_e32 v1, v0, v0"], {"v0": tiny}
    )
    assert not as_f32(changed.v[1]).any()


@pytest.mark.parametrize(
    ("control", "source"),
    [
        ("row_shl:3", [lane + 3 if lane % 16 + 3 < 16 else -1 for lane in range(64)]),
        ("row_shr:5", [lane - 5 if lane % 16 >= 5 else -1 for lane in range(64)]),
        ("row_ror:4", [lane & 48 | (lane - 4) & 15 for lane in range(64)]),
        ("quad_perm:[2,0,3,1]", [lane & ~3 | (2, 0, 3, 1)[lane & 3] for lane in range(64)]),
        ("row_newbcast:6", [lane & 48 | 6 for lane in range(64)]),
        ("row_bcast:15", [(lane & 48) - 1 for lane in range(64)]),
        ("row_bcast:31", [31 if lane >= 32 else -1 for lane in range(64)]),
        ("row_mirror", [lane & 48 | 15 - lane % 16 for lane in range(64)]),
        ("row_half_mirror", [lane & ~7 | 7 - lane % 8 for lane in range(64)]),
    ],
)
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
def test_dpp(arch, control, source, bound):
    line = f"v_mov_b32_dpp v1, v0 {control} row_mask:0xd bank_mask:0x7{bound}"
    state = run_snippet(arch, line, {"v0": LANE + 1, "v1": 1000})
    for lane, taken in enumerate(source):
        enabled = 0xD >> lane // 16 & 1 and 0x7 >> lane // 4 % 4 & 1
        want = 1000 if not enabled or (taken < 0 and not bound) else 0 if taken < 0 else taken + 1
        assert state.v[1][lane] == want, lane


def test_dpp_without_the_suffix(arch):
    state = run_snippet(arch, "v_mov_b32 v1, v0 row_shl:1 row_mask:0xf bank_mask:0xf", {"v0": LANE, "v1": 100})
    np.testing.assert_array_equal(state.v[1], np.where(LANE % 16 < 15, LANE + 1, 100))


TABLE = """
reader:
\ts_getpc_b64 s[0:1]
\ts_add_u32 s0, s0, table@rel32@lo+4
\ts_endpgm
.Lfunc_end0:
\t.section\t.rodata
\t.p2align\t2, 0x0
table:
\t.byte\t1, 255
\t.short\t-2

\t.long\t0x01020304 ; hexadecimal
\t.zero\t3
\t.quad\t-1
\t.size\ttable, 19
other:
\t.long\t7
"""


def test_constants_that_the_code_addresses():
    kernel = assembly.parse_body(TABLE, TABLE.index("reader:") + 7, "reader")
    assert kernel.constants == {"table": b"\x01\xff\xfe\xff\x04\x03\x02\x01" + bytes(3) + b"\xff" * 8}
    with pytest.raises(AssemblyError, match="the code addresses gone, which this file does not define"):
        assembly.parse_body(TABLE.replace("table@", "gone@"), TABLE.index("reader:") + 7, "reader")


def test_sdwa(arch):
    x = rng.integers(0, 1 << 32, 64, dtype=np.uint32)
    line = "v_add_u32_sdwa v1, v0, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2 src1_sel:WORD_0"
    state = run_snippet(arch, line, {"v0": x, "v1": 0xABCD1234, "v2": x})
    np.testing.assert_array_equal(state.v[1], 0x1234 | ((x >> 16 & 255) + (x & 0xFFFF) & 0xFFFF) << 16)


def test_sdwa_keeps_the_rest_of_the_destination_unless_told_otherwise(arch):
    """The assembler's encoding where `dst_unused` is not written."""
    lines = [
        "v_add_u32_sdwa v1, v0, v0 dst_sel:WORD_1",
        "v_add_u32_sdwa v2, v0, v0 dst_sel:BYTE_0 dst_unused:UNUSED_PAD",
    ]
    state = run_snippet(arch, lines, {"v0": 3, "v1": 0xABCD1234, "v2": 0xABCD1234})
    assert [hex(state.v[i][0]) for i in (1, 2)] == ["0x61234", "0x6"]


def test_compare_and_branch(arch):
    lines = [
        "v_cmp_gt_f32_e32 vcc, 0, v0",
        "s_and_saveexec_b64 s[2:3], vcc",
        "s_cbranch_execz .L",
        "v_mov_b32_e32 v1, 1",
        ".L:",
    ]
    x = floats()
    state = run_snippet(arch, lines, {"v0": x})
    np.testing.assert_array_equal(state.v[1] == 1, x < 0)
    assert state.s64(2) == (1 << 64) - 1
    assert run_snippet(arch, lines, {"v0": abs(x)}).v[1].sum() == 0


def test_scalar_carry_chain(arch):
    state = run_snippet(
        arch, ["s_add_u32 s4, s0, s2", "s_addc_u32 s5, s1, s3"], sgpr={"s0": 0xFFFFFFFF00000003, "s2": 0xFFFFFFFE}
    )
    assert state.s64(4) == (0xFFFFFFFF00000003 + 0xFFFFFFFE) % (1 << 64)
    assert state.scc


def test_wide_add(arch):
    a, b = rng.integers(0, 1 << 63, (2, 64), dtype=np.uint64)
    state = run_snippet(arch, "v_lshl_add_u64 v[4:5], v[0:1], 3, v[2:3]", {"v0": a, "v2": b})
    got = state.v[4].astype(np.uint64) | state.v[5].astype(np.uint64) << np.uint64(32)
    np.testing.assert_array_equal(got, (a << np.uint64(3)) + b)


def test_lanes_through_scalars(arch):
    lines = ["v_readlane_b32 s0, v0, 9", "v_writelane_b32 v0, s1, 60", "v_readfirstlane_b32 s2, v0"]
    state = run_snippet(arch, lines, {"v0": LANE * 3}, {"s1": 77}, exec_mask=0xF0)
    assert (state.s[0], state.s[2], state.v[0][60], state.v[0][61]) == (27, 12, 77, 183)


def test_swap_of_rows():
    state = run_snippet("gfx950", "v_permlane32_swap_b32_e32 v0, v1", {"v0": LANE, "v1": LANE + 100})
    np.testing.assert_array_equal(state.v[0], np.where(LANE < 32, LANE, LANE + 100 - 32))
    np.testing.assert_array_equal(state.v[1], np.where(LANE < 32, LANE + 32, LANE + 100))


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_eight_bit_floats_round_trip(arch, kind):
    codes = np.arange(256, dtype=np.uint32)[:64] + 64 * (kind == "bf8")
    lines = [f"v_cvt_pk_f32_{kind}_e32 v[2:3], v0", f"v_cvt_pk_{kind}_f32 v4, v2, v3"]
    state = run_snippet(arch, lines, {"v0": codes | (codes ^ 128) << 8})
    both = codes | (codes ^ 128) << 8
    if arch == "gfx942" and kind == "fp8":
        both[0] = 0x8000  # FNUZ has no negative zero: code 128 is its NaN
    if arch == "gfx950" and kind == "bf8":
        both[-3:] = 0xFE7E  # three codes of each sign are NaN; the conversion writes one of them
    np.testing.assert_array_equal(state.v[4], both)


def test_scale_exponents_and_selection():
    codes = np.full(64, 0x38 | 0x40 << 8 | 0x30 << 16 | 0x38 << 24, np.uint32)  # 1, 2, 0.5, 1
    line = "v_cvt_scalef32_pk_f32_fp8 v[2:3], v0, v1 op_sel:[1,0,0]"
    state = run_snippet("gfx950", line, {"v0": codes, "v1": np.full(64, 12.0, np.float32)})
    np.testing.assert_array_equal(as_f32(state.v[2]), np.float32(0.5 * 8))
    np.testing.assert_array_equal(as_f32(state.v[3]), np.float32(8))


def test_transposed_lds_read():
    tile = rng.integers(0, 1 << 16, (64, 4)).astype(np.uint16)
    lines = ["ds_read_b64_tr_b16 v[2:3], v0", "s_waitcnt lgkmcnt(0)"]
    state = run_snippet("gfx950", lines, {"v0": LANE * 8}, lds=tile)
    got = np.ascontiguousarray(state.v[2:4].T).view(np.uint16)
    for group in range(4):
        rows = tile[16 * group : 16 * group + 16].reshape(4, 16)
        np.testing.assert_array_equal(got[16 * group : 16 * group + 16], rows.T)


def test_buffer_lanes_past_the_end(arch):
    data = floats(40)
    resource = data.ctypes.data | 40 * 4 << 64 | 0x00027000 << 96
    lines = ["buffer_load_dword v1, v0, s[4:7], 0 offen", "s_waitcnt vmcnt(0)"]
    state = run_snippet(arch, lines, {"v0": LANE * 4}, {"s4": resource}, buffers=[Memory.of("data", data, "r")])
    assert state.findings == ()
    np.testing.assert_array_equal(as_f32(state.v[1]), np.concatenate([data, np.zeros(24, np.float32)]))


def test_atomic_add_returns_the_old_value(arch):
    counter = np.array([5], np.uint32)
    lines = ["global_atomic_add v2, v0, v1, s[0:1] sc0", "s_waitcnt vmcnt(0)"]
    state = run_snippet(
        arch, lines, {"v0": 0, "v1": 2}, {"s0": counter.ctypes.data}, buffers=[Memory.of("n", counter, "rw")]
    )
    assert counter[0] == 5 + 128
    np.testing.assert_array_equal(state.v[2], 5 + 2 * LANE)


def test_swizzle(arch):
    lines = ['ds_swizzle_b32 v1, v0 offset:swizzle(BITMASK_PERM,"01pip")', "s_waitcnt lgkmcnt(0)"]
    state = run_snippet(arch, lines, {"v0": LANE})
    np.testing.assert_array_equal(
        state.v[1], [lane & 32 | ((lane & 31 & 0b00111 | 0b01000) ^ 0b00010) for lane in range(64)]
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("v_frobnicate_b32 v0, v1", "does not know the instruction v_frobnicate_b32"),
        ("v_add_f32_e32 v0, v1, v2 sideways:3", "'sideways:3' is neither an operand nor a modifier"),
        ("s_branch .Lnowhere", "the branch target is not a label"),
        ("v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:8], 0", "wrong number of registers for B"),
        ("v_add_i32 v0, v1, v2 clamp", "clamp is modelled for f32"),
        ("ds_read_b32 v0, v1 offset:far", "'offset:far' is neither an operand nor a modifier"),
        ("v_mov_b32_dpp v0, v1 quad_perm:[0,1,x,3]", "neither an operand nor a modifier"),
        ("s_getreg_b32 s0, hwreg(HW_REG_MODE, 0)", "neither an operand nor a modifier"),
    ],
)
def test_refusals(arch, line, sentence):
    with pytest.raises(AssemblyError, match=sentence):
        run_snippet(arch, line)


def test_unsigned_sums_and_differences_saturate_with_clamp(arch):
    a = np.resize(np.array([0, 1, 7, 2**31, 2**32 - 1], np.uint32), 64)
    b = np.repeat(np.array([0, 1, 2**31, 2**32 - 1], np.uint32), 16)
    lines = [f"v_{op}_u32_e64 v{i}, v0, v1 clamp" for i, op in ((2, "add"), (3, "sub"), (4, "subrev"))]
    state = run_snippet(arch, lines, {"v0": a, "v1": b})
    wide_a, wide_b = a.astype(np.int64), b.astype(np.int64)
    for register, exact in ((2, wide_a + wide_b), (3, wide_a - wide_b), (4, wide_b - wide_a)):
        np.testing.assert_array_equal(state.v[register], np.clip(exact, 0, 2**32 - 1))


def test_a_text_without_instructions_is_refused(arch):
    with pytest.raises(AssemblyError, match="^empty has no instructions"):
        Emulator(arch).load_text("empty:\n.Lfunc_end0:\n\t.amdhsa_kernel empty\n\t.end_amdhsa_kernel\n", "empty")


def test_malformed_operands_are_refused(arch):
    for line in (
        "global_load_dwordx4 v[0:1], v2, s[0:1]",
        "ds_write_b64 v0, v1",
        "ds_read_b64 v1, v0",
        "ds_read2_b32 v1, v0 offset1:1",
        "buffer_store_dword v[0:1], v2, s[4:7], 0 offen",
    ):
        with pytest.raises(AssemblyError, match="wrong number of registers for the data"):
            run_snippet(arch, line)
