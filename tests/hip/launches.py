"""One small kernel in hipMalloc's memory, launched by hand: what a program without torch would do."""

from __future__ import annotations

import ctypes

import torch
from captures import RepeatedMirror
from conftest import ARCH
from virtual_hip.code_objects import Image

import mla_suite
from mla_suite import emulator
from mla_suite.build import params
from mla_suite.core import register
from mla_suite.ops.decode.samples import decode_sample


def append_kv():
    """A call of append_kv on the CPU's tensors: five new rows in a cache of its own."""
    op = register.get("append_kv")
    args, kwargs = next(iter(op.samples())).make(torch.device("cpu"))
    with mla_suite.emulate(ARCH), emulator.configured(threads=1):
        torch.ops.mla_suite.append_kv(*args, **kwargs)


def one_decode():
    """A call of decode that is one launch, with LDS."""
    args, kwargs = decode_sample([20], heads=8, num_splits=1).make(torch.device("cpu"))
    with mla_suite.emulate(ARCH), emulator.configured(threads=1):
        torch.ops.mla_suite.decode(*args, **kwargs)


def recorded(session, call=append_kv):
    """The one launch that a call makes: (kernel, grid, block, LDS, parameters, buffers). The call runs as ever."""
    seen = []
    inner = session.bind

    def bind(kernel, grid, block, dynamic_lds, overlap=False):
        start = inner(kernel, grid, block, dynamic_lds, overlap)

        def recording(packed, buffers):
            seen.append((kernel, grid, block, dynamic_lds, packed, list(buffers)))
            start(packed, buffers)

        return recording

    session.bind = bind
    try:
        call()
    finally:
        del session.bind
    (only,) = seen
    return only


class Placed:
    """A launch whose buffers lie in GPU memory until `close`."""

    def __init__(self, session, launch):
        self.session = session
        self.kernel, self.grid, self.block, self.lds, packed, self.items = launch
        self.mirror = RepeatedMirror(session.gpu, session.runtime)
        self.mirror.place(self.items, session.stream())
        session.runtime.synchronize(session.stream())
        self.layout = params.load(self.kernel.entry.params)
        values = self.layout.unpack(packed)
        for field in self.layout.fields:
            if field.is_pointer and values[field.name]:
                values[field.name] = self.mirror.translate(values[field.name])
        self.params = self.layout.pack(**values)

    def start(self, **changes):
        """Enqueues the launch on the calling thread's stream."""
        what = {"grid": self.grid, "block": self.block, "dynamic_lds": self.lds, "params": self.params, **changes}
        self.session.driver.launch(self.kernel, **what)

    def run(self, **changes):
        """The launch, from its beginning to its end; what it did wrong `check` of the GPU says."""
        self.start(**changes)
        self.session.runtime.synchronize(self.session.stream())

    def finish(self):
        """Copies back what a kernel may have written, and waits."""
        self.mirror.copy_out(self.session.stream())
        self.session.runtime.synchronize(self.session.stream())

    def close(self):
        self.session.runtime.synchronize(self.session.stream())
        self.mirror.free()


def overwrite(gpu, address, data):
    """Damages GPU memory behind HIP's back."""
    assert gpu.read(address, len(data)) is not None, f"{address:#x} is not allocated"
    ctypes.memmove(gpu.base + address, data, len(data))


def loaded_at(session, entry):
    """Where HIP has put a kernel's object in GPU memory, by the bytes of its code; and the object."""
    image = Image.of(entry)
    for address, size, flags in session.gpu.allocations():
        at = session.gpu.read(address, size).find(image.code) if flags & 1 else -1  # 1: memory of the GPU
        if at >= 0:
            return address + at - image.code_address, image
    raise AssertionError(f"{entry.id} is nowhere in GPU memory")
