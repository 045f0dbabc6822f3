"""The measurements that sharpen the model of time most, made on an AMD GPU and written to a file.

usage: python tools/measure_amd.py FILE [--dry gfx942]

`python -m mla_suite tune --calibrate FILE` reads the file. --dry goes through the same steps in the emulator, on small
problems and without a GPU: its numbers are modelled, the file says so, and nothing is measured.
docs/first_hour_on_amd.md says what each measurement replaces.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import CSRC, ArchSpec
from mla_suite.bench import timer
from mla_suite.bench.saving import write_whole
from mla_suite.build import compilers
from mla_suite.cli import emulated, writable
from mla_suite.emulator import Emulator, Memory, Schedule
from mla_suite.launch import hip
from mla_suite.ops.combine.samples import sample as combine_sample
from mla_suite.ops.decode.samples import decode_sample

SOURCE = Path(__file__).parent / "amd_clocks" / "clocks.hip"


class Emulated:
    """Modelled times of an emulated arch, on problems that take seconds."""

    dry = True
    iterations, footprints, stream_groups = 64, {"memory": 1 << 16}, (1, 2)
    sizes: ClassVar[dict[str, Any]] = dict(batch=1, keys=64, tokens=4, splits=8, lengths=(64, 128))

    def __init__(self, arch: ArchSpec, text: Path) -> None:
        self.arch, self.device, self.name = arch, torch.device("cpu"), f"emulated {arch.name}"
        self._machine, self._text = Emulator(arch.name), text.read_text()

    def call_us(self, call: Callable[[], object]) -> float:
        with mla_suite.emulate(self.arch.name):
            _, modelled = emulator.modelled(call)
        assert modelled is not None, f"{self.arch.name} has no kernel for a measurement"
        return modelled.us

    def kernel_us(self, name: str, groups: int, threads: int, params: bytes, memory: Sequence[torch.Tensor]) -> float:
        program = self._machine.load_text(self._text, name)
        buffers = [Memory.of(f"buffer {i}", tensor, "rw") for i, tensor in enumerate(memory)]
        report = self._machine.launch(program, (groups, 1, 1), threads, 0, params, buffers, Schedule(time=True))
        assert report.modelled is not None
        return report.modelled.us

    def clock_mhz(self) -> float:
        return 0.0


class Measured:
    """Times of the GPU that is here: the median of rounds by graph replay, and of events around a kernel's launches."""

    dry = False
    iterations, footprints = 4096, {"L2": 1 << 20, "Infinity Cache": 64 << 20, "memory": 2 << 30}
    stream_groups: Sequence[int] = (1, 2, 4, 16, 64, 256)
    sizes: ClassVar[dict[str, Any]] = dict(batch=128, keys=4096, tokens=256, splits=304, lengths=(1024, 16384))

    def __init__(self, arch: ArchSpec, text: Path) -> None:
        compiler, made = compilers.find_amd(archs=[arch.name]), text.with_suffix(".o")
        subprocess.run([*compiler.to_relocatable(arch.name), str(text), "-o", str(made)], check=True)
        subprocess.run([*compiler.to_object(), str(made), "-o", str(text.with_suffix(".hsaco"))], check=True)
        self.arch, self.device, self.name = arch, torch.device("cuda"), torch.cuda.get_device_name()
        self._library, self._module = hip.open_library(hip.find_library()), ctypes.c_void_p()
        self._checked("hipModuleLoadData", ctypes.byref(self._module), text.with_suffix(".hsaco").read_bytes())

    def _checked(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise SystemExit(f"{function} says hipError_t {code}")

    def call_us(self, call: Callable[[], object]) -> float:
        return timer.median(timer.Replay(lambda _: call(), [None]).rounds(timer.Effort(rounds=4)))

    def kernel_us(self, name: str, groups: int, threads: int, params: bytes, memory: Sequence[torch.Tensor]) -> float:
        function, found = ctypes.c_void_p(), []
        self._checked("hipModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        stream, packed = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), ctypes.c_char_p(params)
        for _ in range(8):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            shape = (groups, 1, 1, threads, 1, 1, 0)
            self._checked("hipModuleLaunchKernel", function, *shape, stream, ctypes.byref(packed), None)
            after.record()
            after.synchronize()
            found.append(1e3 * before.elapsed_time(after))
        return timer.median(found[1:])

    def clock_mhz(self) -> float:
        """What the driver reports of the shader clock; 0 where it reports none."""
        try:
            return float(torch.cuda.clock_rate())
        except (RuntimeError, ModuleNotFoundError):
            return 0.0


def measure(on: Emulated | Measured) -> dict[str, float]:
    """Microseconds (`us`), clocks at the arch's highest clock, and bytes per clock, by name."""
    sizes, found = on.sizes, dict[str, float]()

    def decode(batch: int, keys: int, splits: int = 0) -> Callable[[], object]:
        args, kwargs = decode_sample([keys] * batch, heads=128, num_splits=splits).make(on.device)
        return lambda: mla_suite.decode(*args, **kwargs)

    found["decode of 21 keys, us"] = on.call_us(decode(1, 21, 1))
    args, kwargs = combine_sample(sizes["tokens"], 16, sizes["splits"]).make(on.device)
    streamed = sum(tensor.nbytes for tensor in args if isinstance(tensor, torch.Tensor))
    found["combine, GB/s"] = streamed / on.call_us(lambda: mla_suite.combine(*args, **kwargs)) / 1e3
    found["decode of 128 heads, us"] = on.call_us(decode(sizes["batch"], sizes["keys"]))
    found["clock meanwhile, MHz"] = on.clock_mhz()
    short, long = sizes["lengths"]
    per_key = (on.call_us(decode(1, long, 1)) - on.call_us(decode(1, short, 1))) / (long - short)
    found["decode in one workgroup, clocks per key"] = per_key * on.arch.clock_mhz

    def clocks(name: str, threads: int = 64, memory: torch.Tensor | None = None, groups: int = 1) -> float:
        """Clocks that one more iteration takes."""
        source = torch.zeros(1024, dtype=torch.int32, device=on.device) if memory is None else memory
        out, times = torch.zeros(1, dtype=torch.int32, device=on.device), []
        for n in (on.iterations, 2 * on.iterations):
            params = source.data_ptr().to_bytes(8, "little") + out.data_ptr().to_bytes(8, "little")
            times.append(on.kernel_us(name, groups, threads, params + n.to_bytes(8, "little"), [source, out]))
        return (times[1] - times[0]) * on.arch.clock_mhz / on.iterations

    for level, size in on.footprints.items():
        found[f"load from {level} and a loop, clocks"] = clocks("chase", memory=ring(size, on))
    for groups in on.stream_groups:
        data = torch.zeros(groups * 2 * on.iterations * 4096, dtype=torch.int32, device=on.device)
        found[f"stream of {groups} workgroups, bytes per clock"] = 16384 * groups / clocks("stream", 256, data, groups)
    found["LDS read, bytes per clock"] = 16384 / clocks("lds_read", 256)
    found["load to LDS, bytes per clock"] = 4096 / clocks("lds_direct", 256)
    found["empty loop, clocks"] = clocks("branch")
    found["barrier of 4 waves and a loop, clocks"] = clocks("barrier", 256)
    found["scalar load and a loop, clocks"] = clocks("scalar_chase", memory=ring(on.footprints["memory"], on))
    return found


def ring(size: int, on: Emulated | Measured) -> torch.Tensor:
    """Memory of so many bytes in which each address leads to another line, far from it."""
    memory = torch.zeros(size // 8, dtype=torch.int64, device=on.device)
    order = torch.randperm(size // 256, generator=torch.Generator().manual_seed(1))
    following = memory.data_ptr() + 256 * order.roll(-1)
    memory[(32 * order).to(on.device)] = following.to(on.device)
    return memory


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", type=writable, help="where the numbers go, as JSON")
    parser.add_argument("--dry", metavar="ARCH", type=emulated, help="gfx942 or gfx950, emulated")
    given = parser.parse_args(argv)
    if not given.dry and not (torch.cuda.is_available() and torch.version.hip):
        parser.error("no AMD GPU that torch can use is here; --dry gfx942 goes through the steps without one")
    arch = given.dry or archs.get(torch.cuda.get_device_properties(0).gcnArchName.split(":")[0])
    name = arch.name
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "clocks.s")
        command = [*compilers.find_amd(archs=[name]).to_assembly(name), f"-I{CSRC}", "-S", str(SOURCE), "-o", str(text)]
        subprocess.run(command, check=True)
        on = Emulated(arch, text) if given.dry else Measured(arch, text)
        found = measure(on)
    record = {"arch": name, "device": on.name, "modelled": on.dry, "numbers": found}
    write_whole(given.file, json.dumps(record, indent=2) + "\n")
    for what, number in found.items():
        print(f"{what}: {number:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
