"""A host that drives the virtual GPU as ROCr does: through the table of its hook, with memory and queues of its own."""

from __future__ import annotations

import ctypes as c
import shutil
import struct
import time
from pathlib import Path

from virtual_hip.virtual_gpu import DispatchPacket

from mla_suite.emulator import core

MEMORY_BYTES = 1 << 20
RING, RING_BYTES = 0x10000, 0x1000
WRITE, READ = 0x100, 0x108
PM4 = 0x8000
SIGNALS = 0x2000
DATA = 0x40000
VRAM = 1
SDMA, AQL = 1, 2
LIMIT_S = 10

RUN = c.CFUNCTYPE(None, c.POINTER(DispatchPacket))
TELL = c.CFUNCTYPE(None, c.c_char_p)
SET_EVENT = c.CFUNCTYPE(None, c.c_void_p, c.c_uint)


class QueueInfo(c.Structure):
    """`QueueInfo` of csrc/emulator/virtual_gpu.hpp."""

    _fields_ = [
        ("ring", c.c_uint64),
        ("write_pointer", c.c_uint64),
        ("read_pointer", c.c_uint64),
        ("doorbell", c.c_void_p),
        ("ring_bytes", c.c_uint32),
        ("type", c.c_uint32),
    ]


class Functions(c.Structure):
    """The table of ROCr's hook, interface 0.4."""

    _fields_ = [
        ("major", c.c_uint32),
        ("minor", c.c_uint32),
        ("create", c.CFUNCTYPE(c.c_void_p)),
        ("destroy", c.CFUNCTYPE(None, c.c_void_p)),
        ("set_aperture", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_uint64)),
        ("allocated", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_uint64, c.c_uint32)),
        ("freed", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_uint64)),
        ("set_notify_event", c.c_void_p),
        ("set_wait_event", c.c_void_p),
        ("register_queue", c.CFUNCTYPE(c.c_void_p, c.c_void_p, c.POINTER(QueueInfo))),
        ("set_set_event", c.CFUNCTYPE(None, c.c_void_p, SET_EVENT, c.c_void_p)),
        ("destroy_queue", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p)),
    ]


class Host:
    """One virtual GPU with one queue; every offset below is an address of its memory."""

    def __init__(self, folder: Path) -> None:
        """A copy of the library has variables of its own: the GPU is one to a process, and so is a copy's."""
        self.library = c.CDLL(shutil.copy(core.load().path, folder / "virtual_gpu.so"))
        self.library.get_hsakmt_model_functions.restype = c.POINTER(Functions)
        self.table = self.library.get_hsakmt_model_functions().contents
        self.memory = (c.c_ubyte * MEMORY_BYTES)()
        self.dispatches, self.faults, self.events = [], [], []
        self._callbacks = (
            RUN(lambda packet: self.dispatches.append(DispatchPacket.from_buffer_copy(packet.contents))),
            TELL(lambda text: self.faults.append(text.decode())),
            SET_EVENT(lambda _, event: self.events.append(event)),
        )
        self.gpu = self.table.create()
        self.table.set_aperture(self.gpu, c.addressof(self.memory), MEMORY_BYTES)
        self.table.set_set_event(self.gpu, self._callbacks[2], None)
        self.library.virtual_gpu_attach(*self._callbacks[:2])
        self.table.allocated(self.gpu, DATA, 0x1000, VRAM)
        self.queue = None
        self.written = 0

    def open(self, kind: int) -> None:
        info = QueueInfo(RING, WRITE, READ, None, RING_BYTES, kind)
        self.queue = self.table.register_queue(self.gpu, c.byref(info))

    def close(self) -> None:
        if self.queue:
            self.table.destroy_queue(self.gpu, self.queue)
            self.queue = None
        self.library.virtual_gpu_attach(RUN(), TELL())

    def read(self, address: int, form: str = "q") -> int:
        (value,) = struct.unpack_from(f"<{form}", self.memory, address)
        return value

    def write(self, address: int, form: str, *values: int) -> None:
        struct.pack_into(f"<{form}", self.memory, address, *values)

    def signal(self, index: int, value: int, event: int = 0, mailbox: int = 0) -> int:
        """Writes an amd_signal_t; returns its address."""
        address = SIGNALS + 64 * index
        self.write(address, "qqQIIQQ", 1, value, mailbox, event, 0, 0, 0)
        return address

    def value(self, signal: int) -> int:
        return self.read(signal + 8)

    def send(self, packet: bytes) -> None:
        """Puts an AQL packet into the ring, its header last, and moves the write pointer."""
        assert len(packet) == 64
        where = RING + self.written * 64 % RING_BYTES
        self.memory[where + 2 : where + 64] = packet[2:]
        self.memory[where : where + 2] = packet[:2]
        self.written += 1
        self.write(WRITE, "Q", self.written)

    def command(self, *words: int) -> None:
        """Puts a command of the copy engine into the ring, which it may cross, and moves the write pointer."""
        for word in words:
            self.write(RING + self.written % RING_BYTES, "I", word)
            self.written += 4
        self.write(WRITE, "Q", self.written)

    def until(self, what: str, condition) -> None:
        """Waits until the GPU has done something; AssertionError names it where it has not within seconds."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"the virtual GPU has not {what} within {LIMIT_S} s; faults: {self.faults}"
            time.sleep(0.001)

    def drain(self) -> None:
        """Waits until everything in the ring was executed."""
        self.until("emptied its queue", lambda: self.read(READ, "Q") == self.written)


def dispatch(kernel: int, kernarg: int, grid: tuple[int, int, int], block: tuple[int, int, int], signal: int) -> bytes:
    return struct.pack("<HHHHHHIIIIIQQQQ", 2, 3, *block, 0, *grid, 64, 256, kernel, kernarg, 0, signal)


def barrier(kind: int, waited: list[int], signal: int) -> bytes:
    """Kind 3 waits for all of the signals, 5 for any."""
    return struct.pack("<HHIQQQQQQQ", kind, 0, 0, *waited, *[0] * (5 - len(waited)), 0, signal)


def barrier_value(waited: int, wanted: int, mask: int, condition: int, signal: int) -> bytes:
    """Conditions: 0 =, 1 !=, 2 <, 3 >=."""
    return struct.pack("<HBBIQqqIIQQQ", 0, 2, 0, 0, waited, wanted, mask, condition, 0, 0, 0, signal)


def pm4(jump: int, buffer: int, dwords: int, signal: int) -> bytes:
    """A vendor packet that has the front end run a buffer of commands."""
    head = struct.pack("<HBBIIII", 0, 1, 0, jump, buffer & 0xFFFFFFFF, buffer >> 32, dwords)
    return head.ljust(56, b"\0") + struct.pack("<Q", signal)


def halves(address: int) -> tuple[int, int]:
    return address & 0xFFFFFFFF, address >> 32
