"""A launch as data: which kernel runs, how large, with which numbers, and where each of its pointers leads.

An arch answers a call with a `CallSpec`, from metadata alone: it holds no tensor and no address, so records of equal
calls are equal, and `run.prepare` makes a launch of them. A name among numbers, pointers and maps is a field of the
parameter header `csrc/common/params/<params>.hpp`; together they are all of its fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from mla_suite.build.params import load


class Input(NamedTuple):
    """The address of an argument of the operator.

    position  among its tensors, in the order of the schema
    item      which tensor of an argument that is a list
    first     element of the tensor where the kernel's part begins, and `length`, how many it may touch: 0 for all
    """

    position: int
    item: int = -1
    first: int = 0
    length: int = 0


class Output(NamedTuple):
    """The address of an output, or of the temporary that stands for it."""

    position: int


class Scratch(NamedTuple):
    """The address of fp32 memory that lasts for the call."""

    name: str


Slot = Input | Output | Scratch | None
"""Where a pointer leads; None is a null pointer."""


class TensorMap(NamedTuple):
    """A tensor map of the copy engine; the members beside the address are arguments of `tensor_map.swizzled`."""

    address: Slot
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class LaunchSpec(NamedTuple):
    """One launch.

    kernel    id of the instance, as in the manifest
    grid      workgroups along x, y and z
    threads   of a workgroup
    smem      bytes of dynamic shared memory of a workgroup
    overlap   the kernel may begin before the one ahead of it on the stream ends; it waits itself
    params    the parameter header
    numbers   its fields that are no addresses
    pointers  its pointers. A kernel reads what a pointer to const leads to and writes the others
    maps      its tensor maps; None is one that the kernel does not use
    fills     the pointers to memory of which the kernel writes every element
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    smem: int
    overlap: bool
    params: str
    numbers: Mapping[str, int | float]
    pointers: Mapping[str, Slot]
    maps: Mapping[str, TensorMap | None] = {}
    fills: tuple[str, ...] = ()


class Copy(NamedTuple):
    """An argument that the kernels take as a contiguous copy, of the negated values if `negated`, or in a `dtype`.

    beside  another argument, whose rows go on where those of the first end
    """

    of: Input
    negated: bool = False
    dtype: torch.dtype | None = None
    beside: Input | None = None


class Temporary(NamedTuple):
    """An output that the kernels write contiguously elsewhere, from where it is copied.

    plus_inf  -inf, which the kernels leave where a row has no keys, becomes +inf
    """

    of: Output
    plus_inf: bool = False


class CallSpec(NamedTuple):
    """All that a call does on the device: copies of arguments, launches one after another, copies of temporaries.

    scratch  name -> shape
    notes    sentences about the choice, for `explain`
    """

    launches: tuple[LaunchSpec, ...] = ()
    scratch: Mapping[str, tuple[int, ...]] = {}
    copies: tuple[Copy, ...] = ()
    temporaries: tuple[Temporary, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self, tensors: Sequence[str], outputs: Sequence[str]) -> list[str]:
        """The record as a table: each parameter, its value, and what its header says of it.

        Zeros and null pointers are left out. `tensors` and `outputs` are the names of the operator's.
        """

        def text(slot: object) -> str:
            match slot:
                case Input(position, item, first, length):
                    part = f", {length} elements from element {first} on" if first or length else ""
                    return tensors[position] + (f"[{item}]" if item >= 0 else "") + part
                case Output(position):
                    return outputs[position] if outputs else f"result {position}"
                case Scratch(name):
                    return f"scratch {name}"
                case TensorMap(address, dtype, sizes, strides, box):
                    elements = f"{dtype} {sizes}, innermost first, {strides} bytes apart, in boxes of {box}"
                    return f"map of {text(address)}: {elements}"
            return str(slot)

        lines = [
            f"  scratch {name}: {' x '.join(map(str, shape))} fp32, {prod(shape) / 2**18:.2f} MiB"
            for name, shape in self.scratch.items()
        ]
        lines += [
            f"  first copied: {text(copy.of)}{f' with {text(copy.beside)}' if copy.beside else ''}"
            f"{', negated' * copy.negated}{f', as {copy.dtype}' if copy.dtype else ''}"
            for copy in self.copies
        ]
        for launch in self.launches:
            size = f"grid {launch.grid}, {launch.threads} threads, {launch.smem} bytes of dynamic shared memory"
            overlap = ", begins before the launch ahead of it ends where a GPU can" if launch.overlap else ""
            struct, values = load(launch.params), {**launch.numbers, **launch.pointers}
            lines += [f"  {launch.kernel}: {size}{overlap}", f"    {struct.header}, without what is 0 or null:"]
            lines += [f"    {name:24} {text(value)}" for name, value in launch.maps.items() if value is not None]
            for field in struct.fields:
                if (value := values.get(field.name)) not in (0, None):
                    meaning = field.meaning and f"// {field.meaning}"
                    lines.append(f"    {field.name:24} {text(value):<20} {meaning}".rstrip())
        return lines + [f"  copied back: {text(temporary.of)}" for temporary in self.temporaries]


def inputs(record: type) -> dict[str, Input]:
    """The slots of an operator's tensors by name, from its record of arguments."""
    return {name: Input(position) for position, name in enumerate(record.__match_args__)}  # type: ignore[attr-defined]  # a dataclass


def present(args: object, slots: Mapping[str, Input]) -> dict[str, Slot]:
    """The slots, None for tensors that a call leaves out."""
    return {name: None if getattr(args, name) is None else slot for name, slot in slots.items()}
