"""Calls of `torch.ops.mla_suite`, which Inductor's code makes too, try the eager fast path before torch's dispatcher.

Torch's dispatcher takes 6.5 us to call an empty Python kernel with the schema of decode, as much as a whole call of the
public function with a launch that does nothing (6 us; torch 2.13, Python 3.11). So each overload gets a class of its
own, whose call asks `eager.call` first and falls back on torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch._ops import OpOverload, OpOverloadPacket

from mla_suite.core import eager
from mla_suite.core.op import Overload


class _Spelling(NamedTuple):
    """How a call gives its arguments: a number of them by position, the others by name or not at all."""

    op: Overload
    defaults: tuple[Any, ...]
    tensors: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # from what is given and `defaults` behind it
    options: Callable[[tuple[Any, ...]], tuple[Any, ...]]


_DISPATCH = object()


def skip_dispatcher(called: OpOverload[..., Any] | OpOverloadPacket[..., Any], *ops: Overload) -> None:
    """Have calls of an object of `torch.ops` go through `call` where they may: as the first of `ops` that they fit.

    The object stays the one that torch knows, and gets a class of its own; torch traces, exports and names it as ever.
    """
    base = type(called)
    spellings: dict[tuple[Any, ...], _Spelling] = {}

    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        spelling = spellings.get((len(args), *kwargs))
        if spelling is None:
            spelling = next(filter(None, (_spelling(op, len(args), tuple(kwargs)) for op in ops)), None)
            if spelling is None:  # the dispatcher refuses it
                return base.__call__(self, *args, **kwargs)
            spellings[(len(args), *kwargs)] = spelling
        op, defaults, tensors, options = spelling
        given = (*args, *kwargs.values(), *defaults)
        found = eager.call(op, tensors(given), options(given), _DISPATCH)
        return base.__call__(self, *args, **kwargs) if found is _DISPATCH else found

    called.__class__ = type(base.__name__, (base,), {"__call__": __call__, "__module__": base.__module__})


def _spelling(op: Overload, by_position: int, names: tuple[str, ...]) -> _Spelling | None:
    """None where the arguments do not fit."""
    arguments, given = op.arguments, (*op.arguments[:by_position], *names)
    if by_position > len(op.positional) or len(set(given)) < len(given) or not op.required <= set(given):
        return None
    if not set(given) <= set(arguments):
        return None
    defaults = dict(zip(arguments, op.positional, strict=False)) | op.options
    left_out = tuple([name for name in arguments if name not in given])
    positions = [(given + left_out).index(name) for name in arguments]
    tensors = len(arguments) - len(op.options)
    left = tuple([defaults[name] for name in left_out])
    return _Spelling(op, left, _picker(positions[:tensors]), _picker(positions[tensors:]))


def _picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """values -> the tuple of those at `positions`; `itemgetter` returns a tuple of two and more alone."""
    return itemgetter(*positions) if len(positions) > 1 else lambda values: tuple([values[at] for at in positions])
