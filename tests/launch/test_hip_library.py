"""Which libamdhip64 is used: torch's, and never a second one."""

import platform

import pytest

from mla_suite.launch import cuda, hip
from mla_suite.launch.driver import DriverError

LINE = "7f0000000000-7f0000100000 r-xp 00000000 08:01 131 "


@pytest.fixture
def maps(tmp_path):
    def write(*paths):
        file = tmp_path / "maps"
        file.write_text(
            "".join(f"{LINE}{path}\n{LINE.replace('r-xp', 'rw-p')}{path}\n" for path in paths) + LINE + "\n"
        )
        return file

    return write


def touch(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    return folder


def test_the_mapped_one_comes_first(maps, tmp_path):
    torch_lib, sdk = touch(tmp_path / "torch", "libamdhip64.so"), touch(tmp_path / "sdk", "libamdhip64.so.7")
    mapped = "/opt/a folder/libamdhip64.so.6.4"
    assert hip.find_library(maps("/usr/lib/libc.so.6", mapped), torch_lib, [sdk]) == mapped


def test_then_torchs_own_then_the_sdks(maps, tmp_path):
    torch_lib, sdk = touch(tmp_path / "torch", "libamdhip64.so"), touch(tmp_path / "sdk", "libamdhip64.so.7")
    nothing = maps("/usr/lib/libc.so.6", "/opt/libamdhip64_helper.so")
    assert hip.find_library(nothing, torch_lib, [sdk]) == str(torch_lib / "libamdhip64.so")
    assert hip.find_library(nothing, tmp_path / "none", [sdk]) == str(sdk / "libamdhip64.so.7")
    with pytest.raises(DriverError, match=r"no libamdhip64 is mapped, nor in .*none, nor in .*; install ROCm"):
        hip.find_library(nothing, tmp_path / "none", [])


def test_debians_folder_is_searched_after_amds(maps, tmp_path):
    """As Debian's libamdhip64-7 and AMD's own package lay themselves out, below another root."""
    sdk = [tmp_path / folder.relative_to("/") for folder in hip.SEARCHED]
    debian = touch(tmp_path / f"usr/lib/{platform.machine()}-linux-gnu", "libamdhip64.so.7")
    assert hip.find_library(maps("/usr/lib/libc.so.6"), tmp_path / "none", sdk) == str(debian / "libamdhip64.so.7")
    amd = touch(tmp_path / "opt/rocm/lib", "libamdhip64.so")
    assert hip.find_library(maps("/usr/lib/libc.so.6"), tmp_path / "none", sdk) == str(amd / "libamdhip64.so")


def test_two_mapped_copies_are_both_named(maps, tmp_path):
    two = maps("/opt/rocm/lib/libamdhip64.so.7", "/venv/torch/lib/libamdhip64.so")
    with pytest.raises(DriverError, match=r"two HIP runtimes are mapped, /opt/rocm\S+ and /venv/torch/lib\S+; start"):
        hip.find_library(two, tmp_path, [])


def test_a_real_mapping_is_seen(stub_folder):
    """The stub and its decoy, opened for real: this process then maps two copies."""
    import ctypes

    copies = [stub_folder / "libamdhip64.so", stub_folder / "decoy" / "libamdhip64.so"]
    for path in copies:
        ctypes.CDLL(str(path))
    assert {str(path) for path in copies} <= set(hip.mapped_copies())
    with pytest.raises(DriverError, match="two HIP runtimes are mapped"):
        hip.find_library()


def test_absent_and_old_libraries(tmp_path, stub_folder):
    with pytest.raises(DriverError, match=r"NVIDIA driver library cannot be opened .*; install the NVIDIA driver"):
        cuda.open_library(str(tmp_path / "libcuda.so.1"))
    with pytest.raises(
        DriverError, match=r"has no cuLaunchKernelEx; the NVIDIA driver must be of CUDA 12 .525. or newer"
    ):
        cuda.open_library(str(stub_folder / "libamdhip64.so"))
    with pytest.raises(DriverError, match=r"HIP runtime cannot be opened .*; install ROCm"):
        hip.open_library(str(tmp_path / "libamdhip64.so"))
