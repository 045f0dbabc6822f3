"""Checks of arguments that every operator uses, and debug mode, in which operators also check values inside tensors.

The checks read metadata only, so they also work on fake tensors and symbolic sizes.

Every message is one sentence: `<op>: <argument> <what was given>; <what is possible>`.
"""

from __future__ import annotations

import logging
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import torch

from mla_suite.errors import CallTypeError, call_error

INDEX = (torch.int32,)
FLOAT32 = (torch.float32,)
LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def env_flag(name: str, value: str, effect: str) -> bool:
    """Whether a variable of the environment has the value that has an effect. A warning says that another has none."""
    if value not in ("", "0", effect):
        logging.getLogger("mla_suite").warning("%s is %r, which has no effect; it takes %s", name, value, effect)
    return value == effect


def every(name: str, value: str) -> int:
    """The whole number n that a variable of the environment has, 0 for none. A warning says that another value has no
    effect."""
    n = int(value) if value.isascii() and value.isdecimal() else 0
    if not n:
        env_flag(name, value, "a whole number n, to check every n-th call")
    return n


_Value = TypeVar("_Value")
_debug = env_flag("MLA_SUITE_DEBUG", os.environ.get("MLA_SUITE_DEBUG", ""), "1")
_debugging: ContextVar[bool] = ContextVar("mla_suite_debug", default=_debug)
debugging: Callable[[], bool] = _debugging.get
CHECK_EVERY = every("MLA_SUITE_CHECK", os.environ.get("MLA_SUITE_CHECK", ""))
_dispatched: ContextVar[bool] = ContextVar("mla_suite_dispatched", default=_debug or CHECK_EVERY > 0)
dispatched: Callable[[], bool] = _dispatched.get  # a bound C method: no Python frame in every call
"""Whether a switch is set in this context that the eager fast path does not know, so that the dispatcher must serve."""

_MISMATCH = re.compile(
    r"mla_suite::\w+\(\) Expected a value of type '(?P<kind>.*)' for argument '(?P<argument>\w+)' "
    r"but instead found type '(?P<found>\w+)"
)
KINDS = {
    **{
        "Tensor": "a tensor",
        "int": "an int of 64 bits",
        "float": "a number that a float holds",
        "bool": "a bool",
        "str": "a string",
    },
    **{"List[Tensor]": "a list of tensors", "List[Optional[Tensor]]": "a list of tensors or None"},
    **{"List[str]": "a list of strings", "Optional[Tensor]": "a tensor", "Optional[int]": "a torch.dtype"},
}
"""Types of a schema, in words."""


@contextmanager
def having(switch: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """While the block runs, in this context (a thread has its own), a switch has this value."""
    token = switch.set(value)
    try:
        yield
    finally:
        switch.reset(token)


@contextmanager
def switched(switch: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """`having`, and calls of operators go through the dispatcher, whose implementations ask for the switch."""
    with having(_dispatched, True), having(switch, value):
        yield


@contextmanager
def debug(on: bool = True) -> Iterator[None]:
    """While the block runs, check values inside tensors (page ids, lengths, slots) before an operator writes anything.

    Off by default because reading lengths on the host waits for the device. `MLA_SUITE_DEBUG=1` turns it on for a
    process (read once at import). Tensors on the CPU are always checked.
    """
    with switched(_debugging, on):
        yield


def fail(op: str, argument: str, given: str, possible: str, error: type[Exception] = ValueError) -> NoReturn:
    raise call_error(error, op, f"{argument} {given}", possible)


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    """The dtypes as a sentence names them: `bfloat16, float16 or float32`."""
    *most, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(most)} or {last}" if most else last


def is_tensor(op: str, argument: str, value: Any) -> None:
    """TypeError for a value that is no dense tensor."""
    if not isinstance(value, torch.Tensor):
        fail(op, argument, f"is {_given(value)}", "it takes a tensor", TypeError)
    if value.layout is not torch.strided:
        given = f"is {str(value.layout).removeprefix('torch.')}"
        fail(op, argument, given, "it takes dense tensors: call .to_dense()", TypeError)
    if value.is_nested:
        fail(op, argument, "is nested", "it takes dense tensors: join its parts", TypeError)


def whole(op: str, argument: str, value: Any) -> None:
    """TypeError for a value that is no whole number of 64 bits. An int that a trace does not know passes."""
    if isinstance(value, int):
        if not torch.compiler.is_compiling() and value.bit_length() > 63:
            fail(op, argument, f"is an int of {value.bit_length()} bits", "it takes an int of 64 bits", TypeError)
    elif not is_whole(value):
        fail(op, argument, f"is {value!r}", "it takes an int", TypeError)


def is_whole(value: Any) -> bool:
    """Whether a value is of a kind that holds whole numbers. NumPy's float32 is not, which torch would cut off."""
    if not hasattr(value, "__index__") or bool(getattr(value, "shape", False)):
        return False
    return not any(kind in str(getattr(value, "dtype", "")) for kind in ("float", "complex"))


def as_int(op: str, argument: str, value: Any) -> int:
    """An int, or NumPy's or a tensor's as an int; TypeError for any other value."""
    try:
        return operator.index(value)
    except TypeError:
        pass  # refused below, where it is no error during another
    fail(op, argument, f"is {value!r}", "it takes an int", TypeError)


def tensor(
    op: str,
    argument: str,
    value: torch.Tensor,
    *,
    rank: int | Sequence[int] = 0,
    dtypes: Sequence[torch.dtype],
    sizes: Sequence[int | torch.SymInt] | None = None,
    like: torch.Tensor | None = None,
    names: str = "",
) -> None:
    """Refuse a tensor of another rank, dtype or device than `like`, whose last dimension is strided, or of other sizes.

    rank   one, or several of which it may have any; those of `sizes` where these are given
    names  the shape in words, for the messages about rank and sizes, as in `[batch, heads]`
    """
    is_tensor(op, argument, value)
    rank = rank if sizes is None else len(sizes)
    ranks = (rank,) if isinstance(rank, int) else tuple(rank)
    if value.dim() not in ranks:
        possible = f"it takes {' or '.join(map(str, ranks))} dimension{'s' * (ranks[-1] > 1)}{names and ': '}{names}"
        fail(op, argument, f"has shape {tuple(value.shape)}", possible)
    if value.dtype not in dtypes:
        given = str(value.dtype).removeprefix("torch.")
        fail(op, argument, f"is {given}", f"it takes {dtype_names(dtypes)}", TypeError)
    if like is not None and value.device != like.device:
        possible = "all tensors of a call are on one device: move one of them"
        fail(op, argument, f"is on {value.device}, and the call's first tensor on {like.device}", possible)
    if strided(value):
        fail(op, argument, f"has strides {value.stride()}", "its last dimension must be contiguous: call .contiguous()")
    if sizes is not None:
        shape(op, argument, value, sizes, names)


def field(op: str, args: Any, argument: str, dtypes: Sequence[torch.dtype], **how: Any) -> None:
    """`tensor` of one of an operator's arguments; None passes, since the schema refuses it where it is none."""
    value = getattr(args, argument)
    if value is not None:
        tensor(op, argument, value, dtypes=dtypes, **how)


def strided(value: torch.Tensor) -> bool:
    """Whether the last dimension is strided. An empty tensor's is not: torch's contiguous() keeps its strides."""
    return value.dim() > 0 and value.stride(-1) != 1 and value.shape[-1] > 1 and not certain(value.numel() == 0)


def shape(op: str, argument: str, value: torch.Tensor, expected: Sequence[int | torch.SymInt], names: str) -> None:
    """Refuse a tensor whose sizes differ from `expected`; `names` spells the shape in words, as in `[batch, heads]`."""
    if value.dim() != len(expected) or any(given != want for given, want in zip(value.shape, expected, strict=True)):
        fail(op, argument, f"has shape {tuple(value.shape)}", f"it takes {names} = {tuple(expected)}")


def scale(op: str, softmax_scale: float) -> None:
    """Refuse a scale that is no finite number of 32 bits. A number that a trace does not know passes."""
    if isinstance(softmax_scale, float) and not abs(softmax_scale) <= LARGEST_FLOAT32:
        fail(op, "softmax_scale", f"is {softmax_scale}", f"it takes a finite number, at most {LARGEST_FLOAT32:.3g}")


def certain(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; False while sizes that follow from data are not known.

    For errors that a trace may leave to the call itself, which checks again with the sizes it has.
    """
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # sympy, which only a trace has loaded already

    return guard_or_false(condition)


def overlaps_itself(value: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, by sizes and strides; also where rows interleave in a way that these
    alone do not tell from sharing. Of sizes that a trace does not know only expanded dimensions are seen."""
    sizes, strides = value.shape, value.stride()
    if not all(isinstance(n, int) for n in (*sizes, *strides)):
        return any(certain(s == 0) and certain(n > 1) for n, s in zip(sizes, strides, strict=True))
    if 0 in sizes:
        return False
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(sizes, strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def written_whole(op: str, argument: str, value: torch.Tensor) -> None:
    """Refuse a written tensor that was sliced out of a larger one inside a graph traced with dynamic sizes.

    Inductor (seen on torch 2.13, pytorch issue 198068) then drops the slice's offset and the write lands in the first
    part. Such a slice shows as an offset computed from sizes; a graph input's offset is a number or its own symbol.
    """
    offset = value.storage_offset()
    expression = getattr(offset.node, "expr", None) if isinstance(offset, torch.SymInt) else None
    if expression is not None and not (expression.is_Symbol or expression.is_number):
        fail(
            op,
            argument,
            f"is a slice made inside a graph with dynamic sizes (offset {expression})",
            "keep one tensor per layer and make each an input of the graph",
        )


def readable(value: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read on the host: not where a graph is traced, and not those of a fake."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return not traced and type(value) in (torch.Tensor, torch.nn.Parameter)


def dense(op: str, arguments: Sequence[str], tensors: Sequence[Any]) -> None:
    """TypeError where the first tensor, whose device is the call's, is None, and where any is sparse."""
    for at, (argument, value) in enumerate(zip(arguments, tensors, strict=False)):
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, torch.Tensor) or (leaf is None and at == 0):
                is_tensor(op, argument, leaf)


def mismatch(op: str, error: RuntimeError, arguments: Mapping[str, Any] | None = None) -> CallTypeError | None:
    """If torch's error is about an argument's type, one sentence in place of its eight lines: a TypeError that names
    the argument, what was given, by its type alone without `arguments`, and what is accepted."""
    found = _MISMATCH.match(str(error))
    if found is None:
        return None
    given = f"a {found['found']}" if arguments is None else _given(arguments[found["argument"]])
    return CallTypeError(op, f"{found['argument']} is {given}", f"it takes {KINDS.get(found['kind'], found['kind'])}")


def _given(value: Any) -> str:
    """The value as a sentence names it."""
    if isinstance(value, (list, tuple)):
        if not value:
            return f"an empty {type(value).__name__}"
        return f"a {type(value).__name__} of {' and '.join(sorted({type(item).__name__ for item in value}))}"
    if isinstance(value, int) and value.bit_length() > 1024:  # which no float holds, and no sentence
        return f"an int of {value.bit_length()} bits"
    return repr(value) if value is None or isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
