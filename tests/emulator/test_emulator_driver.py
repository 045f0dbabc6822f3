"""The emulator as a driver: CPU tensors in, numbers out, findings as one error."""

import struct
from types import SimpleNamespace

import pytest
import torch

from mla_suite import archs as arch_records
from mla_suite.emulator import Emulator, EmulatorDriver, SanitizerError, configured, machine
from mla_suite.launch.driver import Buffer, LaunchError


@pytest.fixture
def kernel(arch, programs):
    driver = EmulatorDriver(arch_records.get(arch))
    entry = SimpleNamespace(
        id="add", symbol="add", arch=arch, params_size=28, threads=256, lds=0, read_text=lambda: programs[arch]
    )
    return driver, driver.load(entry)


def launch(driver, loaded, grid, block, dynamic_lds, params, buffers):
    driver.bind(loaded, grid, block, dynamic_lds)(params, buffers)


def arguments(a, b, out):
    params = struct.pack("<QQQi", a.data_ptr(), b.data_ptr(), out.data_ptr(), a.numel())
    return params, [Buffer("a", a, "r"), Buffer("b", b, "r"), Buffer("out", out, "w")]


@pytest.mark.parametrize(
    ("directive", "value", "bits"),
    [
        ("float_denorm_mode_32", 3, 0b11 << 4),
        ("float_denorm_mode_16_64", 2, 0b10 << 6),
        ("dx10_clamp", 1, 1 << 8),
        ("ieee_mode", 1, 1 << 9),
        ("fp16_overflow", 1, 1 << 23),
    ],
)
def test_the_mode_register_that_a_wave_starts_with(directive, value, bits):
    """Fields of MODE as the ISA manual lays them out."""
    none = dict.fromkeys(("float_denorm_mode_32", "float_denorm_mode_16_64", "dx10_clamp", "ieee_mode"), 0)
    assert machine._mode(none) == 0
    assert machine._mode(none | {directive: value}) == bits
    with pytest.raises(LaunchError, match="another rounding than to nearest even"):
        machine._mode({"float_round_mode_32": 1})


def test_launch(kernel):
    driver, loaded = kernel
    a, b = torch.randn(2, 500)
    out = torch.empty(500)
    launch(driver, loaded, (2, 1, 1), 256, 0, *arguments(a, b, out))
    assert torch.equal(out, a + b)
    assert driver.load(loaded.entry) is loaded


def test_findings_raise_once_all_is_done(kernel):
    driver, loaded = kernel
    a, b = torch.randn(2, 500)
    out = torch.zeros(500)
    params, _ = arguments(a, b, out)
    buffers = [Buffer("a", a, "r"), Buffer("b", b, "r"), Buffer("out", out[:496], "w")]
    with pytest.raises(SanitizerError, match=r"global_out_of_bounds: add: `global_store_dword.*4 times") as caught:
        launch(driver, loaded, (2, 1, 1), 256, 0, params, buffers)
    assert torch.equal(out[:496], (a + b)[:496])
    assert not out[496:].any()
    assert caught.value.report.stored["out"] == 4 * 496
    with configured(collect=True) as reports:
        launch(driver, loaded, (2, 1, 1), 256, 0, params, buffers)
    assert [finding.kind for finding in reports[0].findings] == ["global_out_of_bounds"]


def test_refusals(kernel):
    driver, loaded = kernel
    a, b = torch.randn(2, 64)
    params, buffers = arguments(a, b, torch.empty(64))
    with pytest.raises(LaunchError, match="512 threads per workgroup, the kernel was compiled for 256"):
        launch(driver, loaded, (1, 1, 1), 512, 0, params, buffers)
    with pytest.raises(LaunchError, match="27 bytes of parameters, the kernel takes 28"):
        launch(driver, loaded, (1, 1, 1), 256, 0, params[:-1], buffers)
    for grid in ((0, 1, 1), (1, 0, 1), (1 << 24, 1, 1), (1, 65536, 1), (1, 1, 65536)):
        with pytest.raises(LaunchError, match=r"grid .* x 256 threads; a GPU takes at least one workgroup, fewer than"):
            launch(driver, loaded, grid, 256, 0, params, buffers)
    room = arch_records.get(driver.arch.name).lds_bytes
    launch(driver, loaded, (1, 1, 1), 256, room, params, buffers)
    with pytest.raises(LaunchError, match=f"{room + 1} bytes of dynamic LDS, {driver.arch.name} leaves {room}"):
        launch(driver, loaded, (1, 1, 1), 256, room + 1, params, buffers)
    for block in ((1025, 1, 1), (32, 33, 1), (0, 1, 1)):
        with pytest.raises(LaunchError, match="a workgroup has 1 to 1024 threads"):
            Emulator(driver.arch.name).launch(loaded.handle, (1, 1, 1), block, 0, params, [])
    with pytest.raises(LaunchError, match=f"{room + 16} bytes of LDS; {driver.arch.name} has {room}"):
        Emulator(driver.arch.name).launch(loaded.handle, (1, 1, 1), 256, room + 16, params, [])
    with pytest.raises(LaunchError, match="needs the buffers"):
        launch(driver, loaded, (1, 1, 1), 256, 0, params, [])
    with pytest.raises(LaunchError, match="buffer a is on meta"):
        launch(driver, loaded, (1, 1, 1), 256, 0, params, [Buffer("a", a.to("meta"), "r")])
