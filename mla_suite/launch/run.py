"""Runs the records of `launch.spec`: packs parameters, takes scratch, makes copies, launches and copies back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate, chain
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from mla_suite.build.params import load, struct_format
from mla_suite.core.dispatch import Launch, bounded, writable
from mla_suite.launch import launcher, tensor_map
from mla_suite.launch.driver import Buffer, Driver, DriverError, LaunchError
from mla_suite.launch.scratch import take
from mla_suite.launch.spec import CallSpec, Input, LaunchSpec, Output, Scratch, TensorMap

_data_ptr = torch.Tensor.data_ptr
_pack_map = struct.Struct(f"<{tensor_map.WORDS}Q").pack


def prepare(op: str, call: CallSpec, outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> Launch:
    """The launch of calls of `op` with the metadata of these outputs and arguments, none of which it holds.

    It finds drivers and loads kernels. LaunchError, now or when it runs, names operator, kernel, arch, shapes and the
    driver's explanation; ValueError says that a size exceeds its field.
    """
    if not call.launches:
        return lambda outputs, tensors: None
    packings = [_packing(launch) for launch in call.launches]
    places = _places(packings, call, outputs, tensors)
    pick_tensors, constants, offsets, scratch_at, maps, lists, at_of, _ = places
    scratch_values = sum(map(prod, call.scratch.values()))
    steps: list[tuple[Any, ...]] = []
    before: Any = None
    for launch, packing in zip(call.launches, packings, strict=True):
        driver, kernel = launcher.find(op, launch.kernel, tensors[0])
        start = driver.bind(kernel, launch.grid, launch.threads, launch.smem, launch.overlap)
        # Launches that take the same parameters, as those of plan do, have them packed once.
        pack = None if packing == before else packing[0].pack
        steps.append((len(steps), start, pack, _picker([at_of[source] for source in packing[1]], len(at_of))))
        before = packing
    checked = driver.checks_buffers
    replaced = _replacement(call, places) if call.copies or call.temporaries else None
    inputs_alone = not (lists or replaced)
    addresses_alone = not (offsets or maps or scratch_at)

    def run(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
        values: Any = tensors + outputs
        if not inputs_alone:
            values = [*values]
            for position in lists:
                values += values[position]
            if replaced is not None:
                replaced(values)
        at: list[Any] = [*map(_data_ptr, pick_tensors(values)), *constants]
        scratch = None
        if not addresses_alone:
            for position, distance in offsets:
                at.append(at[position] + distance)
            if scratch_values:
                scratch = take(values[0].device, scratch_values)
                first = scratch.data_ptr()
                for distance in scratch_at:
                    at.append(first + distance)
            for position, known, contents in maps:
                at.append(known.get(at[position]) or _new_map(known, at[position], contents))
        try:
            for step, start, pack, pick in steps:
                if pack is not None:
                    params = pack(*at) if pick is None else pack(*pick(at))
                start(params, _buffers(call, step, places.position_of, values, scratch) if checked else ())
        except (DriverError, LaunchError) as error:
            if type(error) not in (DriverError, LaunchError):
                raise  # the emulator's findings, which carry their own account
            buffers = _buffers(call, step, places.position_of, values, scratch)
            raise _explained(op, call.launches[step], buffers, driver, error) from error
        if replaced is not None:
            with writable(outputs):
                _copy_back(call, values[len(tensors) :], outputs)

    return run


def _new_map(known: dict[int, bytes], address: int, contents: tuple[Any, ...]) -> bytes:
    """The tensor map at an address, kept in `known`: a key of all it depends on would take 0.4 us more to look up."""
    made = bounded(known)[address] = _pack_map(*tensor_map.swizzled(address, *contents))
    return made


# Parameters


class _Layout(NamedTuple):
    """The order in which a parameter struct is packed.

    pack     packs one value for each part
    parts    names of pointers and maps; where numbers lie between two of them, their own packer and their names
    numbers  how many there are
    """

    pack: struct.Struct
    parts: tuple[Any, ...]
    numbers: int


@lru_cache(maxsize=256)
def _layout(params: str, pointers: tuple[tuple[str, bool], ...], maps: tuple[tuple[str, bool], ...]) -> _Layout:
    """How launches with these pointers and maps are packed; a pair says whether one is not null, as padding is."""
    mirror = load(params)
    used = dict(pointers) | {f"{name}_{word}": some for name, some in maps for word in range(tensor_map.WORDS)}
    names = {f"{name}_0": name for name, _ in maps}
    sizes = dict.fromkeys(names, 8 * tensor_map.WORDS)
    unknown = sorted(set(used) - {field.name for field in mirror.fields})
    if unknown:
        raise TypeError(f"{mirror.name}: unknown fields {unknown}")
    groups: list[list[Any]] = []  # a pointer, a map or all numbers up to the next one
    for field in mirror.fields:
        if field.name not in used and groups and groups[-1][-1].name not in used:
            groups[-1].append(field)
        elif used.get(field.name, True) and (field.is_pointer or field.name in names or field.name not in used):
            groups.append([field])
    text, at, parts, numbers = "<", 0, list[Any](), 0
    for group in groups:
        first, last = group[0], group[-1]
        size = sizes.get(first.name, last.offset + last.size - first.offset)
        text += f"{first.offset - at}x" + (f"{size}s" if size != 8 or first.name not in used else "Q")
        at = first.offset + size
        if first.name in used:
            parts.append(names.get(first.name, first.name))
        else:
            packer = struct.Struct(struct_format(group, first.offset, at))
            parts.append((packer, tuple([field.name for field in group])))
            numbers += len(group)
    return _Layout(struct.Struct(f"{text}{mirror.size - at}x"), tuple(parts), numbers)


def _packing(launch: LaunchSpec) -> tuple[struct.Struct, tuple[Any, ...]]:
    """(the packer of a launch, what it packs: bytes of numbers, slots and tensor maps)."""
    pointers, maps, numbers = launch.pointers, launch.maps, launch.numbers
    leads = tuple([(name, slot is not None) for name, slot in pointers.items()])
    layout = _layout(launch.params, leads, tuple([(name, one is not None) for name, one in maps.items()]))
    sources: list[Any] = []
    try:
        for part in layout.parts:
            if part.__class__ is str:
                sources.append(pointers[part] if part in pointers else maps[part])
            else:
                sources.append(part[0].pack(*map(numbers.__getitem__, part[1])))
    except KeyError as error:
        raise TypeError(f"{launch.params}: {launch.kernel} is given no {error}") from None
    except struct.error as error:
        why = f"a size of this call exceeds 32 bits ({error}); ask for fewer splits"
        raise ValueError(f"{launch.params}: {why}") from None
    if layout.numbers != len(numbers):
        known = chain.from_iterable([part[1] for part in layout.parts if part.__class__ is tuple])
        raise TypeError(f"{launch.params}: unknown fields {sorted(set(numbers) - set(known))}")
    return layout.pack, tuple(sources)


# Addresses


class _Places(NamedTuple):
    """Where a call finds what its launches take. They pick from one list: addresses of tensors, bytes of numbers,
    addresses with an offset, scratch, maps.

    pick_tensors  picks from the arguments and outputs of a call, behind which lie the tensors of `lists`
    constants     the bytes
    offsets       position of an address, and bytes from there
    scratch       bytes from the beginning of scratch
    maps          position of an address, the maps made by address, and what else `tensor_map.swizzled` takes
    lists         positions of arguments that are lists
    at            source -> its position in the list
    position_of   slot of a tensor -> its position among arguments and outputs
    """

    pick_tensors: Callable[[Any], Any]
    constants: list[bytes]
    offsets: list[tuple[int, int]]
    scratch: list[int]
    maps: list[tuple[int, dict[int, bytes], tuple[Any, ...]]]
    lists: list[int]
    at: dict[Any, int]
    position_of: dict[Any, int]


def _places(
    packings: list[tuple[struct.Struct, tuple[Any, ...]]],
    call: CallSpec,
    outputs: tuple[torch.Tensor, ...],
    tensors: tuple[Any, ...],
) -> _Places:
    kinds: dict[type, list[Any]] = {bytes: [], Input: [], Output: [], Scratch: [], TensorMap: []}
    for source in dict.fromkeys(chain.from_iterable([sources for _, sources in packings])):
        kinds[source.__class__].append(source)
    parts = {slot: Input(slot.position, slot.item) for slot in kinds[Input] if slot.first or slot.length}
    wanted = [*kinds[Input], *kinds[Output], *[one.address for one in kinds[TensorMap]], *parts.values()]
    copied = [slot for copy in call.copies for slot in (copy.of, copy.beside) if slot is not None]
    named = [*wanted, *copied, *[temporary.of for temporary in call.temporaries]]
    lists = sorted({slot.position for slot in named if slot.__class__ is Input and slot.item >= 0})
    lengths = [len(tensors[position]) for position in lists]
    begins = dict(zip(lists, accumulate(lengths, initial=len(tensors) + len(outputs)), strict=False))
    index = {}
    for slot in named:
        if slot.__class__ is Output:
            index[slot] = len(tensors) + slot.position
        else:
            index[slot] = slot.position if slot.item < 0 else begins[slot.position] + slot.item
    whole = list(dict.fromkeys([slot for slot in wanted if slot not in parts]))
    at = {source: position for position, source in enumerate([*whole, *kinds[bytes], *parts])}
    values, offsets = (*tensors, *outputs, *chain.from_iterable([tensors[position] for position in lists])), []
    for slot, base in parts.items():
        offsets.append((at[base], slot.first * values[index[slot]].element_size()))
    sizes = list(accumulate(map(prod, call.scratch.values()), initial=0))
    distances = {Scratch(name): 4 * values for name, values in zip(call.scratch, sizes, strict=False)}
    maps: list[Any] = [(at[one.address], {}, one[1:]) for one in kinds[TensorMap]]
    for source in (*kinds[Scratch], *kinds[TensorMap]):
        at[source] = len(at)
    scratch = [distances[slot] for slot in kinds[Scratch]]
    pick_tensors = _picker([index[slot] for slot in whole], 0)
    assert pick_tensors is not None
    return _Places(pick_tensors, kinds[bytes], offsets, scratch, maps, lists, at, index)


def _picker(positions: list[int], length: int) -> Callable[[Any], Any] | None:
    """A function that picks these positions of a sequence, as one slice where they lie side by side; None where they
    are all of its length in order."""
    first, last = positions[0], positions[-1]
    if positions == list(range(length)):
        return None
    if positions == list(range(first, last + 1)):
        return itemgetter(slice(first, last + 1))
    return itemgetter(*positions)


# Copies


def _replacement(call: CallSpec, places: _Places) -> Callable[[list[Any]], None]:
    """A function that puts copies and temporaries in the places of arguments and outputs."""
    at = places.position_of
    copies = [(at[copy.of], copy.beside and at[copy.beside], copy.negated, copy.dtype) for copy in call.copies]
    temporaries = [places.position_of[temporary.of] for temporary in call.temporaries]

    def replace(values: list[Any]) -> None:
        for position, beside, negated, dtype in copies:
            own = tensor = values[position]
            if beside is not None:
                tensor = torch.cat((tensor, values[beside]), dim=-1)
            if negated:
                tensor = _negated(tensor)
            tensor = tensor.to(dtype or tensor.dtype).contiguous()
            values[position] = tensor.clone() if tensor is own else tensor
        for position in temporaries:
            values[position] = torch.empty_like(values[position], memory_format=torch.contiguous_format)

    return replace


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    """torch negates no float8."""
    return -tensor if tensor.element_size() > 1 else (-tensor.float()).to(tensor.dtype)


def _copy_back(call: CallSpec, written: list[torch.Tensor], outputs: tuple[torch.Tensor, ...]) -> None:
    """Copy what kernels have written to temporaries into the caller's outputs."""
    for temporary in call.temporaries:
        position = temporary.of.position
        if temporary.plus_inf:
            torch.nan_to_num(written[position], torch.nan, torch.inf, torch.inf, out=outputs[position])
        else:
            outputs[position].copy_(written[position])


# What a launch touches


def _buffers(
    call: CallSpec, step: int, index: dict[Any, int], values: Any, scratch: torch.Tensor | None
) -> list[Buffer]:
    """The tensors that a launch touches, by the parameter header: it reads what a pointer to const leads to.

    What it writes starts uninitialised, unless it is an argument or a launch before has written it.
    """
    launch = call.launches[step]
    written: set[Any] = set()
    for earlier in call.launches[:step]:
        written.update([slot for _, slot, const in _pointers(earlier) if not const])
    buffers = []
    for name, slot, const in _pointers(launch):
        kept = slot.__class__ is Input or slot in written
        access = "r" if const else "all" if name in launch.fills else "rw" if kept else "w"
        buffers.append(Buffer(name, _tensor(slot, call, index, values, scratch), access))
    named = set(launch.pointers.values())
    for name, mapped in launch.maps.items():
        if mapped is not None and mapped.address not in named:
            tensor = _tensor(mapped.address, call, index, values, scratch)
            buffers.append(Buffer(name.removesuffix("_map"), tensor, "r"))
    return buffers


def _pointers(launch: LaunchSpec) -> Iterator[tuple[str, Any, bool]]:
    """(name, slot, whether it leads to const) of each pointer that is not null."""
    for field in load(launch.params).fields:
        slot = launch.pointers.get(field.name)
        if slot is not None:
            yield field.name, slot, field.ctype.startswith("const ")


def _tensor(
    slot: Any, call: CallSpec, index: dict[Any, int], values: Any, scratch: torch.Tensor | None
) -> torch.Tensor:
    """The tensor that a slot leads to."""
    if slot.__class__ is not Scratch:
        tensor: torch.Tensor = values[index[slot]]
        part = slot.__class__ is Input and (slot.first or slot.length)
        return tensor[slot.first :][: slot.length or None] if part else tensor
    assert scratch is not None, "scratch is taken where a slot names it"
    begin = 0
    for name, shape in call.scratch.items():
        if name == slot.name:
            break
        begin += prod(shape)
    return scratch[begin : begin + prod(shape)].view(shape)


def _explained(op: str, launch: LaunchSpec, buffers: list[Buffer], driver: Driver, error: RuntimeError) -> LaunchError:
    shapes = ", ".join([f"{buffer.name} {tuple(buffer.tensor.shape)}" for buffer in buffers])
    return LaunchError(
        f"{op}: kernel {launch.kernel} on {driver.arch.name}, grid {launch.grid} x {launch.threads} threads, "
        f"{launch.smem} bytes of dynamic LDS, shapes: {shapes}: {error}"
    )
