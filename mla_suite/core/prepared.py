"""What calls with equal metadata share, and how it is found again.

A call counts by types, dtypes, sizes, strides and devices of its tensors, by whether their addresses are multiples of
16, and by its options. Sizes and options that only bound a length count rounded up, as `Op.rounded` says: a server's
grow with every step. Nothing here holds a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate, chain
from operator import itemgetter, or_
from typing import Any
from weakref import WeakSet

import torch

from mla_suite.archs import ArchSpec
from mla_suite.core import dispatch, overlap

CLASSES = (torch.Tensor, torch.nn.Parameter)
LISTS = (list, tuple)
MAX_GUARDS = 4  # calls of one kind that take turns; each that is not the one costs the next 0.5 us
MAX_ADDRESSES = 64
_Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
# Bound C functions: a Python frame costs a tenth of a microsecond and more.
_grad_enabled = torch._C.is_grad_enabled
_emulated = dispatch.emulated.get
_data_ptr = torch.Tensor.data_ptr


Rounded = Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """The state that calls with the same metadata share."""

    allocate: Callable[[], tuple[torch.Tensor, ...]]
    launch: dispatch.Launch
    kinds: tuple[type, ...]  # types of the options: 1, 1.0 and True are one key and three kinds


@dataclass(slots=True, eq=False)
class _Guard:
    """A call as `KnownCalls.find` recognises it."""

    prepared: PreparedCall
    kinds: list[type]  # types of every argument: 1, 1.0 and True are equal and of three kinds
    options: tuple[Any, ...]
    present: Callable[[tuple[Any, ...]], tuple[torch.Tensor, ...]]  # picks the tensors that are not None
    same: Callable[..., bool]
    emulated: ArchSpec | None  # the arch that CPU tensors stand for; a GPU's follows from its device
    on_gpu: bool
    written: list[int]  # positions among the present tensors of those that the call writes
    sizes: list[int]  # bytes that the present tensors reach over, where any is written
    requires_grad: bool  # whether one of the present tensors does, as it may while gradients are not enabled
    admitted: set[tuple[int, ...]]  # addresses of calls that `admits` said yes to
    unrounded: tuple[Any, ...] | None = None  # options of the last call, where they alone round to `options`

    def admits(self, addresses: tuple[int, ...]) -> bool:
        """Whether tensors at these addresses are aligned, and none lies in one that the call writes."""
        if reduce(or_, addresses) & 15:
            return False
        if self.written and overlap.first_overlap(addresses, self.sizes, self.written):
            return False
        if len(self.admitted) >= MAX_ADDRESSES:
            self.admitted.clear()
        self.admitted.add(addresses)
        return True


_prepared: dict[tuple[Any, ...], PreparedCall] = {}
_all: WeakSet[KnownCalls] = WeakSet()


def prepared_call(key: tuple[Any, ...]) -> PreparedCall | None:
    """The prepared call of a key, which becomes the last to be dropped."""
    return dispatch.last_used(_prepared, key)


def add_prepared(key: tuple[Any, ...], prepared: PreparedCall) -> PreparedCall:
    dispatch.bounded(_prepared)[key] = prepared
    return prepared


def _forget() -> None:
    _prepared.clear()
    for known in _all:
        known.guards = ()


dispatch.on_clear(_forget)


class KnownCalls:
    """The prepared calls of one overload, or of one function that calls an operator.

    name     its name, which no other has
    lists    whether some of its tensors come in lists
    mutated  positions of the tensors that a call writes
    sized    positions of tensors [n] whose n counts as `rounded` says
    rounded  (tensors, options) -> the options that count, as `Op.rounded` says; there are no lists then
    """

    __slots__ = ("__weakref__", "guards", "lists", "mutated", "name", "rounded", "sized")

    def __init__(
        self,
        name: str,
        lists: bool = False,
        mutated: tuple[int, ...] = (),
        sized: tuple[int, ...] = (),
        rounded: Rounded | None = None,
    ) -> None:
        self.name, self.lists, self.mutated, self.sized, self.rounded = name, lists, mutated, sized, rounded
        self.guards: tuple[_Guard, ...] = ()
        _all.add(self)

    def find(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> PreparedCall | None:
        """The prepared call of one of the last arguments that `keep` was given, if these are like them.

        One call of C++ compares types, dtypes, devices, sizes, strides, dispatch keys (a negated or a zero tensor has
        others) and requires_grad. It does not ask whether gradients are enabled.
        """
        guards, unrounded = self.guards, None
        if not guards:
            return None
        if self.lists:
            tensors, options = _flat(tensors, options)
        kinds = [*map(type, tensors + options)]
        if self.rounded is not None:
            if self.sized and tensors[self.sized[0]] is not None:
                options = self.rounded(tensors, options)
                kinds += map(type, options[len(kinds) - len(tensors) :])
            elif guards[0].kinds == kinds and guards[0].unrounded == options:  # `rounded` takes 0.4 us more
                unrounded, options = options, guards[0].options
            else:
                unrounded, options = options, self.rounded(tensors, options)
        for guard in guards:
            if guard.kinds == kinds and guard.options == options:
                given = guard.present(tensors)
                if given[0].is_nested:  # torch's guards ask for its strides, and end the process
                    return None
                if guard.same(*given) and (guard.on_gpu or guard.emulated is _emulated()):
                    if guard.requires_grad and _grad_enabled():
                        return None
                    addresses = tuple(map(_data_ptr, given))
                    if addresses not in guard.admitted and not guard.admits(addresses):
                        return None
                    guard.unrounded = unrounded
                    if guard is not guards[0]:
                        self.guards = (guard, *[other for other in guards if other is not guard])
                    return guard.prepared
        return None

    def keep(self, tensors: tuple[Any, ...], options: tuple[Any, ...], prepared: PreparedCall) -> None:
        """Have `find` recognise calls like this one, unless an address is no multiple of 16 or an option may change.

        No tensor may require a gradient that is enabled.
        """
        if not fixed(options) or _Guards is None:
            return
        starts = [0, *accumulate(len(value) if value.__class__ in LISTS else 1 for value in tensors)]
        if self.rounded is not None:
            options = self.rounded(tensors, options)
        written, sized = ([starts[position] for position in some] for some in (self.mutated, self.sized))
        if self.lists:
            tensors, options = _flat(tensors, options)
        positions = [position for position, tensor in enumerate(tensors) if tensor is not None]
        given = [tensors[position] for position in positions]
        if any(tensor.data_ptr() & 15 for tensor in given) or len({*map(id, given)}) < len(given):
            return  # TensorGuards refuse one tensor in two places
        sizes: list[list[int | None]] = [list(tensor.shape) for tensor in given]
        for at, position in enumerate(positions):
            # Where a tensor [n] has another stride than 1, as it may while n is 1, its n counts.
            if position in sized and given[at].stride() == (1,):
                sizes[at] = [None]
        leading = positions == list(range(len(positions)))
        guard = _Guard(
            prepared,
            [*map(type, tensors + options)],
            tuple([list(value) if value.__class__ is list else value for value in options]),  # the caller's may change
            itemgetter(slice(len(positions))) if leading else itemgetter(*positions),
            _Guards(
                *given, dynamic_dims_sizes=sizes, dynamic_dims_strides=[list(tensor.stride()) for tensor in given]
            ).check,
            _emulated(),
            given[0].is_cuda,
            [at for at, position in enumerate(positions) if position in written],
            [overlap.reach(tensor) for tensor in given] if written else [],
            any(tensor.requires_grad for tensor in given),
            set(),
        )
        self.guards = (guard, *self.guards[: MAX_GUARDS - 1])

    def look_up(
        self, tensors: tuple[Any, ...], options: tuple[Any, ...], given: tuple[Any, ...] | None = None
    ) -> PreparedCall | None:
        """The prepared call of a key, if torch's dispatcher would pass these tensors on as they are.

        `given` are the options as the caller spells them, by which `find` shall know the next call.
        """
        if not plain(tensors):
            return None
        try:
            prepared = prepared_call(self.key(tensors, options))
        except TypeError:  # an option that no key can hold; the dispatcher refuses it in its own words
            return None
        if prepared is None or prepared.kinds != tuple(map(type, options)):
            return None
        self.keep(tensors, options if given is None else given, prepared)
        return prepared

    def key(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
        """Everything that checks, problems and backends may look at.

        tensors  every positional argument in the order of the schema, None where it is left out, then written outputs
        options  the values of every keyword argument, likewise

        A tensor counts by its sizes, strides, dtype, device and the alignment of its address, up to 16 bytes.
        """
        first = tensors[0] if tensors[0] is not None else dispatch.first_tensor(tensors)
        key: list[Any] = [self.name, dispatch.policy.get(), None if first.is_cuda else dispatch.arch_of(first)]
        key += options if self.rounded is None else self.rounded(tensors, options)
        for value in tensors:
            if value is None:
                key.append(None)
            elif value.__class__ in LISTS:
                key.append(tuple(map(_tensor_key, value)))
            else:
                key.append((value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15))
        for position in self.sized:
            tensor = tensors[position]
            if tensor.__class__ in CLASSES and tensor.is_contiguous():  # any stride, where n is 1
                at = len(key) - len(tensors) + position
                key[at] = tensor.dim(), tensor.dtype, tensor.device, tensor.data_ptr() & 15
        return tuple(key)


def _tensor_key(value: torch.Tensor | None) -> tuple[Any, ...] | None:
    return value if value is None else (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15)


def _flat(values: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The values without their lists and tuples, whose positions and lengths become one more option."""
    flat: list[Any] = []
    lengths = []
    for value in values:
        if value.__class__ in LISTS:
            flat += value
            lengths.append(len(value))
        else:
            flat.append(value)
            lengths.append(-1)
    return tuple(flat), (*options, tuple(lengths))


def fixed(options: tuple[Any, ...]) -> bool:
    """Whether every option keeps its value: one given as a tensor or an array may be written to before the next call.
    Lists are copied."""
    return not any(hasattr(value, "__setitem__") for value in options if value.__class__ is not list)


def hashable(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lists as tuples, which a key may hold."""
    return tuple([tuple(value) if isinstance(value, list) else value for value in options])


def plain(args: tuple[Any, ...]) -> bool:
    """Whether the dispatcher would pass these tensors and lists of tensors to an implementation as they are."""
    grad_enabled = _grad_enabled()
    lists = [value if value.__class__ in LISTS else (value,) for value in args]
    for tensor in chain.from_iterable(lists):
        if tensor is None:
            continue
        if tensor.__class__ not in CLASSES or tensor.is_neg() or tensor._is_zerotensor():
            return False
        if tensor.layout is not torch.strided or tensor.is_nested or (grad_enabled and tensor.requires_grad):
            return False
    return args[0].__class__ in CLASSES


def ceil_div(n: int, size: int) -> int:
    """The least number of parts of `size` that hold n."""
    return -(-n // size)


@lru_cache(maxsize=4096)
def rounded_up(n: int) -> int:
    """The least number of seven binary digits and zeros that is not below n: at most a 64th more.

    The limits of shipped tuned tables are such numbers, so that n and this are on the same side of each.
    """
    step = 1 << max(n.bit_length() - 7, 0)
    return ceil_div(n, step) * step
