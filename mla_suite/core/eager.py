"""The eager fast path: a call with metadata seen before only allocates, packs addresses and launches.

A `PreparedCall` is what calls with equal metadata share. It is found by torch.compile's own TensorGuards where the call
is like the last one of its operator, else by a key of all metadata. `call` skips torch's dispatcher (6 us and more with
the arguments of decode) where nothing could observe the operator: no mode, tracer, functorch transform, profiler or
gradient. The public functions go through it, and by `core/torch_ops.py` calls of `torch.ops` too, those of Inductor's
code among them.

Two observers cannot be asked about from Python: C++ observers without a profiler (torch's ExecutionTraceObserver on its
own), which see the kernel and not the operator, and kernels that others registered over these. In debug mode every call
goes through the dispatcher, which serves both; so do calls under another policy, in check mode, and that are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch._C import DispatchKey, DispatchKeySet, _functorch
from torch._ops import OpOverload
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling
from torch.utils._device import DeviceContext

from mla_suite.archs import ArchSpec
from mla_suite.core import checks, dispatch, overlap
from mla_suite.core.op import Op

_CLASSES = (torch.Tensor, torch.nn.Parameter)
_Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
# Bound C functions: a Python frame costs a tenth of a microsecond and more.
_grad_enabled = torch._C.is_grad_enabled
_function_modes = torch._C._len_torch_function_stack
_function_mode = torch._C._get_function_stack_at
_profiling = torch._C._autograd._profiler_enabled
_transformed = torch._C._are_functorch_transforms_active
_included = torch._C._dispatch_tls_local_include_set
_emulated = dispatch.emulated.get
_data_ptr = torch.Tensor.data_ptr
_dispatched = checks.dispatched
_policy = dispatch.policy.get
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


class Called(Protocol):
    """The facts that calls of one overload share; an `Op` has them for its functional overload."""

    @property
    def name(self) -> str: ...  # decode, or decode.out
    @property
    def arguments(self) -> tuple[str, ...]: ...  # names of the tensors, written outputs behind them, then options
    @property
    def positional(self) -> tuple[Any, ...]: ...  # defaults of those that may be given by position
    @property
    def options(self) -> dict[str, Any]: ...  # names and defaults, None where there is none
    @property
    def required(self) -> frozenset[str]: ...  # arguments without a default
    @property
    def converters(self) -> tuple[Callable[[Any], Any] | None, ...]: ...  # for each option
    @property
    def mutated(self) -> tuple[int, ...]: ...  # positions of the tensors that are written

    def validate_values(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None: ...


class PreparedCall(NamedTuple):
    """The state that calls with the same metadata share."""

    allocate: Callable[[], tuple[torch.Tensor, ...]]
    launch: dispatch.Launch
    kinds: tuple[type, ...]  # types of the options: 1, 1.0 and True are one key and three kinds
    guards: dict[str, _Guarded]  # by the name of the overload whose calls they recognise


class _Guarded(NamedTuple):
    """A call as `find` recognises it."""

    prepared: PreparedCall
    lists: bool  # whether an argument is a list; lists are compared flattened
    kinds: list[type]  # types of every argument: 1, 1.0 and True are equal and of three kinds
    options: tuple[Any, ...]
    present: Callable[[tuple[Any, ...]], tuple[torch.Tensor, ...]]  # picks the tensors that are not None
    same: Callable[..., bool]
    on_gpu: bool
    written: list[int]  # positions among the present tensors of those that the call writes
    sizes: list[int]  # bytes that the present tensors reach over, where any is written
    apart: set[tuple[int, ...]]  # addresses of calls whose tensors are aligned and were found not to overlap
    emulated: ArchSpec | None  # the arch that CPU tensors stand for; a GPU's follows from its device


_prepared: dict[tuple[Any, ...], PreparedCall] = {}
_last: dict[str, _Guarded] = {}  # by an overload's name
dispatch.on_clear(_prepared.clear)
dispatch.on_clear(_last.clear)


def call(op: Called, tensors: tuple[Any, ...], options: tuple[Any, ...], otherwise: Any = None) -> Any:
    """An operator with all its positional and all its keyword arguments, in the schema's order.

    Where the call must go through the dispatcher, it does, or `otherwise` is returned if that is given.
    """
    if otherwise is None and is_dynamo_compiling():
        return getattr(torch.ops.mla_suite, op.name).default(*tensors, **dict(zip(op.options, options, strict=True)))
    modes = _function_modes()
    if not (
        # torch.set_default_device leaves a mode that acts on factory functions without a device; none is called here.
        (modes and (modes > 1 or _function_mode(0).__class__ is not DeviceContext))
        or _profiling()
        or profiler._is_profiler_enabled
        # TensorGuards see most of these keys too, but not those of tracers that Dynamo runs under itself.
        or _included().raw_repr() not in _QUIET
        or _dispatched()
    ):
        # `find`, written out: a frame of its own would cost a tenth of the call.
        prepared, last = None, _last.get(op.name)
        if last is not None:
            values, settings = tensors, options
            if last.lists:  # `_flat`, written out
                flat, lengths = [], []
                for value in tensors:
                    if value.__class__ is list:
                        flat += value
                        lengths.append(len(value))
                    else:
                        flat.append(value)
                        lengths.append(-1)
                values, settings = tuple(flat), (*options, tuple(lengths))
            if last.kinds == [*map(type, values + settings)] and last.options == settings:
                given = last.present(values)
                if last.same(*given) and (last.on_gpu or last.emulated is _emulated()):
                    prepared = last.prepared
                    if last.written:
                        addresses = tuple(map(_data_ptr, given))
                        if addresses not in last.apart:
                            if overlap.first_overlap(addresses, last.sizes, last.written):
                                overlap.refuse(op.name, op.arguments, tensors, op.mutated)
                            low_bits = 0  # a generator would enter a frame for each address
                            for address in addresses:
                                low_bits |= address
                            if low_bits & 15:
                                prepared = None
                            else:
                                if len(last.apart) >= dispatch.MAX_CACHED:  # `bounded`, written out
                                    last.apart.clear()
                                last.apart.add(addresses)
                    else:
                        for tensor in given:
                            if tensor.data_ptr() & 15:
                                prepared = None
        if prepared is None:
            prepared = _look_up(op, tensors, options)
            if prepared is not None and op.mutated:
                overlap.refuse(op.name, op.arguments, tensors, op.mutated)
        if prepared is not None:
            outputs = prepared.allocate()
            if tensors[0].is_cpu:
                op.validate_values(tensors, options)
            prepared.launch(outputs, tensors)
            if op.mutated:
                bump_versions([tensors[position] for position in op.mutated])
            return outputs if len(outputs) > 1 else outputs[0] if outputs else None
    if _transformed() and not op.mutated:
        _refuse_transforms(op.name, tensors)
    return _through_dispatcher(cast(Op, op), tensors, options) if otherwise is None else otherwise


def recall(slot: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> PreparedCall | None:
    """The prepared call that `remember` was given for tensors and options like these, by a function of its own that
    calls an operator; None where somebody could observe the operator."""
    if is_dynamo_compiling() or _observed():
        return None
    prepared = find(slot, tensors, options)
    if prepared is None and _plain(tensors) and fixed(options):
        try:
            prepared = prepared_call(metadata(slot, tensors, options))
        except TypeError:  # as in `_look_up`
            return None
        if prepared is None or prepared.kinds != tuple(map(type, options)):
            return None
        keep(slot, tensors, options, prepared)
    return prepared


def remember(slot: str, tensors: tuple[Any, ...], options: tuple[Any, ...], prepared: PreparedCall) -> None:
    """Have `recall` find this call again, where the dispatcher would pass the tensors on as they are."""
    if not is_dynamo_compiling() and not _observed() and _plain(tensors) and fixed(options):
        add_prepared(metadata(slot, tensors, options), prepared)
        keep(slot, tensors, options, prepared)


def _observed() -> bool:
    """Whether a mode, tracer, functorch transform or profiler could see the operator; `call` has it written out."""
    modes = _function_modes()
    return bool(
        (modes and (modes > 1 or _function_mode(0).__class__ is not DeviceContext))
        or _profiling()
        or profiler._is_profiler_enabled
        or _included().raw_repr() not in _QUIET
        or _dispatched()
    )


def find(slot: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> PreparedCall | None:
    """The prepared call of the last arguments that `keep` was given for this slot, if these are like them.

    One call of C++ compares types, dtypes, devices, sizes, strides, dispatch keys (a negated or a zero tensor has
    others) and, while gradients are enabled, requires_grad. No tensor is held.
    """
    last = _last.get(slot)
    if last is None:
        return None
    if last.lists:
        tensors, options = _flat(tensors, options)
    if last.kinds != [*map(type, tensors + options)] or last.options != options:
        return None
    given = last.present(tensors)
    if not last.same(*given):
        return None
    for tensor in given:
        if tensor.data_ptr() & 15:
            return None
    return last.prepared if last.on_gpu or last.emulated is _emulated() else None


def keep(
    slot: str,
    tensors: tuple[Any, ...],
    options: tuple[Any, ...],
    prepared: PreparedCall,
    mutated: tuple[int, ...] = (),
) -> None:
    """Recognise the next call like this one, unless an address is no multiple of 16 or an option may change.

    No tensor may require a gradient that is enabled. `mutated` are the positions of the tensors that the call writes.
    """
    if not fixed(options):
        return
    guarded = prepared.guards.get(slot)
    if guarded is not None and guarded is not _last.get(slot) and guarded.options == options:
        _last[slot] = guarded
        return
    lists = any(value.__class__ is list for value in tensors)
    written = [tensors[position] for position in mutated]
    if lists:
        tensors, options = _flat(tensors, options)
    positions = [position for position, tensor in enumerate(tensors) if tensor is not None]
    given = [tensors[position] for position in positions]
    if _Guards is None or any(tensor.data_ptr() & 15 for tensor in given):
        return
    leading = positions == list(range(len(positions)))
    _last[slot] = prepared.guards[slot] = _Guarded(
        prepared,
        lists,
        [*map(type, tensors + options)],
        tuple([list(value) if value.__class__ is list else value for value in options]),  # the caller's may change
        itemgetter(slice(len(positions))) if leading else itemgetter(*positions),
        _Guards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check,
        given[0].is_cuda,
        [at for at, tensor in enumerate(given) if any(tensor is each for each in written)],
        [overlap.reach(tensor) for tensor in given] if written else [],
        set(),
        _emulated(),
    )


def fixed(options: tuple[Any, ...]) -> bool:
    """Whether every option keeps its value: one given as a tensor or an array may be written to before the next call.
    Lists are copied."""
    return not any(hasattr(value, "__setitem__") for value in options if value.__class__ is not list)


def _flat(values: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The values without their lists, whose positions and lengths become one more option."""
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


def metadata(name: str, tensors: Sequence[Any], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of a call: everything that checks, problems and backends may look at.

    tensors  every positional argument in the order of the schema, None where it is left out, then written outputs
    options  the values of every keyword argument, likewise

    A tensor counts by its sizes, strides, dtype, device and the alignment of its address, up to 16 bytes.
    """
    first = tensors[0] if tensors[0] is not None else dispatch.first_tensor(tensors)
    key: list[Any] = [name, _policy(), None if first.is_cuda else dispatch.arch_of(first), *options]
    add = key.append
    for value in tensors:
        add(tuple(map(_tensor_key, value)) if value.__class__ is list else _tensor_key(value))
    return tuple(key)


def _tensor_key(value: torch.Tensor | None) -> tuple[Any, ...] | None:
    if value is None:
        return None
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15


prepared_call: Callable[[tuple[Any, ...]], PreparedCall | None] = _prepared.get


def add_prepared(key: tuple[Any, ...], prepared: PreparedCall) -> PreparedCall:
    dispatch.bounded(_prepared)[key] = prepared
    return prepared


def _look_up(op: Called, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> PreparedCall | None:
    """The prepared call for these arguments, if the dispatcher would pass its tensors on as they are."""
    if not _plain(tensors):
        return None
    converted = hashable(tuple([f(value) if f else value for f, value in zip(op.converters, options, strict=True)]))
    try:
        prepared = prepared_call(metadata(op.name, tensors, converted))
    except TypeError:  # an option that no key can hold; the dispatcher refuses it in its own words
        return None
    if prepared is None or prepared.kinds != tuple(map(type, converted)):
        return None
    keep(op.name, tensors, options, prepared, op.mutated)
    return prepared


def hashable(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lists as tuples, which a key may hold."""
    return tuple([tuple(value) if isinstance(value, list) else value for value in options])


def _plain(args: tuple[Any, ...]) -> bool:
    """Whether the dispatcher would pass these tensors and lists of tensors to an implementation as they are."""
    learning = _grad_enabled()
    for value in args:
        for tensor in value if value.__class__ is list else (value,):
            if tensor is None:
                continue
            if tensor.__class__ not in _CLASSES or tensor.is_neg() or tensor._is_zerotensor():
                return False
            if tensor.layout is not torch.strided:
                return False
            if learning and tensor.requires_grad:
                return False
    return args[0].__class__ in _CLASSES


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


def _through_dispatcher(op: Op, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """The call through torch.ops, with its errors for wrong types in one sentence."""
    checks.dense(op.name, op.arguments, tensors)
    given = {
        name: value if convert is None else convert(value)
        for name, value, convert in zip(op.options, options, op.converters, strict=True)
    }
    for name, value in given.items():
        if value is None and name not in op.may_be_none:  # torch takes None for False
            checks.fail(op.name, name, "is None", "it takes a value", TypeError)
    try:
        return OpOverload.__call__(getattr(torch.ops.mla_suite, op.name).default, *tensors, **given)
    except RuntimeError as error:
        mismatch = checks.mismatch(op.name, error, dict(zip(op.arguments, (*tensors, *options), strict=True)))
        if mismatch is None:
            raise
        raise mismatch from None
