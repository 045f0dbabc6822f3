"""A virtual MI300X or MI355X for AMD's own HIP runtime: the emulator behind ROCr's hook for a software GPU.

    gpu = VirtualGpu.start("gfx942")    # before the HIP runtime is opened
    ...                                 # hipModuleLoadData, hipModuleLaunchKernel, streams, graphs: AMD's code
    gpu.check()                         # raises what dispatches broke since the last time

ROCr allocates memory, writes packets into queues and waits for signals as on hardware; `csrc/emulator` reads the
packets, and each dispatch comes here. It is executed if the manifest holds that very kernel, with all of the emulator's
checks and counters.
"""

from __future__ import annotations

import atexit
import ctypes as c
import os
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mla_suite import archs
from mla_suite.build import manifest
from mla_suite.build.manifest import KernelEntry
from mla_suite.emulator import core
from mla_suite.emulator.assembly import AssemblyError
from mla_suite.emulator.machine import Emulator, Memory, Schedule
from mla_suite.emulator.program import Program
from mla_suite.emulator.report import Report, SanitizerError
from mla_suite.launch.driver import DriverError, LaunchError
from virtual_hip import topology
from virtual_hip.code_objects import ForeignKernel, KernelIndex

_VRAM, _GTT = 1, 2  # flags of the kernel driver: memory of the GPU, and of the host for the GPU

_ENVIRONMENT = {
    # Without interrupts two of ROCr's threads wait by spinning, and the host's does as well.
    "HSA_ENABLE_INTERRUPT": "1",
    # ROCr would hand out pieces of one allocation, and hipMalloc's bounds could not be known.
    "HSA_DISABLE_FRAGMENT_ALLOCATOR": "1",
    # HIP would copy up to 16 KiB by a kernel of its own, and the hook has no memory of the host's to pin.
    "GPU_FORCE_BLIT_COPY_SIZE": "0",
    "GPU_PINNED_MIN_XFER_SIZE": str(1 << 20),
}


_EVENT_ID = 24
"""Offset of the event's number in ROCr's amd_signal_t."""

_HSA_INFO_BREAK, _HSA_AGENT_INFO_DEVICE, _HSA_DEVICE_TYPE_GPU = 1, 17, 1
_UINT32_MAX = 0xFFFFFFFF
_SPARE_SLOTS = 64

_END_LIMIT_MS = 2000
"""How long the end of a program waits for queues that wait for the host."""


class DispatchPacket(c.Structure):
    """`Dispatch` of csrc/emulator/virtual_gpu.hpp: addresses are the GPU's, the grid counts threads."""

    _fields_ = [
        ("packet", c.c_uint64),
        ("kernel_object", c.c_uint64),
        ("kernarg", c.c_uint64),
        ("grid", c.c_uint32 * 3),
        ("block", c.c_uint32 * 3),
        ("lds_bytes", c.c_uint32),
        ("scratch_bytes", c.c_uint32),
    ]


class Allocation(c.Structure):
    """Whole pages that ROCr allocated."""

    _fields_ = [("address", c.c_uint64), ("bytes", c.c_uint64), ("flags", c.c_uint32), ("unused", c.c_uint32)]


class Expectation:
    """Dispatches with certain arguments: the `memories` they may touch, at the GPU's addresses, and how they are run.

    `reports` are theirs, findings included.
    """

    def __init__(self, memories: Sequence[Memory], schedule: Schedule) -> None:
        self.memories, self.schedule = memories, schedule
        self.reports: list[Report] = []


class VirtualGpuError(DriverError):
    """A dispatch that the virtual GPU refused, or a command that it does not model."""


_RUN = c.CFUNCTYPE(None, c.POINTER(DispatchPacket))
_TELL = c.CFUNCTYPE(None, c.c_char_p)


class VirtualGpu:
    """The one virtual GPU of this process.

    schedule    how dispatches are run that nobody expected; may be replaced at any time
    reports     the latest of those dispatches
    dispatches  how many kernels were executed
    """

    _current: VirtualGpu | None = None

    @classmethod
    def start(cls, arch: str) -> VirtualGpu:
        """Plugs a GPU of `arch` into this process, before its HIP runtime is opened.

        The same object comes back at every call. DriverError when HIP is open already, or another arch is asked for.
        """
        if cls._current is not None:
            if cls._current.arch.name != arch:
                raise DriverError(
                    f"this process has a virtual {cls._current.arch.name}; a virtual {arch} needs a process of its own"
                )
            return cls._current
        if "libhsa-runtime64" in Path("/proc/self/maps").read_text():
            raise DriverError("the HIP runtime is open already; start the virtual GPU before it")
        cls._current = cls(arch)
        return cls._current

    def __init__(self, arch: str) -> None:
        self.arch = archs.get(arch)
        self.schedule = Schedule()
        self.reports: deque[Report] = deque(maxlen=64)
        self.dispatches = 0
        self._faults: list[Exception] = []
        self._machine = Emulator(arch)
        entries = [entry for (name, _), entry in manifest.installed().kernels.items() if name == arch]
        self._index = KernelIndex(arch, entries)
        self._programs: dict[str, Program] = {}  # by the entry's id: its text is read and decoded once
        self._bounds: dict[int, int] = {}
        self._expected: dict[bytes, Expectation] = {}
        self._lock = threading.Lock()
        loaded = core.load()
        self._library = library = loaded.library
        for name, result, arguments in (
            ("virtual_gpu_attach", None, [_RUN, _TELL]),
            ("virtual_gpu_end", c.c_uint32, [c.c_uint32]),
            ("virtual_gpu_base", c.c_uint64, []),
            ("virtual_gpu_spare_event", None, [c.c_uint32]),
            ("virtual_gpu_spare_queue", None, []),
            ("virtual_gpu_allocations", c.c_uint32, [c.POINTER(Allocation), c.c_uint32]),
            ("virtual_gpu_sizes", c.c_uint32, [c.c_int]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        if [library.virtual_gpu_sizes(i) for i in (0, 1)] != [c.sizeof(DispatchPacket), c.sizeof(Allocation)]:
            raise DriverError(f"{loaded.path} was built for another version; run `python -m mla_suite build`")
        self._callbacks = _RUN(self._on_dispatch), _TELL(self._on_fault)  # ctypes does not keep them alive
        library.virtual_gpu_attach(*self._callbacks)
        self._folder = tempfile.TemporaryDirectory(prefix="mla_suite-topology-")
        os.environ.update(_ENVIRONMENT)
        os.environ["HSA_MODEL_TOPOLOGY"] = str(topology.write(self.arch, Path(self._folder.name)))
        os.environ["HSA_MODEL_LIB"] = str(loaded.path)
        atexit.register(self._stop)

    def _stop(self) -> None:
        """Executes nothing more before Python ends; a dispatch that runs is waited for."""
        skipped = self._library.virtual_gpu_end(_END_LIMIT_MS)
        if skipped:
            print(
                f"virtual GPU: the program ended with {skipped} launches queued, which were not executed; "
                "synchronize before the end to have them run",
                file=sys.stderr,
            )
        for error in self._faults:
            print(f"virtual GPU: never checked: {error}", file=sys.stderr)

    def reserve_event_and_queue(self) -> None:
        """Makes an event and a queue that are never destroyed; called once the HIP runtime has initialised the GPU.

        The event: the hook can lose a wake-up, and setting another event wakes everybody to look again.
        The queue: ROCr destroys the event that all queues share with the last of them, while a thread of its own may
        still be about to set it, which aborts the process; with this queue there is no last one.
        """
        runtime = c.CDLL("libhsa-runtime64.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)

        def call(function: str, *arguments: object) -> None:
            if (status := getattr(runtime, function)(*arguments)) not in (0, _HSA_INFO_BREAK):
                raise DriverError(f"ROCr refused what the virtual GPU needs: {function} answered {status}")

        signal = c.c_uint64()
        call("hsa_signal_create", c.c_int64(1), 0, None, c.byref(signal))
        self._library.virtual_gpu_spare_event(c.c_uint32.from_address(signal.value + _EVENT_ID).value)
        agent, kind, queue = c.c_uint64(), c.c_uint32(), c.c_void_p()

        def is_gpu(candidate: int, _: object) -> int:
            call("hsa_agent_get_info", c.c_uint64(candidate), _HSA_AGENT_INFO_DEVICE, c.byref(kind))
            if kind.value != _HSA_DEVICE_TYPE_GPU:
                return 0
            agent.value = candidate
            return _HSA_INFO_BREAK

        call("hsa_iterate_agents", c.CFUNCTYPE(c.c_int, c.c_uint64, c.c_void_p)(is_gpu), None)
        sizes = c.c_uint32(_UINT32_MAX), c.c_uint32(_UINT32_MAX)  # of private and group memory: not known in advance
        call("hsa_queue_create", agent, c.c_uint32(_SPARE_SLOTS), 0, None, None, *sizes, c.byref(queue))
        self._library.virtual_gpu_spare_queue()

    def add_allocation(self, address: int, size: int) -> None:
        """Tells the exact bytes of a hipMalloc; ROCr only tells whole pages."""
        with self._lock:
            self._bounds[address] = size

    def remove_allocation(self, address: int) -> None:
        with self._lock:
            self._bounds.pop(address, None)

    def expect(self, params: bytes, memories: Sequence[Memory], schedule: Schedule) -> Expectation:
        """Says what dispatches with these explicit arguments may touch, until `unexpect`; their findings do not raise.

        Without it a dispatch may touch all that was noted, and `check` raises its findings.
        """
        expectation = Expectation([memory._replace(shift=self.base) for memory in memories], schedule)
        with self._lock:
            self._expected[params] = expectation
        return expectation

    def unexpect(self, params: bytes) -> None:
        with self._lock:
            self._expected.pop(params, None)

    def hip_memories(self) -> list[Memory]:
        """The memory of hipMalloc that is known to the byte."""
        with self._lock:
            bounds = sorted(self._bounds.items())
        return [
            Memory(f"hipMalloc {address:#x}", address, 1, (size,), (1,), "rw", self.base) for address, size in bounds
        ]

    @property
    def base(self) -> int:
        """Host address of GPU address 0; 0 until the HIP runtime has initialised the GPU."""
        return int(self._library.virtual_gpu_base())

    def allocations(self) -> list[tuple[int, int, int]]:
        """(address, bytes, flags) of everything that ROCr has allocated."""
        count = self._library.virtual_gpu_allocations(None, 0)
        table = (Allocation * (count + 64))()
        count = min(self._library.virtual_gpu_allocations(table, len(table)), len(table))
        return [(item.address, item.bytes, item.flags) for item in table[:count]]

    def read(self, address: int, size: int) -> bytes | None:
        """Bytes of GPU memory, or None where they lie in no allocation."""
        for start, held, flags in self.allocations():
            if flags & (_VRAM | _GTT) and start <= address and address + size <= start + held:
                return c.string_at(self.base + address, size)
        return None

    def check(self) -> None:
        """Raises the first error since the last call: the driver's, or a SanitizerError with findings."""
        with self._lock:
            faults, self._faults = self._faults, []
        if faults:
            raise faults[0]

    def _on_fault(self, text: bytes) -> None:
        with self._lock:
            self._faults.append(VirtualGpuError(text.decode(errors="replace")))

    def _on_dispatch(self, packet: c._Pointer[DispatchPacket]) -> None:
        """Called on a queue's thread. What is raised here can reach nobody, so `check` raises it."""
        try:
            report, expected = self._run(packet.contents)
            self.dispatches += 1
            if expected is not None:
                expected.reports.append(report)
                return
            self.reports.append(report)
            if not report.findings:
                return
            raise SanitizerError(report)
        except (LaunchError, DriverError, AssemblyError) as error:
            problem: Exception = error
        except ForeignKernel as error:
            problem = VirtualGpuError(str(error))
        except Exception as error:  # a defect of this module must not look like a kernel that ran
            problem = VirtualGpuError(f"a dispatch could not be executed: {type(error).__name__}: {error}")
        with self._lock:
            self._faults.append(problem)

    def _run(self, packet: DispatchPacket) -> tuple[Report, Expectation | None]:
        entry = self._index.find(packet.kernel_object, self.read)
        program = self._programs.get(entry.id)
        if program is None:
            program = self._programs[entry.id] = self._machine.load_text(entry.read_text(), entry.symbol)
        descriptor = program.kernel.descriptor
        grid, block = _workgroups(entry, packet)
        scratch = descriptor.get("private_segment_fixed_size", 0)
        if packet.scratch_bytes != scratch:
            raise LaunchError(f"{entry.id}: the packet has {packet.scratch_bytes} bytes of scratch, not {scratch}")
        if not entry.lds <= packet.lds_bytes <= entry.lds + entry.dynamic_lds:
            raise LaunchError(
                f"{entry.id}: the packet has {packet.lds_bytes} bytes of LDS; the kernel takes {entry.lds}, and up to "
                f"{entry.dynamic_lds} more where a launch asks for them"
            )
        size = max(descriptor.get("kernarg_size", 0), entry.params_size)
        held = self.read(packet.kernarg, size)
        if held is None:
            raise LaunchError(f"{entry.id}: the {size} bytes of kernel arguments lie outside GPU memory")
        arguments = np.frombuffer(held, np.uint8).copy()
        own = [
            Memory("kernel arguments", packet.kernarg, 1, (size,), (1,), "r", self.base),
            Memory("dispatch packet", packet.packet, 1, (64,), (1,), "r", self.base),
        ]
        where = packet.kernarg, packet.packet
        with self._lock:
            expected = self._expected.get(held[: entry.params_size])
        memories = expected.memories if expected else self.hip_memories()
        how = expected.schedule if expected else self.schedule
        report = self._machine.execute(program, grid, block, packet.lds_bytes, arguments, where, [*memories, *own], how)
        return report, expected


def _workgroups(entry: KernelEntry, packet: DispatchPacket) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Workgroups and threads of each along the axes. LaunchError for a block that the kernel was not compiled for."""
    block = packet.block[0], packet.block[1], packet.block[2]
    if block != (entry.threads, 1, 1):
        raise LaunchError(f"{entry.id}: workgroups of {block} threads; it was compiled for {entry.threads}")
    grid = packet.grid[0] // block[0], packet.grid[1], packet.grid[2]
    if grid[0] * block[0] != packet.grid[0]:
        raise LaunchError(f"{entry.id}: {packet.grid[0]} threads along x are no whole number of workgroups")
    return grid, block
