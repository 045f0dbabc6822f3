"""Missing wait states: every row of the table by hand-written code, and paths through branches."""

from __future__ import annotations

import re

import check_hazards
import pytest
from hazards import check as hazards
from hazards.effects import operation
from hazards.table import ARCHS, RULES

MFMA4 = "v_mfma_f32_16x16x16_bf16 v[0:3], v[8:9], v[10:11], v[0:3]"  # 4 passes on both archs
MFMA8 = "v_mfma_f32_32x32x8_f16 v[0:15], v[20:21], v[22:23], v[0:15]"
MFMA16 = "v_mfma_f32_32x32x4_2b_f16 v[0:31], v[40:41], v[42:43], v[0:31]"
MFMA2 = "v_mfma_f32_4x4x4_16b_f16 v[0:3], v[8:9], v[10:11], v[0:3]"
AGPR8 = "v_mfma_f32_32x32x8_f16 a[0:15], v[20:21], v[22:23], a[0:15]"
SGEMM8 = "v_mfma_f32_16x16x4_f32 v[0:3], v60, v61, v[0:3]"
DGEMM16 = "v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7]"
DGEMM4 = "v_mfma_f64_4x4x4_4b_f64 v[0:1], v[8:9], v[10:11], v[0:1]"
DOT = "v_dot2_f32_f16 v0, v1, v2, v0"

# producer, consumer, wait states required on gfx942 and on gfx950 (None: no such hazard)
CASES = [
    ("v_mov_b32_e32 v8, 0", MFMA4, 2, 2),
    ("v_mov_b32_e32 v11, 0", MFMA4, 2, 2),
    ("v_mov_b32_e32 v3, 0", MFMA4, 2, 2),
    ("v_accvgpr_write_b32 a15, 0", AGPR8, 2, 2),
    ("v_exp_f32_e32 v8, v12", MFMA4, 2, 2),
    ("v_cmpx_lt_i32_e32 vcc, v20, v21", MFMA4, 4, 4),
    (DOT, "v_dot2_f32_f16 v3, v0, v2, v3", 3, 3),
    (DOT, "v_add_f32_e32 v3, v0, v2", 3, 3),
    (DOT, "v_mov_b32_e32 v0, 0", 3, 3),
    (DOT, "ds_write_b32 v9, v0", 3, 3),
    (DOT, "v_dot2_f32_f16 v0, v1, v2, v0", 0, 0),
    (MFMA2, MFMA2, 2, 2),
    (MFMA4, MFMA4, 0, 0),
    (MFMA4, "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[8:9], v[10:11], v[0:3]", 5, 6),
    (MFMA2, "v_mfma_f32_16x16x16_f16 v[0:3], v[8:9], v[10:11], v[0:3]", 3, 4),
    (MFMA8, "v_mfma_f32_16x16x16_f16 v[4:7], v[30:31], v[32:33], v[4:7]", 9, 10),
    (MFMA16, "v_mfma_f32_32x32x8_f16 v[0:15], v[60:61], v[62:63], v[0:15]", 17, 18),
    (AGPR8, "v_mfma_f32_16x16x16_f16 v[4:7], v[30:31], v[32:33], v[4:7]", 0, 0),
    (MFMA2, SGEMM8, 3, 3),
    (MFMA4, SGEMM8, 5, 6),
    (MFMA8, SGEMM8, 9, 10),
    (MFMA16, SGEMM8, 17, 18),
    (MFMA4, "v_mfma_f64_4x4x4_4b_f64 v[10:11], v[12:13], v[14:15], v[2:3]", 5, 6),
    (MFMA2, "v_mfma_f32_16x16x16_f16 v[50:53], v[0:1], v[54:55], 0", 5, 5),
    (MFMA4, "v_mfma_f32_16x16x16_f16 v[50:53], v[54:55], v[2:3], 0", 7, 8),
    (MFMA8, "v_mfma_f32_16x16x16_f16 v[50:53], v[0:1], v[54:55], 0", 11, 12),
    (MFMA16, "v_mfma_f32_16x16x16_f16 v[50:53], v[0:1], v[54:55], 0", 19, 20),
    (MFMA4, "v_smfmac_f32_16x16x32_f16 v[50:53], v[54:55], v[56:59], v3", 7, 8),
    (MFMA4, "v_smfmac_f32_16x16x32_f16 v[2:5], v[54:55], v[56:59], v60", 5, 6),
    (MFMA2, "v_add_f32_e32 v50, v0, v51", 5, 5),
    (MFMA4, "v_add_f32_e32 v50, v3, v51", 7, 8),
    (MFMA8, "v_pk_mul_f32 v[50:51], v[14:15], v[52:53]", 11, 12),
    (MFMA16, "v_max3_f32 v50, v51, v52, v31", 19, 20),
    (AGPR8, "v_accvgpr_read_b32 v1, a9", 11, 12),
    (MFMA4, "v_mov_b32_e32 v3, 0", 7, 8),
    (AGPR8, "v_accvgpr_write_b32 a0, 0", 11, 12),
    (MFMA4, "global_store_dword v[50:51], v2, off", 7, 8),
    (MFMA4, "flat_store_dword v[50:51], v2", 7, 8),
    (MFMA4, "buffer_store_dword v2, v50, s[0:3], 0 offen", 7, 8),
    (MFMA8, "ds_write_b128 v50, v[0:3]", 11, 12),
    (AGPR8, "ds_write_b128 v50, a[0:3] offset:16", 11, 12),
    (MFMA4, "ds_read_b128 v[50:53], v0", 7, 8),
    (MFMA4, "global_load_dword v50, v[2:3], off", 7, 8),
    ("v_mfma_f32_16x16x16_f16 v[50:53], v[8:9], v[10:11], v[0:3]", "v_mov_b32_e32 v1, 0", 3, 3),
    ("v_mfma_f32_4x4x4_16b_f16 v[50:53], v[8:9], v[10:11], v[0:3]", "v_mov_b32_e32 v1, 0", 1, 1),
    ("v_mfma_f32_32x32x8_f16 v[50:65], v[20:21], v[22:23], v[0:15]", "v_mov_b32_e32 v1, 0", 7, 7),
    ("v_mfma_f32_32x32x4_2b_f16 v[50:81], v[40:41], v[42:43], v[0:31]", "v_mov_b32_e32 v1, 0", 15, 15),
    ("v_mfma_f32_4x4x1_16b_f32 v[0:3], v8, v9, v[0:3]", "v_mfma_f32_4x4x1_16b_f32 v[0:3], v8, v9, v[0:3]", 2, 2),
    (SGEMM8, SGEMM8, 0, 0),
    (SGEMM8, "v_mfma_f32_16x16x1_4b_f32 v[0:15], v18, v19, v[0:15]", 8, 8),
    (SGEMM8, MFMA4, 0, 0),
    (SGEMM8, "v_mfma_f64_4x4x4_4b_f64 v[10:11], v[12:13], v[14:15], v[2:3]", 8, 8),
    (SGEMM8, "v_mfma_f32_16x16x16_f16 v[50:53], v[0:1], v[54:55], 0", 10, 10),
    (SGEMM8, "global_store_dword v[50:51], v2, off", 10, 10),
    (SGEMM8, "v_add_f32_e32 v50, v3, v51", 10, 10),
    (SGEMM8, "v_mov_b32_e32 v3, 0", 10, 10),
    (DGEMM16, DGEMM16, 0, 0),
    (DGEMM16, SGEMM8, 9, 17),
    (DGEMM16, "v_mfma_f64_4x4x4_4b_f64 v[10:11], v[12:13], v[14:15], v[2:3]", 9, 17),
    (DGEMM16, "v_mfma_f32_16x16x16_f16 v[50:53], v[0:1], v[54:55], 0", 11, 19),
    (DGEMM16, "ds_write_b64 v50, v[0:1]", 18, 18),
    (DGEMM16, "v_add_f64 v[50:51], v[0:1], v[52:53]", 11, 19),
    (DGEMM16, "v_mov_b32_e32 v3, 0", 11, 19),
    (DGEMM4, DGEMM4, 4, 4),
    (DGEMM4, SGEMM8, 4, 4),
    (DGEMM4, "v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7]", 4, 4),
    (DGEMM4, "v_mfma_f32_16x16x16_f16 v[50:53], v[0:1], v[54:55], 0", 6, 6),
    (DGEMM4, "ds_write_b64 v50, v[0:1]", 9, 9),
    (DGEMM4, "v_add_f64 v[50:51], v[0:1], v[52:53]", 6, 6),
    (DGEMM4, "v_mov_b32_e32 v1, 0", 6, 6),
    ("v_readfirstlane_b32 s4, v0", "global_load_dword v1, v2, s[4:5]", 5, 5),
    ("v_cmp_lt_i32_e64 s[4:5], v0, v1", "buffer_load_dword v1, v2, s[4:7], 0 offen", 5, 5),
    ("v_readfirstlane_b32 m0, v0", "global_load_lds_dword v[2:3], off", 5, 5),
    ("v_readfirstlane_b32 s4, v0", "v_add_u32_e32 v1, s4, v2", 2, 2),
    ("v_cmp_lt_i32_e32 vcc, v0, v1", "v_mov_b32_e32 v2, vcc_lo", 2, 2),
    ("v_cmp_lt_i32_e32 vcc, v0, v1", "v_cndmask_b32_e32 v2, v3, v4, vcc", 0, 0),
    ("v_cmp_lt_i32_e64 s[4:5], v0, v1", "v_addc_co_u32_e64 v2, s[6:7], v3, v4, s[4:5]", 0, 0),
    ("v_cmpx_lt_i32_e32 vcc, v0, v1", "v_mov_b32_e32 v2, exec_lo", 2, 2),
    ("v_readfirstlane_b32 s4, v0", "v_readlane_b32 s5, v1, s4", 4, 4),
    ("v_readfirstlane_b32 s4, v0", "v_writelane_b32 v1, s6, s4", 4, 4),
    ("v_cmp_lt_f32_e32 vcc, v0, v1", "v_div_fmas_f32 v2, v3, v4, v5", 4, 4),
    ("v_div_scale_f32 v6, vcc, v0, v1, v0", "v_div_fmas_f32 v2, v3, v4, v5", 4, 4),
    ("v_cmp_lt_i32_e32 vcc, v0, v1", "v_mov_b32_e32 v2, src_vccz", 5, 5),
    ("v_cmpx_lt_i32_e32 vcc, v0, v1", "v_mov_b32_e32 v2, src_execz", 5, 5),
    ("v_cmpx_lt_i32_e32 vcc, v0, v1", "v_readfirstlane_b32 s4, v2", 4, 4),
    ("v_cmpx_lt_i32_e32 vcc, v0, v1", "v_mov_b32_dpp v2, v3 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1", 5, 5),
    ("v_add_u32_e32 v3, v0, v1", "v_mov_b32_dpp v2, v3 quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0xf", 2, 2),
    ("v_add_u32_e32 v3, v0, v1", "v_readlane_b32 s5, v3, 0", 1, 1),
    ("v_add_u32_e32 v3, v0, v1", "v_readfirstlane_b32 s5, v3", 1, 1),
    ("v_cvt_f16_f32_sdwa v3, v0 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD", "v_or_b32_e32 v4, v3, v5", 1, 1),
    ("v_cvt_pk_fp8_f32 v3, v0, v1 op_sel:[0,0,1]", "v_mov_b32_e32 v4, v3", 1, 1),
    ("v_cvt_sr_fp8_f32 v3, v0, v1 op_sel:[0,0,1,0]", "v_mov_b32_e32 v4, v3", 1, 1),
    ("v_cvt_pk_fp8_f32 v3, v0, v1 op_sel:[0,0,0]", "v_mov_b32_e32 v4, v3", 0, 0),
    ("v_exp_f32_e32 v3, v0", "v_add_f32_e32 v4, v3, v5", 1, 1),
    ("v_exp_f32_e32 v3, v0", "v_log_f32_e32 v4, v3", 0, 0),
    ("v_rcp_f32_e32 v3, v0", "v_fmac_f32_e32 v3, v4, v5", 1, 1),
    ("global_store_dwordx4 v[0:1], v[4:7], off", "v_mov_b32_e32 v6, 0", 2, 2),
    ("flat_store_dwordx3 v[0:1], v[4:6]", "v_mov_b32_e32 v6, 0", 2, 2),
    ("global_store_dwordx4 v[0:1], a[4:7], s[2:3]", "ds_read_b32 a5, v9", 1, 1),
    ("global_store_dwordx2 v[0:1], v[4:5], off", "v_mov_b32_e32 v5, 0", 0, 0),
    ("buffer_store_dwordx4 v[4:7], v0, s[4:7], 0 offen", "v_mov_b32_e32 v6, 0", 2, 2),
    ("buffer_store_dwordx4 v[4:7], v0, s[4:7], s8 offen", "v_mov_b32_e32 v6, 0", 1, 1),
    ("global_atomic_cmpswap_x2 v0, v[4:7], s[2:3]", "v_mov_b32_e32 v7, 0", 2, 2),
    ("s_mov_b32 m0, s4", "global_load_lds_dwordx4 v[2:3], off", 1, 1),
    ("s_mov_b32 m0, s4", "scratch_load_lds_dword v2, off", 1, 1),
    ("s_add_i32 m0, s4, s5", "buffer_load_dword v2, s[4:7], 0 offen lds", 1, 1),
    ("s_mov_b32 m0, s4", "s_sendmsg sendmsg(MSG_INTERRUPT)", 1, 1),
    ("s_mov_b32 m0, s4", "s_movrels_b32 s5, s6", 1, 1),
    ("s_mov_b32 m0, s4", "ds_read_addtid_b32 v1", 1, 1),
    ("s_mov_b32 m0, s4", "global_load_dwordx4 v[4:7], v[2:3], off", 0, 0),
    ("s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s4", "s_getreg_b32 s5, hwreg(HW_REG_MODE)", 2, 2),
    ("s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s4", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3", 2, 2),
    ("s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s4", "s_getreg_b32 s5, hwreg(HW_REG_STATUS)", 0, 0),
    ("v_cmpx_lt_i32_e32 vcc, v0, v1", "v_permlane32_swap_b32_e32 v2, v3", None, 4),
    ("v_add_u32_e32 v3, v0, v1", "v_permlane16_swap_b32_e32 v2, v3", None, 2),
]
F8F6F4 = [
    ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:23], v[0:3]", MFMA4, 10),
    ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:19], v[0:3] blgp:4", MFMA4, 10),
    ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:11], v[16:19], v[0:3] cbsz:4 blgp:4", MFMA4, 6),
    ("v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[18:25], v[26:33], v[0:15]", "v_mov_b32_e32 v34, v15", 20),
    ("v_mfma_f32_16x16x32_bf16 v[0:3], v[8:11], v[16:19], v[0:3]", "ds_read_b64_tr_b16 v[40:41], v0", 8),
    ("v_mov_b32_e32 v24, 0", "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:23], v[0:3], v24, v25", 2),
]


def between(producer, consumer, waits):
    """Both instructions with `waits` wait states between them."""
    nops = [f"\ts_nop {min(8, waits - at) - 1}" for at in range(0, waits, 8)]
    return "\n".join([f"\t{producer}", *nops, f"\t{consumer}", "\ts_endpgm"])


@pytest.mark.parametrize(("producer", "consumer", "gfx942", "gfx950"), CASES)
def test_one_wait_state_decides(producer, consumer, gfx942, gfx950):
    for arch, waits in (("gfx942", gfx942), ("gfx950", gfx950)):
        waits = waits or 0
        assert hazards.check(between(producer, consumer, waits), arch) == []
        if waits:
            finding = max(hazards.check(between(producer, consumer, waits - 1), arch), key=lambda item: item.required)
            assert (finding.required, finding.found) == (waits, waits - 1)
            assert finding.producer.operation.text == producer
            assert finding.consumer.operation.text == consumer
            assert finding.rule.source[arch] in str(finding)


@pytest.mark.parametrize(("producer", "consumer", "waits"), F8F6F4)
def test_instructions_of_gfx950_alone(producer, consumer, waits):
    assert hazards.check(between(producer, consumer, waits), "gfx950") == []
    (finding,) = {
        item.required: item for item in hazards.check(between(producer, consumer, waits - 1), "gfx950")
    }.values()
    assert (finding.required, finding.found) == (waits, waits - 1)


def test_every_row_has_a_case():
    seen = set()
    for producer, consumer, *_ in CASES:
        for arch in ARCHS:
            seen |= {
                (item.rule.producer, item.rule.consumer) for item in hazards.check(between(producer, consumer, 0), arch)
            }
    assert {(rule.producer, rule.consumer) for rule in RULES} - seen == set()


def test_independent_instructions_count_one_each_and_s_nop_one_more_than_it_says():
    middle = ["s_waitcnt lgkmcnt(0)", "v_mov_b32_e32 v90, 0", "s_nop 1", "s_mov_b32 s0, 0", "s_barrier", "s_setprio 1"]
    text = "\n\t".join(["", MFMA4, *middle, "v_mov_b32_e32 v50, v0", "s_endpgm"])
    assert hazards.check(text, "gfx942") == []
    (finding,) = hazards.check(text, "gfx950")
    assert (finding.found, finding.required) == (7, 8)


LOOP = f"""
\tv_mov_b32_e32 v60, 0
.LBB0_1:
\tv_add_f32_e32 v50, v0, v51
{{before}}
\t{MFMA4}
{{behind}}
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
"""


def test_the_back_edge_of_a_loop():
    assert hazards.check(LOOP.format(before="", behind="\ts_nop 5"), "gfx942") == []
    (finding,) = hazards.check(LOOP.format(before="\ts_nop 7", behind="\ts_nop 4"), "gfx942")
    assert (finding.found, finding.required) == (6, 7)
    assert finding.producer.line > finding.consumer.line


def test_a_chain_across_the_back_edge():
    """Two instructions of unlike passes on one accumulator, neither close to the other but around the loop."""
    one = "v_mfma_f32_16x16x16_f16 v[0:3], v[60:61], v[62:63], v[0:3]"
    other = "v_mfma_f32_16x16x4_4b_f16 v[0:15], v[60:61], v[62:63], v[0:15]"
    text = f".LBB0_1:\n\t{one}\n\ts_nop 7\n\t{other}\n\ts_nop {{}}\n\ts_cbranch_vccnz .LBB0_1\n\ts_endpgm\n"
    assert hazards.check(text.format(7), "gfx942") == []
    assert [(item.found, item.required) for item in hazards.check(text.format(6), "gfx942")] == [(8, 9)]


MOVED = """
	v_mfma_f32_16x16x16_bf16 v[2:5], v[60:61], v[62:63], v[2:5]
	v_mov_b32_e32 v90, 0
	{second}
	v_mov_b32_e32 v91, 0
	v_mfma_f32_16x16x16_bf16 v[16:19], v[60:61], v[62:63], {last}
	s_endpgm
"""


@pytest.mark.parametrize(
    ("second", "last", "found"),
    [
        ("v_mfma_f32_16x16x16_bf16 v[0:3], v[60:61], v[62:63], v[2:5]", "v[0:3]", []),
        # v4 and v5 are the first product's still, and another opcode's C is not forwarded.
        ("v_mfma_f32_16x16x16_bf16 v[0:3], v[60:61], v[62:63], v[2:5]", "v[4:7]", [3]),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[60:61], v[62:63], v[2:5]", "v[0:3]", [1, 3, 1]),
        ("v_mfma_f32_16x16x16_bf16 v[0:3], v[60:61], v[62:63], v[4:7]", "v[0:3]", [1, 3]),  # its C is not v[2:5]
        # A product that overwrites another's result without taking it does not wait for it.
        ("v_mfma_f32_16x16x16_bf16 v[0:3], v[60:61], v[62:63], v[8:11]", "v[0:3]", [3]),
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_chain_that_moves_its_accumulator(arch, second, last, found):
    text = MOVED.format(second=second, last=last)
    assert sorted(item.found for item in hazards.check(text, arch)) == sorted(found)


def test_the_shortest_of_two_paths():
    text = f"""
\t{MFMA4}
\ts_cbranch_scc0 .LBB0_2
\ts_nop {{long}}
\ts_branch .LBB0_3
.LBB0_2:
\ts_nop {{short}}
.LBB0_3:
\tv_mov_b32_e32 v50, v0
\ts_endpgm
"""
    assert hazards.check(text.format(long=5, short=5), "gfx942") == []
    (finding,) = hazards.check(text.format(long=7, short=4), "gfx942")
    assert (finding.found, finding.required) == (6, 7)
    (finding,) = hazards.check(text.format(long=3, short=7), "gfx942")
    assert (finding.found, finding.required) == (6, 7)


def test_nothing_follows_the_end_of_a_program():
    assert hazards.check(f"\t{MFMA4}\n\ts_endpgm\nother:\n\tv_mov_b32_e32 v50, v0\n\ts_endpgm\n", "gfx950") == []


def test_a_listing_of_a_disassembler():
    listing = """
kernel.co:	file format elf64-amdgpu

0000000000001900 <kernel>:
	v_add_f32_e32 v50, v0, v51                                 // 000000001900: 02646700
	v_mfma_f32_16x16x16_bf16 v[0:3], v[8:9], v[10:11], v[0:3]  // 000000001904: D3E10000 04021508
	s_nop 3                                                    // 00000000190C: BF800003
	s_cbranch_scc1 65531                                       // 000000001910: BF85FFFB <kernel>
	s_endpgm                                                   // 000000001914: BF810000
"""
    (finding,) = hazards.check(listing, "gfx942")
    assert (finding.consumer.line, finding.producer.line, finding.found, finding.required) == (5, 6, 5, 7)
    assert hazards.check(listing.replace("s_nop 3 ", "s_nop 5 "), "gfx942") == []


@pytest.mark.parametrize("text", ["s_setpc_b64 s[0:1]", "s_branch .LBB9_9", "s_cbranch_scc1 12"])
def test_flow_that_cannot_be_followed_is_a_finding(text):
    (sentence,) = hazards.sentences("gfx950 kernel", f"\t{text}\n\ts_endpgm\n", "gfx950")
    assert sentence.startswith("gfx950 kernel: line 1: ")
    assert sentence.endswith("so its hazards cannot be checked")


def test_a_text_without_instructions_is_a_finding():
    assert hazards.sentences("notes.txt", "Not a kernel.\n", "gfx942") == [
        "notes.txt: no line has an instruction of assembly or of a listing by llvm-objdump, so its hazards cannot be "
        "checked"
    ]


def test_unknown_names():
    with pytest.raises(ValueError, match="hazards of gfx90a are not known"):
        hazards.check("", "gfx90a")
    with pytest.raises(ValueError, match="v_mfma_f32_64x64x4_f16: the passes"):
        operation("v_mfma_f32_64x64x4_f16 v[0:3], v[8:9], v[10:11], v[0:3]")


def test_the_sentence():
    (sentence,) = hazards.sentences("gfx950 kernel", between(MFMA4, "v_mov_b32_e32 v50, v0", 3), "gfx950")
    assert sentence == (
        "gfx950 kernel: line 3: `v_mov_b32_e32 v50, v0` comes 3 wait states behind line 1: "
        f"`{MFMA4}` (4 passes), 8 are required for v[0:3] (matrix write, then VALU reads it; CDNA4 ISA 7.6, table 38)"
    )


def test_the_program_reads_a_listing(tmp_path, capsys):
    text = tmp_path / "kernel.s"
    text.write_text(between(MFMA4, "v_mov_b32_e32 v50, v0", 3))
    assert check_hazards.main(["--arch", "gfx942", "--disassembly", str(text)]) == 1
    assert re.fullmatch(rf"{text}: line 3: .*\n1 texts checked, 1 findings\n", capsys.readouterr().out)
    text.write_text(between(MFMA4, "v_mov_b32_e32 v50, v0", 8))
    assert check_hazards.main(["--arch", "gfx942", "--disassembly", str(text), str(text)]) == 0
    assert capsys.readouterr().out == "2 texts checked, 0 findings\n"
