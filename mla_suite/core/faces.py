"""Public functions call implementations without torch's dispatcher where nobody listens to it.

The dispatcher takes 4 to 5 us of an eager call through Python, as much as the launch. It is passed by only in a call
that is known (one with the same metadata came through it before), without gradients, on plain tensors, and while
nothing is active that would see the operator: a compiler's or exporter's trace, a mode, a functorch transform, a jit
trace, a profiler. Two things Python cannot ask about: C++ observers without a profiler (torch's ExecutionTraceObserver
on its own, a daemon's on-demand trace), which then see such a call's kernel and not its operator; and kernels that
others registered over ours. `torch.ops.mla_suite` is for both.
"""

from __future__ import annotations

from typing import Any

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
    return getattr(torch.ops.mla_suite, op.name)(*args, **dict(zip(op.options, options, strict=True)))


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
