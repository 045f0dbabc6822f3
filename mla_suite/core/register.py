"""Registration of operators in `torch.library`.

From one `Op` record come the functional and the `.out` overload, the CPU and CUDA implementations, the fake and the
Autograd kernel. Fake and real outputs agree because both are made from the same specification.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mla_suite.core import allocation, check_mode, checks, dispatch, eager, overlap, torch_ops
from mla_suite.core.op import NAMESPACE, Op, Overload
from mla_suite.core.prepared import PreparedCall, add_prepared, hashable, prepared_call
from mla_suite.errors import UsageError

DEVICE_KEYS = ("CPU", "CUDA")  # ROCm builds of torch register under CUDA

# Exact strides: the byte formats and padded block strides of caches are part of what an operator reads.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
_library = torch.library.Library(NAMESPACE, "DEF")
_grad_enabled = torch._C.is_grad_enabled


_registry: dict[str, Op] = {}
_overloads: dict[str, Op] = {}


def registry() -> dict[str, Op]:
    """All registered operators by name, in order of registration."""
    return dict(_registry)


def get(name: str) -> Op:
    """The operator of a name, or the overload that `register_overload` added to one."""
    found = (_registry.get(name) or _overloads.get(name)) if isinstance(name, str) else None
    if found is None:
        raise UsageError(f"no operator {name!r}; registered are {', '.join(_registry)}")
    return found


def register(op: Op) -> Op:
    """Define the operator in `torch.library` with its implementations, fake and Autograd kernel."""
    if op.name in _registry:
        raise ValueError(f"operator {op.name} is already registered")
    _define_functional(op)
    overloads = [op.functional]
    packet = getattr(torch.ops.mla_suite, op.name)
    torch_ops.skip_dispatcher(packet.default, op.functional)
    if op.outputs:
        _define(op.out)
        _implement(op.out.name, _out(op.out), _check_outputs(op))
        _fall_through(op.out.name)
        torch_ops.skip_dispatcher(packet.out, op.out)
        overloads.append(op.out)
    torch_ops.skip_dispatcher(packet, *overloads)
    _registry[op.name] = op
    return op


def register_overload(op: Op) -> Op:
    """Define one more functional overload of a registered operator: `sparse_decode.max_logits`, as op.name says."""
    _define_functional(op)
    operator, overload = op.name.split(".")
    torch_ops.skip_dispatcher(getattr(getattr(torch.ops.mla_suite, operator), overload), op.functional)
    _overloads[op.name] = op
    return op


def _define_functional(op: Op) -> None:
    _define(op.functional)
    implementation = _functional(op.functional)
    _implement(op.name, implementation, _fake(op))
    eager.implementations[op.name] = implementation
    if op.mutates:
        _fall_through(op.name)
    else:
        _refuse_gradients(op)


def _define(overload: Overload) -> None:
    _library.define(overload.name + overload.schema, tags=_TAGS)


def _implement(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for key in DEVICE_KEYS:
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _returned(outputs: tuple[torch.Tensor, ...]) -> Any:
    """The outputs as a schema returns them: nothing, one tensor, or a tuple."""
    return outputs if len(outputs) > 1 else outputs[0] if outputs else None


def _functional(overload: Overload) -> Callable[..., Any]:
    op, positional, known = overload.op, overload.positional, overload.known
    # A keyword argument that the dispatcher leaves out is at its default.
    names, defaults = tuple(overload.options), tuple(overload.options.values())

    def call(*args: Any, **kwargs: Any) -> Any:
        args += positional[len(args) :]
        options = hashable(tuple(map(kwargs.get, names, defaults)))
        if known.mutated:
            overlap.refuse(op.name, overload.arguments, args, known.mutated)
        key = known.key(args, options)
        prepared = prepared_call(key)
        if prepared is None:
            record = op.bind(args, options)
            allocate = allocation.allocator(op.check(record), args[0].device)
            outputs = allocate()
            _validate(overload, args, options)
            prepared = PreparedCall(allocate, _prepare(op, outputs, record), tuple(map(type, options)))
            add_prepared(key, prepared)
        else:
            outputs = prepared.allocate()
            _validate(overload, args, options)
        _count(op, args, options)
        _launch(prepared, outputs, args)
        _check(op, outputs, args, options)
        eager.bump_versions([args[position] for position in known.mutated])
        return _returned(outputs)

    return call


def _launch(prepared: PreparedCall, outputs: tuple[torch.Tensor, ...], args: tuple[Any, ...]) -> None:
    """Fill the outputs; they carry no gradient."""
    if _grad_enabled():
        with torch._C._AutoDispatchBelowAutograd():
            prepared.launch(outputs, args)
    else:
        prepared.launch(outputs, args)


def _check(op: Op, outputs: tuple[torch.Tensor, ...], args: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """In check mode, compare what the call has computed with the reference, if it is due."""
    check = check_mode.checking()
    if check is not None and check.due(op.name):
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            check_mode.run(check_mode.Call(op, outputs, args, options), check.on_difference)


def _count(op: Op, args: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """Note the call where `count_calls` counts."""
    calls = dispatch.counting()
    if calls is not None:
        choice = op.choose(op.bind(args, options))
        config = choice.supported.config
        calls[op.name, choice.backend.name, str(getattr(config, "instance", config))] += 1


def _prepare(op: Op, outputs: tuple[torch.Tensor, ...], record: Any) -> dispatch.Launch:
    """The launch of the backend that is chosen for a call."""
    seen = op.seen(record)
    choice = op.choose_seen(seen)
    launch = choice.backend.prepare(choice.supported.config, outputs, seen)
    return _if_allowed(op.name, choice, launch) if op.first(record).is_cuda and choice.needs_permission else launch


def _if_allowed(name: str, choice: dispatch.Choice, launch: dispatch.Launch) -> dispatch.Launch:
    """The launch of the reference on a GPU, which the caller has to allow, and which a CUDA graph cannot hold."""
    reasons = "; ".join(f"not {who}: {why}" for who, why in choice.refused)

    def run(outputs: tuple[torch.Tensor, ...], args: tuple[Any, ...]) -> None:
        if not dispatch.reference_allowed():
            instead = "run the slow fp32 reference inside `with mla_suite.allow_reference():`"
            possible = f"change what these name, or {instead}"
            checks.fail(name, "no kernel", f"takes this call on a GPU ({reasons})", possible, RuntimeError)
        if torch.cuda.is_current_stream_capturing():
            why = f"which reads lengths on the host and runs here because nothing else takes the call ({reasons})"
            given = f"cannot hold the fp32 reference, {why}"
            checks.fail(name, "a CUDA graph", given, "change what these name", RuntimeError)
        launch(outputs, args)

    return run


def _fake(op: Op) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _returned(allocation.empty(op.specify(*args, **kwargs), dispatch.first_tensor(args).device))

    return call


def _out(overload: Overload) -> Callable[..., None]:
    op, name, known = overload.op, overload.name, overload.known
    check = _check_outputs(op)
    positional, own = overload.positional, len(overload.options)
    names, defaults = (*overload.options, *op.outputs), (*overload.options.values(), *[None] * len(op.outputs))

    def call(*args: Any, **kwargs: Any) -> None:
        args += positional[len(args) :]
        found: tuple[Any, ...] = tuple(map(kwargs.get, names, defaults))
        options, outputs = hashable(found[:own]), found[own:]
        tensors = args + outputs
        key = known.key(tensors, options)
        prepared = prepared_call(key)
        if prepared is None:
            check(*args, **kwargs)
        overlap.refuse(name, overload.arguments, tensors, known.mutated)
        _validate(overload, tensors, options)
        if prepared is None:
            _refuse_misaligned(op, outputs)
            launch = _into_the_last(_prepare(op, outputs, op.bind(args, options)), len(args))
            prepared = add_prepared(key, PreparedCall(tuple, launch, tuple(map(type, options))))
        _count(op, args, options)
        _launch(prepared, (), tensors)
        _check(op, outputs, args, options)
        eager.bump_versions(outputs)
        if _grad_enabled():
            _refuse_gradients_of(op.name, outputs, args)

    return call


def _into_the_last(launch: dispatch.Launch, count: int) -> dispatch.Launch:
    """The launch for calls that bring `count` arguments and then their outputs."""
    return lambda _, tensors: launch(tensors[count:], tensors[:count])


def _check_outputs(op: Op) -> Callable[..., None]:
    """(*args, **kwargs) of the `.out` overload -> raises where the caller's outputs are not what is specified."""

    def check(*args: Any, **kwargs: Any) -> None:
        functional = {name: value for name, value in kwargs.items() if name in op.functional.options}
        device = dispatch.first_tensor(args).device
        for name, expected in zip(op.outputs, op.specify(*args, **functional), strict=True):
            given = kwargs[name]
            checks.is_tensor(f"{op.name}.out", name, given)
            same_shape = given.dim() == len(expected.shape) and all(
                g == e for g, e in zip(given.shape, expected.shape, strict=True)
            )
            if not same_shape or given.dtype != expected.dtype or given.device != device:
                found = f"is {given.dtype} {tuple(given.shape)} on {given.device}"
                possible = f"these arguments need {expected.dtype} {tuple(expected.shape)} on {device}"
                checks.fail(f"{op.name}.out", name, found, possible)
            if name not in op.strided and given.dim() > 1 and checks.strided(given):
                found = f"has strides {given.stride()}"
                checks.fail(f"{op.name}.out", name, found, "its last dimension must be contiguous")
            if checks.overlaps_itself(given):
                found = f"has strides {given.stride()} for {tuple(given.shape)}"
                possible = "rows that share memory cannot be written: give a tensor that was not expanded"
                checks.fail(f"{op.name}.out", name, found, possible)

    return check


def _refuse_misaligned(op: Op, outputs: tuple[torch.Tensor, ...]) -> None:
    """ValueError where an output's address is no multiple of its element size, as memory of another library may be."""
    for name, output in zip(op.outputs, outputs, strict=True):
        if output.data_ptr() % output.element_size():
            found = f"begins at an address that is no multiple of its {output.element_size()} bytes per element"
            checks.fail(f"{op.name}.out", name, found, "give memory that is aligned to them")


def _validate(overload: Overload, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    if tensors[0].is_cpu or checks.debugging():
        overload.validate_values(tensors, options)


def _fall_through(name: str) -> None:
    """Let autograd pass an operator that writes into its arguments, which has no gradient.

    A Python kernel that does so and dispatches once more takes 5 us, as much as the rest of the call.
    """
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")


_library.define("refuse_backward(Tensor grad, SymInt[] size, str op) -> Tensor", tags=_TAGS)


def _refuse_backward(grad: torch.Tensor, size: Sequence[int], op: str) -> torch.Tensor:
    eager.refuse_gradient(op)


# An operator of its own, so that a compiled forward over tensors that require grad works and only backward() raises.
_implement("refuse_backward", _refuse_backward, lambda grad, size, op: grad.new_empty(size))


class WithoutBackward(torch.autograd.Function):
    """A copy of `result` through which `backward()` to `read` raises, for traced code: that does not see what an `.out`
    overload has `backward()` raise, and cannot trace how."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, op: str, *read: torch.Tensor) -> torch.Tensor:
        ctx.op, ctx.sizes = op, [tensor.shape for tensor in read]
        return result.clone()  # a view could not be written in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *[torch.ops.mla_suite.refuse_backward(grad, size, ctx.op) for size in ctx.sizes]


class _WrittenWithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, written: torch.Tensor, op: str, *read: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(written)
        ctx.op = op
        return written

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        eager.refuse_gradient(ctx.op)


def _refuse_gradients_of(op: str, written: tuple[torch.Tensor, ...], args: tuple[Any, ...]) -> None:
    """Have `backward()` through what an `.out` overload wrote raise as through what its operator returns.

    Views are left as they are: a graph of their base would grow with every step that writes to a part of it, and torch
    refuses writes to some. So are tensors of inference mode, which never carry a gradient.
    """
    given = itertools.chain.from_iterable(value if isinstance(value, (list, tuple)) else (value,) for value in args)
    read = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
    for tensor in written:
        if tensor._is_view() or tensor.is_inference():
            continue
        if tensor.grad_fn is not None:
            tensor.detach_()  # of what was overwritten; one step after the other would hold on to all former graphs
        if read:
            _WrittenWithoutBackward.apply(tensor, op, *read)


def _refuse_gradients(op: Op) -> None:
    """The forward accepts tensors that require grad; `backward()` raises one sentence, eager and compiled."""

    def size_of(value: Any) -> Any:
        # torch takes a list for a list of gradients only when all of it are tensors.
        if isinstance(value, (list, tuple)) and value and all(isinstance(leaf, torch.Tensor) for leaf in value):
            return [size_of(leaf) for leaf in value]
        return tuple(value.shape) if isinstance(value, torch.Tensor) and value.is_floating_point() else None

    def setup_context(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
        ctx.sizes = [size_of(value) for value in inputs]

    def backward(ctx: Any, *grads: Any) -> Any:
        grad = next(g for g in grads if g is not None)

        def refused(size: Any) -> Any:
            if isinstance(size, list):
                return [refused(inner) for inner in size]
            return None if size is None else torch.ops.mla_suite.refuse_backward(grad, size, op.name)

        # Trailing arguments left at their defaults have sizes but were not inputs.
        return tuple(refused(size) for size in ctx.sizes[: len(ctx.needs_input_grad)])

    torch.library.register_autograd(op.qualname, backward, setup_context=setup_context, lib=_library)
