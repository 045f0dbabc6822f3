"""Public functions call implementations without torch's dispatcher where nobody listens to it.

The dispatcher takes 4 to 5 us of an eager call through Python, as much as the launch. It is passed by only in a call
that is known (one with the same metadata came through it before), without gradients, on plain tensors, and while
nothing is active that would see the operator: a compiler's or exporter's trace, a mode, a functorch transform, a jit
trace, a profiler. Two things Python cannot ask about: C++ observers without a profiler (torch's ExecutionTraceObserver
on its own, a daemon's on-demand trace), which then see such a call's kernel and not its operator; and kernels that
others registered over ours. `torch.ops.mla_suite` is for both.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

from mla_suite.core import dispatch, library, repeats
from mla_suite.core.dispatch import Known
from mla_suite.core.library import Op

_CLASSES = (torch.Tensor, torch.nn.Parameter)
_grad_enabled = torch._C.is_grad_enabled
_function_modes = torch._C._len_torch_function_stack
_profiling = torch._C._autograd._profiler_enabled
_included = torch._C._dispatch_tls_local_include_set
# What every thread dispatches by: without gradients, and in inference mode. Modes, transforms and traces add theirs.
_QUIET = frozenset(
    keys.raw_repr()
    for keys in (
        DispatchKeySet(DispatchKey.BackendSelect),
        DispatchKeySet(DispatchKey.BackendSelect).add(DispatchKey.ADInplaceOrView),
    )
)


def call(op: Op, args: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """`torch.ops.mla_suite.<op>` with all its positional and all its keyword arguments, in the schema's order."""
    if not is_dynamo_compiling() and _unobserved():
        known = repeats.find(op.name, args, options) or _looked_up(op.name, args, options)
        if known is not None:
            return library.complete(op, known, args, options)
    overload, given = getattr(torch.ops.mla_suite, op.name).default, dict(zip(op.options, options, strict=True))
    if is_dynamo_compiling():
        return overload(*args, **given)
    for name, value in given.items():
        if value is None and name not in op.may_be_none:  # torch takes None for False
            raise TypeError(f"{op.name}: {name} is None; it takes a value")
    try:
        return overload(*args, **given)
    except RuntimeError as error:
        mismatch = _MISMATCH.match(str(error))
        if mismatch is None:
            raise
        _refuse(op, mismatch["argument"], mismatch["kind"], dict(zip(op.arguments, (*args, *options), strict=True)))


_MISMATCH = re.compile(
    r"mla_suite::\w+\(\) Expected a value of type '(?P<kind>.*)' for argument '(?P<argument>\w+)' but"
)
_KINDS = {
    **{"Tensor": "a tensor", "int": "an int of 64 bits", "float": "a number", "bool": "a bool", "str": "a string"},
    **{"List[Tensor]": "a list of tensors", "List[Optional[Tensor]]": "a list of tensors or None"},
    **{"List[str]": "a list of strings", "Optional[Tensor]": "a tensor", "Optional[int]": "a torch.dtype"},
}


def _refuse(op: Op, argument: str, kind: str, given: dict[str, Any]) -> NoReturn:
    """One sentence for what torch says in eight lines."""
    value = given[argument]
    if isinstance(value, (list, tuple)):
        found = f"a {type(value).__name__} of {' and '.join(sorted({type(item).__name__ for item in value}))}"
    else:
        found = repr(value) if value is None or isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
    raise TypeError(f"{op.name}: {argument} is {found}; it takes {_KINDS.get(kind, kind)}") from None


def _looked_up(name: str, args: tuple[Any, ...], options: tuple[Any, ...]) -> Known | None:
    """What is known of such a call, if the dispatcher would give its tensors to an implementation as they are."""
    if not _plain(args):
        return None
    known = dispatch.known(dispatch.metadata(name, args, options))
    if known is None or known.kinds != tuple(map(type, options)):
        return None
    repeats.keep(name, args, options, known)
    return known


def _unobserved() -> bool:
    """Whether an operator called now in this thread would be seen by nothing but its implementation."""
    return not (
        _grad_enabled()
        or _function_modes()
        or _profiling()
        or profiler._is_profiler_enabled
        or _included().raw_repr() not in _QUIET
    )


def _plain(args: tuple[Any, ...]) -> bool:
    """Whether the dispatcher would give these tensors and lists of tensors to an implementation as they are."""
    for value in args:
        for tensor in value if value.__class__ is list else (value,):
            if tensor is not None and (tensor.__class__ not in _CLASSES or tensor.is_neg() or tensor._is_zerotensor()):
                return False
    return args[0].__class__ in _CLASSES
