"""Kernels that a test needs to be built, or builds."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

import mla_suite
from mla_suite.archs import CSRC
from mla_suite.build import compilers, manifest, params
from mla_suite.build.instances import instances
from mla_suite.launch import has_kernel

PLAIN_DECODE = "decode_dtype-bf16_rows-16_width-576_rotate-0"


def require_built(arch: str, *named: str) -> None:
    """Skips the test where one of an arch's instances, or its plainest decode if none is named, is not built."""
    for instance in named or (PLAIN_DECODE,):
        if not has_kernel(arch, instance):
            pytest.skip(f"{instance} is not built for {arch}; run `python -m mla_suite build --arch {arch}`")


def require_dense(arch: str) -> None:
    """Skips the test where an instance is not built that dense attention of an arch may take."""
    kernels = [item for item in instances(arch) if "decode" in item.kernel or "combine" in item.kernel]
    require_built(arch, *(item.id for item in kernels if "sparse" not in item.kernel))


def require_objects() -> Path:
    """The folder of the package's own kernels. Skips the test where they are not built."""
    found = manifest.locate()
    if isinstance(found, str):
        pytest.skip("the package's own kernels are not built: run `python -m mla_suite build`")
    return found


def assembly(arch: str, source: Path, to: Path, constants: Mapping[str, object], csrc: Path = CSRC) -> str:
    """The text of an AMD source, which the packaged compiler writes into a file."""
    defines = [f"-D{name}={value}" for name, value in constants.items()]
    command = [*compilers.packaged().to_assembly(arch), *defines, f"-I{csrc}", "-S", str(source), "-o", str(to)]
    subprocess.run(command, check=True)
    return to.read_text()


def assert_built_whole(configs, kernel: str) -> None:
    """Objects of sm_90 take neither scratch nor more registers than there are, and the struct of `kernel`."""
    require_built("sm_90", configs[0].instance)
    for config in configs:
        entry = manifest.installed().find("sm_90", config.instance)
        assert (entry.spills, entry.scratch, entry.lds, entry.threads) == (0, 0, 0, config.threads)
        assert entry.registers * config.threads <= 65536, "a block has the registers of an SM"
        assert entry.params_size == params.load(kernel).size
        assert entry.params_size % 64 == 0, "the copy engine wants its map on 64 bytes"


def emulated(needs=require_built, autouse=False, record=False):
    """A fixture of each AMD arch in turn whose kernels are built, as `needs` asks; calls on a CPU are emulated.

    Its value is the arch's name, or its `record`.
    """

    @pytest.fixture(params=["gfx942", "gfx950"], autouse=autouse)
    def arch(request):
        needs(request.param)
        with mla_suite.emulate(request.param) as found:
            yield found if record else request.param

    return arch
