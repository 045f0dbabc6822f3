"""Planted faults: everything that is wrong in what HIP hands to the GPU is noticed, and said in a sentence."""

import ctypes
import subprocess
from dataclasses import replace

import pytest
from conftest import ARCH
from launches import Placed, loaded_at, one_decode, overwrite, recorded
from virtual_hip.virtual_gpu import VirtualGpuError

from mla_suite.build import compilers, manifest
from mla_suite.emulator.report import SanitizerError
from mla_suite.launch.driver import DriverError, LaunchError

OTHER = {"gfx942": "gfx950", "gfx950": "gfx942"}


def test_a_wrong_byte_in_the_kernel_arguments(session, placed):
    """The top byte of a pointer: the kernel then addresses memory that hipMalloc never gave."""
    pointer = next(field for field in placed.layout.fields if field.is_pointer)
    wrong = bytearray(placed.params)
    wrong[pointer.offset + 4] ^= 0x40
    placed.run(params=bytes(wrong))
    with pytest.raises(SanitizerError, match="global_out_of_bounds"):
        session.gpu.check()


def test_one_byte_less_than_the_kernel_reads(session, placed):
    """hipMalloc rounds up to pages; the bounds are those that were asked for, to the byte."""
    item = next(item for item in placed.items if item.access == "r" and item.tensor.is_contiguous())
    address = placed.mirror.translate(item.tensor.data_ptr())
    size = item.tensor.untyped_storage().nbytes()
    session.gpu.add_allocation(address, size - 1)
    placed.run()
    session.gpu.add_allocation(address, size)
    with pytest.raises(SanitizerError, match="global_out_of_bounds"):
        session.gpu.check()
    placed.run()
    session.gpu.check()


@pytest.mark.parametrize(
    ("field", "change", "sentence"),
    [
        ("lds_bytes", -16, r"the packet has \d+ bytes of LDS; the kernel takes \d+, and up to 0 more"),
        ("lds_bytes", 16, r"the packet has \d+ bytes of LDS; the kernel takes \d+, and up to 0 more"),
        ("scratch_bytes", 64, "the packet has 64 bytes of scratch, not 0"),
        ("kernarg", 1 << 45, "bytes of kernel arguments lie outside GPU memory"),
        ("kernel_object", 64, r"is damaged|is none of the"),
        ("kernel_object", 1 << 45, "where no GPU memory is allocated"),
    ],
)
def test_a_packet_that_does_not_fit_the_kernel(session, monkeypatch, field, change, sentence):
    """Altered between the queue and the GPU: HIP itself writes no such packet."""
    placed = Placed(session, recorded(session, one_decode))
    inner = session.gpu._run

    def altered(packet):
        setattr(packet, field, getattr(packet, field) + change)
        return inner(packet)

    monkeypatch.setattr(session.gpu, "_run", altered)
    placed.start()
    placed.close()
    with pytest.raises((LaunchError, VirtualGpuError), match=sentence):
        session.gpu.check()


def test_more_lds_than_the_gpu_has(session, placed):
    too_much = session.arch.lds_bytes + 16
    with pytest.raises(LaunchError, match=f"{too_much} bytes of dynamic LDS, {ARCH} leaves"):
        placed.start(dynamic_lds=too_much)


def test_an_object_of_the_other_arch(session):
    other = next(entry for (arch, _), entry in manifest.installed().kernels.items() if arch == OTHER[ARCH])
    with pytest.raises(DriverError, match="hipModuleLoadData: hipErrorNoBinaryForGpu: no kernel image is available"):
        session.driver.load(replace(other, id=f"{OTHER[ARCH]}'s {other.id}"))  # a driver keeps kernels by their ids


def test_a_corrupted_byte_of_a_kernel_in_gpu_memory(session, placed):
    """Of its code or of its descriptor."""
    base, image = loaded_at(session, placed.kernel.entry)
    offsets = (8, len(image.code) // 2, len(image.code) - 1)
    for where in (image.descriptor_address, *(image.code_address + offset for offset in offsets)):
        (right,) = session.gpu.read(base + where, 1)
        overwrite(session.gpu, base + where, bytes([right ^ 4]))
        placed.run()
        overwrite(session.gpu, base + where, bytes([right]))
        with pytest.raises(VirtualGpuError, match=r"the copy of append_kv\S+ in GPU memory is damaged: byte 0x"):
            session.gpu.check()
    placed.run()
    session.gpu.check()


def test_a_kernel_of_a_programs_own_is_refused_in_a_sentence(session, tmp_path):
    """It bears a known kernel's name; its bytes are not the manifest's."""
    known = next(entry for (arch, _), entry in manifest.installed().kernels.items() if arch == ARCH)
    compiler, source = compilers.packaged(), tmp_path / "own.hip"
    source.write_text(f'extern "C" __attribute__((global)) void {known.symbol}(int* out) {{ *out = 1; }}\n')
    steps = [
        [*compiler.to_assembly(ARCH), "-S", str(source), "-o", str(tmp_path / "own.s")],
        [*compiler.to_relocatable(ARCH), str(tmp_path / "own.s"), "-o", str(tmp_path / "own.o")],
        [*compiler.to_object(), str(tmp_path / "own.o"), "-o", str(tmp_path / "own.hsaco")],
    ]
    for step in steps:
        subprocess.run(step, check=True)
    module, function, address = ctypes.c_void_p(), ctypes.c_void_p(), session.runtime.malloc(4096)
    session.runtime.call("hipModuleLoadData", ctypes.byref(module), (tmp_path / "own.hsaco").read_bytes())
    session.runtime.call("hipModuleGetFunction", ctypes.byref(function), module, known.symbol.encode())
    packed = ctypes.byref(ctypes.c_void_p(ctypes.addressof(ctypes.c_void_p(address))))
    session.runtime.call("hipModuleLaunchKernel", function, 1, 1, 1, 64, 1, 1, 0, None, packed, None)
    session.runtime.call("hipDeviceSynchronize")
    session.runtime.free(address)
    with pytest.raises(VirtualGpuError, match=rf"is none of the \d+ that the manifest has for {ARCH}"):
        session.gpu.check()


def test_kernels_of_hips_own_are_refused_in_a_sentence(session):
    address = session.runtime.malloc(4096)
    session.runtime.call("hipMemset", ctypes.c_void_p(address), 1, ctypes.c_size_t(4096))
    session.runtime.call("hipDeviceSynchronize")
    session.runtime.free(address)
    with pytest.raises(VirtualGpuError, match=rf"is none of the \d+ that the manifest has for {ARCH}; .*hipMemset"):
        session.gpu.check()


def test_hip_wraps_a_grid_of_2_to_the_32_threads_and_our_driver_refuses_it(session, placed):
    block = placed.block
    too_many = (1 << 32) // block + placed.grid[0]
    with pytest.raises(LaunchError, match=r"fewer than 2\^32 threads along x"):
        placed.start(grid=(too_many, 1, 1))
    before = session.gpu.dispatches
    packed = ctypes.byref(ctypes.c_char_p(placed.params))
    shape = (too_many, *placed.grid[1:], block, 1, 1, placed.lds)
    stream = ctypes.c_void_p(session.stream())
    session.runtime.call("hipModuleLaunchKernel", placed.kernel.handle, *shape, stream, packed, None)
    session.runtime.synchronize(session.stream())
    assert session.gpu.dispatches == before + 1, "HIP itself takes the grid, modulo 2^32 threads"
    session.gpu.check()


def test_errors_that_hip_reports(session):
    with pytest.raises(DriverError, match="hipMalloc: 2 hipErrorOutOfMemory: out of memory"):
        session.runtime.malloc(1 << 46)
    with pytest.raises(DriverError, match="hipMemcpyAsync: 1 hipErrorInvalidValue: invalid argument"):
        session.runtime.copy_in(0, 0, 16, session.stream())
    with pytest.raises(DriverError, match="hipSetDevice: 101 hipErrorInvalidDevice: invalid device ordinal"):
        session.runtime.set_device(1)
