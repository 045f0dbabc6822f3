"""Private memory: what a compiler spills comes back, and nothing beyond its size is touched."""

import re
import struct

import numpy as np

from mla_suite.emulator import Emulator, Memory

TEXT = """
\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
spill:
\ts_load_dwordx2 s[4:5], s[0:1], 0x0
\tv_lshlrev_b32_e32 v1, 2, v0
\tv_mul_u32_u24_e32 v2, 3, v0
\tscratch_store_dwordx2 off, v[1:2], off offset:8
\ts_movk_i32 s6, 0x8
\tscratch_load_dword v3, off, s6 offset:4
\ts_waitcnt vmcnt(0) lgkmcnt(0)
\tglobal_store_dword v1, v3, s[4:5]
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel spill
\t\t.amdhsa_private_segment_fixed_size 16
\t\t.amdhsa_kernarg_size 8
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_float_denorm_mode_32 3
\t.end_amdhsa_kernel
"""


def run(arch, text):
    out = np.zeros(128, np.uint32)
    machine = Emulator(arch)
    program = machine.load_text(text.format(arch=arch), "spill")
    params = struct.pack("<Q", out.ctypes.data)
    return out, machine.launch(program, (1, 1, 1), 128, 0, params, [Memory.of("out", out, "w")])


def test_spills_come_back(arch):
    out, report = run(arch, TEXT)
    assert report.findings == ()
    np.testing.assert_array_equal(out, 3 * np.arange(128))


def test_beyond_private_memory(arch):
    _, report = run(arch, re.sub("fixed_size 16", "fixed_size 12", TEXT))
    assert {finding.kind for finding in report.findings} == {"scratch_out_of_bounds"}
