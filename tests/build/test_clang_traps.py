"""What clang makes of an element of a vector: the pinned release reads element 0 through its own bit cast, silently."""

import subprocess

from mla_suite.archs import CSRC

ELEMENT = """
#include "common/device.hpp"
typedef float Four __attribute__((ext_vector_type(4)));
struct P { const Four* in; uint32_t* out; };
MLA_KERNEL(64, 1) void k(P p) { Four v = *p.in; *p.out = mla::bit_cast<uint32_t>(v[1]); }
"""


def test_bit_cast_of_a_vector_element(tmp_path, amd_compiler):
    (tmp_path / "k.hip").write_text(ELEMENT)
    command = [*amd_compiler.to_assembly("gfx942"), f"-I{CSRC}", "-S", str(tmp_path / "k.hip"), "-o", "-"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "offset:4" in text or ", 0x4\n" in text, "element 1 is 4 bytes behind the first"
