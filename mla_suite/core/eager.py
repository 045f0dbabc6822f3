"""The eager fast path: a call with metadata seen before only allocates, packs addresses and launches.

`call` finds what calls with equal metadata share (`core/prepared.py`): by torch.compile's own TensorGuards where the
call is like one of the last of its operator, else by a key of all metadata; a first call goes to what `register` has
defined. All skip torch's dispatcher (6 us and more with the arguments of decode) where nothing could observe the
operator: no mode, tracer, functorch transform, profiler or gradient. The public functions go through it, and by
`core/torch_ops.py` calls of `torch.ops` too, those of Inductor's code among them.

Two observers cannot be asked about from Python: C++ observers without a profiler (torch's ExecutionTraceObserver on its
own), which see the kernel and not the operator, and kernels that others registered over these. In debug mode every call
goes through the dispatcher, which serves both; so do calls under another policy, in check mode, and that are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._C import DispatchKey, DispatchKeySet, _functorch
from torch._ops import OpOverload
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling
from torch.utils._device import DeviceContext

from mla_suite.core import checks, overlap
from mla_suite.core.op import Overload, converted
from mla_suite.core.prepared import KnownCalls, PreparedCall, fixed, hashable, plain

# Bound C functions: a Python frame costs a tenth of a microsecond and more.
_grad_enabled = torch._C.is_grad_enabled
_function_modes = torch._C._len_torch_function_stack
_function_mode = torch._C._get_function_stack_at
_profiling = torch._C._autograd._profiler_enabled
_transformed = torch._C._are_functorch_transforms_active
_included = torch._C._dispatch_tls_local_include_set
_dispatched = checks.dispatched
bump_versions: Callable[[Sequence[torch.Tensor]], None] = torch._C._increment_version
"""Tells autograd that tensors were written, so that a backward that saved them raises."""
# Keys that every thread dispatches by: without gradients, and in inference mode. Modes, transforms and traces add more.
_QUIET = frozenset(
    keys.raw_repr()
    for keys in (
        DispatchKeySet(DispatchKey.BackendSelect),
        DispatchKeySet(DispatchKey.BackendSelect).add(DispatchKey.ADInplaceOrView),
    )
)


def call(op: Overload, tensors: tuple[Any, ...], options: tuple[Any, ...], otherwise: Any = None) -> Any:
    """An operator with all its positional and all its keyword arguments, in the schema's order.

    Where the call must go through the dispatcher, it does, or `otherwise` is returned if that is given.
    """
    if otherwise is None and is_dynamo_compiling():
        return getattr(torch.ops.mla_suite, op.name).default(*tensors, **dict(zip(op.options, options, strict=True)))
    if not observed():
        known = op.known
        prepared = known.find(tensors, options) or _look_up(op, tensors, options)
        if prepared is not None:
            outputs = prepared.allocate()
            if tensors[0].is_cpu:
                op.validate_values(tensors, options)
            prepared.launch(outputs, tensors)
            if known.mutated:
                bump_versions([tensors[position] for position in known.mutated])
            return outputs if len(outputs) > 1 else outputs[0] if outputs else None
        if otherwise is None and _passes_unchanged(op, tensors, options):
            return implementations[op.name](*tensors, **dict(zip(op.options, options, strict=True)))
    if _transformed():
        _refuse_transforms(op.name, tensors)
    return _through_dispatcher(op, tensors, options) if otherwise is None else otherwise


implementations: dict[str, Callable[..., Any]] = {}
"""By name of an operator what `register` has defined it with: a first call goes there, past the dispatcher (70 us)."""


def _passes_unchanged(op: Overload, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
    """Whether the dispatcher would call our implementation with these very arguments."""
    return (
        tuple(map(type, options)) == op.kinds
        and not any(tensors[at] is None for at in op.needed)
        and plain(tensors)
        and (tensors[0].is_cpu or tensors[0].is_cuda)
    )


def lookup(known: KnownCalls, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> PreparedCall | None:
    """The prepared call of tensors and options like these, of a function of its own that calls an operator; None where
    somebody could observe the operator."""
    if is_dynamo_compiling() or observed():
        return None
    return known.find(tensors, options) or (known.look_up(tensors, options) if fixed(options) else None)


def observed() -> bool:
    """Whether a mode, tracer, functorch transform, profiler or switch of ours could see the operator."""
    modes = _function_modes()
    return (
        # torch.set_default_device leaves a mode that acts on factory functions without a device; none is called here.
        (modes > 0 and (modes > 1 or _function_mode(0).__class__ is not DeviceContext))
        or _profiling()
        or profiler._is_profiler_enabled
        # TensorGuards see most of these keys too, but not those of tracers that Dynamo runs under itself.
        or _included().raw_repr() not in _QUIET
        or _dispatched()
    )


def _look_up(op: Overload, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> PreparedCall | None:
    """The prepared call of the key of these arguments. ValueError where it would write into memory that it reads."""
    prepared = op.known.look_up(tensors, hashable(converted(op.kinds, options)), options)
    if prepared is not None and op.known.mutated:
        overlap.refuse(op.name, op.arguments, tensors, op.known.mutated)
    return prepared


# The dispatcher's way


def refuse_gradient(op: str) -> NoReturn:
    raise RuntimeError(f"{op} has no backward: it is an inference operator; detach its inputs or use torch.no_grad()")


def _refuse_transforms(op: str, tensors: tuple[Any, ...]) -> None:
    """Refuse tensors that torch.func.grad, vjp or jvp differentiates by. torch's own error for the first two is about
    autograd.Function, and jvp would take the outputs for constants."""
    for value in tensors:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            while isinstance(tensor, torch.Tensor) and _functorch.is_batchedtensor(tensor):
                tensor = _functorch.get_unwrapped(tensor)
            if not isinstance(tensor, torch.Tensor) or not _functorch.is_gradtrackingtensor(tensor):
                continue
            if (_grad_enabled() and tensor.requires_grad) or forward_ad.unpack_dual(tensor).tangent is not None:
                refuse_gradient(op)


def _through_dispatcher(op: Overload, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """The call through torch.ops, with its errors for wrong types in one sentence."""
    checks.dense(op.name, op.arguments, tensors)
    given = dict(zip(op.options, converted(op.kinds, options), strict=True))
    for (name, value), kind in zip(given.items(), op.kinds, strict=True):
        if value is None and name not in op.may_be_none:  # torch takes None for False
            possible = "a value" if kind is None else checks.KINDS[kind.__name__]
            checks.fail(op.name, name, "is None", f"it takes {possible}", TypeError)
        if kind is int and value is not None and not (isinstance(value, int) or checks.is_whole(value)):
            found = f"a {type(value).__name__}" if getattr(value, "shape", ()) else repr(value)
            checks.fail(op.name, name, f"is {found}", f"it takes {checks.KINDS['int']}", TypeError)
    try:
        return OpOverload.__call__(getattr(torch.ops.mla_suite, op.name).default, *tensors, **given)
    except RuntimeError as error:
        mismatch = checks.mismatch(op.name, error, dict(zip(op.arguments, (*tensors, *options), strict=True)))
        if mismatch is None:
            raise
        raise mismatch from None
