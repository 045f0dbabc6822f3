"""A call that is like the last one of its kind, recognised by torch's own guards.

A key made of metadata costs a microsecond and more, and a model calls an operator once per layer with the same
metadata. So of the last call those guards are kept that torch.compile puts before compiled code: one call of C++
compares types, dtypes, devices, sizes, strides and dispatch keys (a negated or a zero tensor has others), and no tensor
is held. They are torch's own and not public: where they are missing, or say no, the key decides.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from mla_suite.core import dispatch
from mla_suite.core.arch import Arch
from mla_suite.core.dispatch import Known

_Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)


class _Call(NamedTuple):
    known: Known
    lists: bool  # whether there are any, which are then flattened
    kinds: tuple[type, ...]  # of every argument: 1, 1.0 and True are equal and of three kinds
    options: tuple[Any, ...]
    present: Callable[[tuple[Any, ...]], tuple[torch.Tensor, ...]]  # the tensors that are not None
    same: Callable[..., bool]
    on_gpu: bool
    arch: Arch | None  # that CPU tensors stand for; a GPU's follows from its device


_last: dict[str, _Call] = {}
dispatch.on_forget(_last.clear)


def find(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Known | None:
    """What `dispatch.known` has of this call, if it is like the last one that `keep` was told of under this name."""
    last = _last.get(name)
    if last is None:
        return None
    if last.lists:
        tensors, options = _flat(tensors, options)
    if last.kinds != tuple(map(type, tensors + options)) or last.options != options:
        return None
    given = last.present(tensors)
    if not last.same(*given):
        return None
    for tensor in given:
        if tensor.data_ptr() & 15:
            return None
    return last.known if last.on_gpu or last.arch is dispatch.arch_of(given[0]) else None


def keep(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...], known: Known) -> None:
    """Recognise the next call like this one, unless an address is no multiple of 16.

    For calls without gradients; `find` must be asked in the same state of torch's dispatcher.
    """
    call = known.calls.get(name)
    if call is not None and call is not _last.get(name):
        _last[name] = call
        return
    lists = any(value.__class__ is list for value in tensors)
    if lists:
        tensors, options = _flat(tensors, options)
    places = [place for place, tensor in enumerate(tensors) if tensor is not None]
    given = [tensors[place] for place in places]
    if _Guards is None or any(tensor.data_ptr() & 15 for tensor in given):
        return
    leading = places == list(range(len(places)))
    _last[name] = known.calls[name] = _Call(
        known,
        lists,
        tuple(map(type, tensors + options)),
        options,
        itemgetter(slice(len(places))) if leading else itemgetter(*places),
        _Guards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check,
        given[0].is_cuda,
        dispatch.arch_of(given[0]),
    )


def _flat(values: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The values without their lists, whose places and lengths are one more option."""
    flat: list[Any] = []
    lengths = []
    for value in values:
        if value.__class__ is list:
            flat += value
            lengths.append(len(value))
        else:
            flat.append(value)
            lengths.append(-1)
    return tuple(flat), (*options, tuple(lengths))
