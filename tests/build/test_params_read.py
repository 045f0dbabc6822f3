"""Every launch parameter is read by a kernel: the compilers say which, of fields that are marked deprecated."""

import itertools
import re
import shutil
import subprocess

import pytest

from mla_suite.archs import CSRC
from mla_suite.build import compilers, params
from mla_suite.build.instances import instances

AN_ARRAY = re.compile(r"\w+_map_\d+|\w+_[0-3]")  # walked from its first element
WHERE_READ = {"combine": "sm_90"}  # by one arch's kernels together, of those that share the struct


@pytest.fixture
def compile_only(request, tmp_path):
    """arch -> the command up to -D, -I and source; it leaves no object."""

    def command(arch):
        if arch != "sm_90":
            return [*request.getfixturevalue("amd_compiler").to_assembly(arch), "-fsyntax-only"]
        nvidia = compilers.find_nvidia()
        if nvidia is None:
            pytest.skip("no nvcc of CUDA 12 or later")
        to_text = ["-ptx" if word == "-cubin" else word for word in nvidia.to_object(arch)]
        return [*to_text, "-Xcicc", "-O0", "-o", f"{tmp_path}/k.ptx"]

    return command


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
def test_kernels_read_every_parameter(arch, tmp_path, compile_only):
    begin = compile_only(arch)
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    for header in (csrc / "common" / "params").iterdir():
        marked = re.sub(r"^  (.*?)(\w+);", r'  [[deprecated("read: \2")]] \1\2;', header.read_text(), flags=re.M)
        header.write_text(marked)
    unread = {}
    # Of a kernel the last instance first, as a rule that of most options, then those over fp8, which have descales: few
    # are compiled until all fields are read.
    by_kernel = []
    for _, group in itertools.groupby(instances(arch), key=lambda each: each.kernel):
        last, *others = [*group][::-1]
        by_kernel.append([last, *sorted(others, key=lambda each: "fp8" not in each.id)])
    for instance in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*by_kernel))):
        if WHERE_READ.get(instance.params, arch) != arch:
            continue
        fields = (field.name for field in params.load(instance.params).fields)
        left = unread.setdefault(instance.params, {name for name in fields if not AN_ARRAY.fullmatch(name)})
        if left:
            constants = [f"-D{name}={value}" for name, value in instance.constants.items()]
            command = [*begin, *constants, f"-DMLA_SUITE_KERNEL={instance.symbol}", f"-I{csrc}"]
            done = subprocess.run([*command, str(csrc / instance.source)], capture_output=True, text=True, check=True)
            left -= set(re.findall(r"read: (\w+)", done.stderr))
    assert unread
    assert not {name: left for name, left in unread.items() if left}
