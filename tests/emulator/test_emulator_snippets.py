"""Single instructions through run_snippet: what the front end, the operand decoding and the masks do with them."""

import numpy as np
import pytest

from mla_suite.emulator import AssemblyError, Emulator, assembly, run_snippet

LANE = np.arange(64, dtype=np.uint32)
rng = np.random.default_rng(13)


def as_f32(row):
    return row.view(np.float32)


def test_the_constant_that_is_a_radian_in_turns(arch):
    x = rng.standard_normal(64).astype(np.float32)
    state = run_snippet(arch, "v_mul_f32_e64 v1, v0, 0.15915494", {"v0": x})
    np.testing.assert_array_equal(as_f32(state.v[1]), x * np.float32(0.15915494))


def test_denormals_follow_the_mode(arch):
    tiny = np.full(64, 1e-40, np.float32)
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


def test_sdwa_keeps_the_rest_of_the_destination_unless_told_otherwise(arch):
    """The assembler's encoding where `dst_unused` is not written."""
    lines = [
        "v_add_u32_sdwa v1, v0, v0 dst_sel:WORD_1",
        "v_add_u32_sdwa v2, v0, v0 dst_sel:BYTE_0 dst_unused:UNUSED_PAD",
    ]
    state = run_snippet(arch, lines, {"v0": 3, "v1": 0xABCD1234, "v2": 0xABCD1234})
    assert [hex(state.v[i][0]) for i in (1, 2)] == ["0x61234", "0x6"]


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
        ("global_load_dwordx4 v[0:1], v2, s[0:1]", "wrong number of registers for the data"),
        ("ds_write_b64 v0, v1", "wrong number of registers for the data"),
        ("ds_read_b64 v1, v0", "wrong number of registers for the data"),
        ("ds_read2_b32 v1, v0 offset1:1", "wrong number of registers for the data"),
        ("buffer_store_dword v[0:1], v2, s[4:7], 0 offen", "wrong number of registers for the data"),
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
