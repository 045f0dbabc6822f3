"""Two ways in which clang compiles a kernel to something else than it says, and how device.hpp stays clear of them.

Each test first shows the trap with the bare construct, so that it says when a compiler no longer has it.
"""

import subprocess

import pytest

from mla_suite.archs import CSRC
from mla_suite.build import compilers, report


def assembly(tmp_path, source, compiler):
    path = tmp_path / "k.hip"
    path.write_text('#include "common/device.hpp"\n' + source)
    command = [*compiler.to_assembly("gfx942"), f"-I{CSRC}", "-S", str(path), "-o", str(tmp_path / "k.s")]
    subprocess.run(command, check=True)
    return (tmp_path / "k.s").read_text()


@pytest.fixture(params=["ziglang", "rocm", "clang-19"])
def compiler(request, amd_compiler):
    if request.param == "ziglang":
        return compilers.packaged()
    if request.param == "rocm":
        found = compilers.installed_rocm()
        if found is None:
            pytest.skip("no ROCm is installed")
        return found
    found = compilers.shutil.which("clang-19")
    if found is None:
        pytest.skip("Debian's clang-19 is not installed")
    return compilers.find_amd(compilers.Path(found))


ELEMENT = """
typedef float Four __attribute__((ext_vector_type(4)));
struct P { const Four* in; uint32_t* out; };
MLA_KERNEL(64, 1) void k(P p) { Four v = *p.in; *p.out = READ(uint32_t, v[1]); }
"""


def loads_element_one(text):
    return "offset:4" in text or ", 0x4\n" in text


def test_bit_cast_of_a_vector_element(compiler, tmp_path):
    bare = assembly(tmp_path, "#define READ(T, x) __builtin_bit_cast(T, x)" + ELEMENT, compiler)
    ours = assembly(tmp_path, "#define READ(T, x) mla::bit_cast<T>(x)" + ELEMENT, compiler)
    array = ELEMENT.replace(
        "typedef float Four __attribute__((ext_vector_type(4)));", "using Four = mla::Vec<float, 4>;"
    )
    bare_array = assembly(tmp_path, "#define READ(T, x) __builtin_bit_cast(T, x)" + array, compiler)
    assert loads_element_one(ours)
    assert loads_element_one(bare_array)
    assert not loads_element_one(bare), (
        f"{compiler.version} reads the right element: device.hpp's warning can name the first fixed version"
    )


BOUNDS = """
struct P { const float* in; float* out; };
extern "C" MLA_GLOBAL_ BOUNDS void k(P p) {
  float kept[200];
#pragma unroll
  for (int i = 0; i < 200; i++) kept[i] = p.in[i * 256 + mla::thread_id()];
  mla::block_sync();
#pragma unroll
  for (int i = 0; i < 200; i++) p.out[i * 256 + mla::thread_id()] = kept[i] * kept[(i * 7 + 3) % 200];
}
"""


def test_launch_bounds(compiler, tmp_path):
    ignored = "#define BOUNDS __attribute__((launch_bounds(256, 1)))\n"
    bare = report.read_assembly(assembly(tmp_path, ignored + BOUNDS, compiler), "k")
    ours = report.read_assembly(assembly(tmp_path, "#define BOUNDS MLA_BOUNDS_(256, 1)\n" + BOUNDS, compiler), "k")
    assert (ours.threads, ours.scratch, ours.spills) == (256, 0, 0)
    assert ours.registers > 200
    assert bare.threads == 1024, f"{compiler.version} obeys launch_bounds: device.hpp's comment can say since when"
    assert bare.registers <= 128
    assert bare.scratch > 0
