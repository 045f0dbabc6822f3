"""Kernels of csrc/sm_90 compiled for a CPU, and broken ones, whose tests must fail.

All instructions of the sources lie in csrc/sm_90/ptx. tests/kernels/cuda_on_host has a folder of that name, which the
compiler finds first: its headers say what each instruction does. Threads are fibers in an order that changes, copies
arrive late, and a wgmma reads its operands only when a wait ends it. What a GPU adds, such as descriptors as hardware
reads them, visibility of memory and time, is not seen.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from planted import each_of, plant

from mla_suite.archs import CSRC
from mla_suite.build import params
from mla_suite.launch.spec import LaunchSpec

HOST = Path(__file__).parent / "cuda_on_host"
Fault: TypeAlias = tuple[str, str, str]
"""A header in a kernel's folder, what a fault breaks there, and what then stands in its place."""


def without(header: str, removed: str, *, before: str = "", behind: str = "") -> Fault:
    """A header without some text, which is found by what is before and behind it."""
    return header, before + removed + behind, before + behind


def compiled(source: str, to: Path, constants: Mapping[str, object], *first: Path) -> Path:
    """The program `source` of cuda_on_host with these constants; headers in the folders `first` go before all others.

    Skips the test where there is no g++.
    """
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    options = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-w", "-include", str(HOST / "cuda.hpp")]
    folders = [f"-I{folder}" for folder in (*first, HOST, CSRC)]
    defines = [f"-D{name}={value}" for name, value in constants.items()]
    command = ["g++", *options, *folders, *defines, str(HOST / source), "-o", str(to)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return to


def packed(struct: str, launch: LaunchSpec, **changed: int) -> bytes:
    """The parameters of a launch whose addresses the program sets, with some changed."""
    fields = params.load(struct)
    addresses = {field.name: 0 for field in fields.fields if field.is_pointer}
    return fields.pack(**addresses, **{**launch.numbers, **changed})


def with_a_fault(folder: Path, header: str, right: str, broken: str) -> Path:
    """`folder` with a copy of one header of csrc, broken in one place, for `compiled` to find first."""
    own = folder / header
    own.parent.mkdir(parents=True)
    shutil.copy(CSRC / header, own)
    plant(own, right, broken)
    return folder


def ran(program: Path, problem: str) -> subprocess.CompletedProcess[str]:
    """What a program says of a problem, whose words are its arguments."""
    return subprocess.run([str(program), *problem.split()], capture_output=True, text=True, timeout=200)


def check(program: Path, problem: str) -> None:
    """Asserts that a program finds its kernel's results right."""
    done = ran(program, problem)
    assert done.returncode == 0, f"{problem}: {done.stdout}{done.stderr}"


def written(
    program: Path, words: Sequence[object], folder: Path, given: Mapping[str, bytes | torch.Tensor | None], result: str
) -> torch.Tensor:
    """Runs a program with these words and files of bytes in `folder`, "-" for None; the bytes of one of them then."""
    for name, content in given.items():
        if isinstance(content, torch.Tensor):
            content = bytes(content.contiguous().view(-1).view(torch.uint8).tolist())
        if content is not None:
            (folder / name).write_bytes(content)
    files = ["-" if content is None else str(folder / name) for name, content in given.items()]
    command = [str(program), *map(str, words), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.tensor(list((folder / result).read_bytes()), dtype=torch.uint8)


class HostKernel(NamedTuple):
    """A kernel whose headers lie in `folder` of csrc, in the program `source` of cuda_on_host."""

    source: str
    folder: str

    def compiled(self, to: Path, constants: Mapping[str, object], *first: Path) -> Path:
        """The program of an instance, in the folder `to`; `first` as `compiled` takes them."""
        return compiled(self.source, to / Path(self.source).stem, constants, *first)

    def check(self, to: Path, constants: Mapping[str, object], problems: Iterable[str]) -> None:
        """Asserts that an instance's results are right."""
        program = self.compiled(to, constants)
        for problem in problems:
            check(program, problem)

    def assert_found(self, to: Path, constants: Mapping[str, object], fault: Fault, problems: Iterable[str]) -> None:
        """Asserts that with a fault some problem's results are wrong."""
        header, right, broken = fault
        own = with_a_fault(to / "csrc", f"{self.folder}/{header}", right, broken)
        program = self.compiled(to, constants, own)
        assert any(ran(program, problem).returncode for problem in problems), f"{fault} is not seen in {problems}"

    def each_of(self, faults: Mapping[str, Fault], *in_default: str) -> pytest.MarkDecorator:
        """Parametrizes `name` by the names of faults, as planted.py does."""
        return each_of(faults, *in_default, place=lambda header, right, _: (f"{self.folder}/{header}", right))


def merged(
    program: Path, blocks: int, params: bytes, arrays: Sequence[torch.Tensor], seed: int
) -> subprocess.CompletedProcess[str]:
    """The end of a program of cuda_on_host/combine, which writes the last two arrays."""
    words = [array.contiguous().view(-1).view(torch.int32).numpy() for array in arrays]
    sizes = np.array([blocks, len(params) // 4, *(array.size for array in words)], np.int32)
    problem, results = program.parent / "problem", program.parent / "results"
    problem.write_bytes(b"".join([sizes.tobytes(), params, *(array.tobytes() for array in words)]))
    command = [str(program), str(problem), str(results), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode == 0:
        found = torch.from_numpy(np.fromfile(results, np.float32)).split([array.numel() for array in arrays[-2:]])
        for array, values in zip(arrays[-2:], found, strict=True):
            array.copy_(values.view(array.shape))
    return done
