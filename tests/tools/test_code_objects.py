"""Kernels are found by their bytes in GPU memory; damaged and foreign ones are refused in a sentence."""

import re

import pytest
from virtual_hip.code_objects import ForeignKernel, Image, KernelIndex

from mla_suite.build import ObjectError, manifest

BASE = 0x7F00_0000_0000


class GpuMemory:
    """The read-only segments of an object where a loader puts them."""

    def __init__(self, image):
        self.segments = [(BASE + start, bytearray(held)) for start, held in image.segments]

    def read(self, address, size):
        for start, held in self.segments:
            if start <= address and address + size <= start + len(held):
                return bytes(held[address - start : address - start + size])
        return None

    def flip(self, address):
        for start, held in self.segments:
            if start <= address < start + len(held):
                held[address - start] ^= 1


@pytest.fixture(scope="module")
def images(archs_left_out):
    """Every kernel of append_kv on gfx942."""
    if "gfx942" in archs_left_out:
        pytest.skip("no kernels for gfx942 are built here; run `python -m mla_suite build --arch gfx942`")
    try:
        entries = [e for (arch, _), e in manifest.installed().kernels.items() if arch == "gfx942"]
    except ObjectError as error:
        pytest.skip(str(error))
    found = [Image.of(entry) for entry in entries if entry.kernel == "append_kv"]
    assert len(found) > 1
    return found


@pytest.fixture(scope="module")
def index(images):
    return KernelIndex("gfx942", [image.entry for image in images])


def test_every_kernel_is_found_where_it_was_loaded(images, index):
    for image in images:
        assert index.find(BASE + image.descriptor_address, GpuMemory(image).read) == image.entry


@pytest.mark.parametrize("where", ["first", "middle", "last", "descriptor", "elsewhere"])
def test_one_damaged_byte_is_named(images, index, where):
    image = images[0]
    at = {
        "first": image.code_address,
        "middle": image.code_address + len(image.code) // 2,
        "last": image.code_address + len(image.code) - 1,
        "descriptor": image.descriptor_address + 4,
        "elsewhere": image.segments[0][0],
    }[where]
    memory = GpuMemory(image)
    memory.flip(BASE + at)
    with pytest.raises(
        ForeignKernel, match=rf"{image.entry.id} in GPU memory is damaged: byte {at:#x} of the code obj"
    ):
        index.find(BASE + image.descriptor_address, memory.read)


def test_a_kernel_of_another_build_is_foreign_whatever_its_name_is(images):
    """Nothing but the bytes counts: an index without these bytes refuses them, though they bear a known name."""
    image = images[0]
    others = KernelIndex("gfx942", [other.entry for other in images if other.code[:64] != image.code[:64]])
    with pytest.raises(
        ForeignKernel,
        match=rf"is none of the {others.count} that the manifest has for gfx942; the virtual GPU executes",
    ):
        others.find(BASE + image.descriptor_address, GpuMemory(image).read)


def test_memory_that_ends_within_the_object(images, index):
    image = images[0]
    memory = GpuMemory(image)
    last = max(range(len(memory.segments)), key=lambda i: memory.segments[i][0])
    del memory.segments[last][1][-1]
    with pytest.raises(ForeignKernel, match="but GPU memory ends within it; it was not executed"):
        index.find(BASE + image.descriptor_address, memory.read)


def test_a_descriptor_outside_gpu_memory(images, index):
    with pytest.raises(
        ForeignKernel, match=re.escape(f"a kernel at {BASE - 4096:#x}, where no GPU memory is allocated")
    ):
        index.find(BASE - 4096, GpuMemory(images[0]).read)
