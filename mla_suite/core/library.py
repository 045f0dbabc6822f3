"""Operators as records, and the one way they reach `torch.library`.

An `Op` says what its outputs are (`specify`, which also checks the arguments), what a choice between implementations
may depend on (`problem`), and which backends can fill the outputs. `register` derives the rest: the functional and the
`.out` overload, the CPU and CUDA implementations, the fake and the Autograd kernel. Fake and real outputs agree because
both are made from the same specification.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mla_suite.core import checks, debug, dispatch, repeats
from mla_suite.core.allocation import Output as Output
from mla_suite.core.allocation import allocator, empty
from mla_suite.core.dispatch import Backend, Known

NAMESPACE = "mla_suite"
DEVICE_KEYS = ("CPU", "CUDA")  # ROCm builds of torch register under CUDA

_library = torch.library.Library(NAMESPACE, "DEF")
_grad_enabled = torch._C.is_grad_enabled


@dataclass(frozen=True)
class Sample:
    """A named problem: `make(device)` returns fresh (args, kwargs); bytes and flops are the least a kernel must do."""

    name: str
    make: Callable[[torch.device], tuple[tuple[Any, ...], dict[str, Any]]]
    bytes: int
    flops: int


@dataclass(frozen=True)
class Op:
    """One operator.

    name      as in `torch.ops.mla_suite.<name>`
    schema    arguments and results, without the name: `(Tensor q, ..., *, float scale) -> (Tensor out, Tensor lse)`
    specify   (*args, **kwargs) -> its outputs; raises on bad arguments; reads metadata only
    problem   (*args, **kwargs) -> the hashable facts a choice of implementation may depend on; reads metadata only
    backends  in order of preference
    samples   named problems for tests, benchmarks and the demo
    validate  (*args, **kwargs) -> raises on bad values inside tensors; run on CPU and in debug mode, before any write
    outputs   names of the outputs in the `.out` overload; empty when the operator has no such overload
    out_only  further keyword arguments of the `.out` overload, as schema text
    """

    name: str
    schema: str
    specify: Callable[..., tuple[Output, ...]]
    problem: Callable[..., Hashable]
    backends: tuple[Backend, ...]
    samples: Callable[[], Sequence[Sample]]
    validate: Callable[..., None] | None = None
    outputs: tuple[str, ...] = ()
    out_only: tuple[str, ...] = ()

    @property
    def qualname(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments that the functional schema declares as written."""
        arguments = self._arguments(self.schema)
        return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of all arguments, positional ones first."""
        return tuple(a.name for a in self._arguments(self.schema))

    @cached_property
    def positional(self) -> tuple[Any, ...]:
        """The defaults of the positional arguments, None where there is none."""
        return tuple(a.default_value for a in self._arguments(self.schema) if not a.kwarg_only)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The keyword arguments and their defaults, None where there is none."""
        return {a.name: a.default_value for a in self._arguments(self.schema) if a.kwarg_only}

    @cached_property
    def may_be_none(self) -> frozenset[str]:
        """Names of the arguments that may be left out by giving None."""
        return frozenset(a.name for a in self._arguments(self.schema) if isinstance(a.type, torch._C.OptionalType))

    @cached_property
    def out_options(self) -> dict[str, Any]:
        """The same of the `.out` overload, without the outputs."""
        arguments = self._arguments(self.out_schema)
        return {a.name: a.default_value for a in arguments if a.kwarg_only and a.name not in self.outputs}

    @property
    def takes_lists(self) -> bool:
        """Whether a keyword argument is a list."""
        return any(isinstance(a.type, torch._C.ListType) for a in self._arguments(self.schema) if a.kwarg_only)

    def _arguments(self, schema: str) -> Any:
        return torch._C.parse_schema(self.qualname + schema).arguments

    @property
    def out_schema(self) -> str:
        """The functional arguments, then `out_only`, then the outputs as keyword-only mutated tensors."""
        arguments = self.schema.split("->")[0].strip()[1:-1]
        star = "" if "*," in arguments else ", *"
        written = [f"Tensor({chr(ord('a') + i)}!) {name}" for i, name in enumerate(self.outputs)]
        return f"({', '.join([arguments + star, *self.out_only, *written])}) -> ()"


_registry: dict[str, Op] = {}


def registry() -> dict[str, Op]:
    """All registered operators by name, in order of registration."""
    return dict(_registry)


def get(name: str) -> Op:
    if name not in _registry:
        raise ValueError(f"no operator {name!r}; registered are {', '.join(_registry)}")
    return _registry[name]


def register(op: Op) -> Op:
    """Define the operator in `torch.library` with its implementations, fake and Autograd kernel."""
    if op.name in _registry:
        raise ValueError(f"operator {op.name} is already registered")
    _define(op.name + op.schema)
    _implement(op.name, _functional(op), _fake(op))
    if op.mutates:
        _fall_through(op.name)
    else:
        _refuse_gradients(op)
    if op.outputs:
        _define(f"{op.name}.out{op.out_schema}")
        _implement(f"{op.name}.out", _out(op), _check_outputs(op))
        _fall_through(f"{op.name}.out")
    _registry[op.name] = op
    return op


def _define(schema: str) -> None:
    # Exact strides: the byte kv_formats and padded block strides of caches are part of what an operator reads.
    _library.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))


def _implement(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for key in DEVICE_KEYS:
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _returned(outputs: tuple[torch.Tensor, ...]) -> Any:
    """What a schema returns: nothing, one tensor, or a tuple."""
    return outputs if len(outputs) > 1 else outputs[0] if outputs else None


def complete(op: Op, known: Known, args: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """A functional call of which everything is known; all arguments in the schema's order."""
    outputs = known.allocate()
    _validate(op, args, options)
    if _grad_enabled():
        _start_below_autograd(known, outputs, args)
    else:
        known.start(outputs, *args)
    return _returned(outputs)


def _functional(op: Op) -> Callable[..., Any]:
    positional, names, defaults, lists = op.positional, *_split(op.options), op.takes_lists

    def call(*args: Any, **kwargs: Any) -> Any:
        args += positional[len(args) :]
        options = tuple(map(kwargs.get, names, defaults))
        if lists:
            options = _hashable(options)
        key = dispatch.metadata(op.name, args, options)
        known = dispatch.known(key)
        if known is not None:
            return complete(op, known, args, options)
        given = dict(zip(op.options, options, strict=True))
        allocate = allocator(op.specify(*args, **given), args[0].device)
        outputs = allocate()
        _validate(op, args, options)
        found = Known(allocate, _ready(op, outputs, args, given), tuple(map(type, options)), {})
        _start_below_autograd(dispatch.remember(key, found), outputs, args)
        return _returned(outputs)

    return call


def _split(options: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The names and the defaults: a keyword argument that the dispatcher leaves out is at its default."""
    return tuple(options), tuple(options.values())


def _hashable(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lists as tuples, which a key may hold."""
    return tuple([tuple(value) if isinstance(value, list) else value for value in options])


def _ready(op: Op, outputs: tuple[torch.Tensor, ...], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """(outputs, *args) -> None of the backend that is chosen for such a call."""
    first = args[0]
    problem = op.problem(*args, **given)
    choice = dispatch.choose(op.name, op.backends, problem, dispatch.arch_of(first), first.device.type)
    backend, config = choice.backend, choice.offer.config
    if backend.ready is not None:
        return backend.ready(config, outputs, *args, **given)

    def start(outputs: tuple[torch.Tensor, ...], *args: Any) -> None:
        backend.run(config, outputs, *args, **given)

    return _with_a_reason(op.name, choice, start) if first.is_cuda and backend.name == "reference" else start


def _with_a_reason(name: str, choice: dispatch.Choice, start: Callable[..., None]) -> Callable[..., None]:
    """Where a capture fails because the reference reads lengths on the host, say why the reference ran."""

    def run(outputs: tuple[torch.Tensor, ...], *args: Any) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        try:
            start(outputs, *args)
        except RuntimeError as error:
            if not capturing:
                raise
            reasons = "; ".join(f"not {who}: {why}" for who, why in choice.refused)
            raise RuntimeError(
                f"{name}: a CUDA graph cannot hold the fp32 reference, which reads lengths on the host and runs here "
                f"because nothing else takes the call ({reasons})"
            ) from error

    return run


def _fake(op: Op) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _returned(empty(op.specify(*args, **kwargs), dispatch.first_tensor(args).device))

    return call


def _out(op: Op) -> Callable[..., None]:
    check, name = _check_outputs(op), f"{op.name}.out"
    positional, lists, own = op.positional, op.takes_lists, len(op.out_options)
    names, defaults = _split(op.out_options | dict.fromkeys(op.outputs))

    def call(*args: Any, **kwargs: Any) -> None:
        args += positional[len(args) :]
        found: tuple[Any, ...] = tuple(map(kwargs.get, names, defaults))
        options, outputs = found[:own], found[own:]
        if lists:
            options = _hashable(options)
        tensors = args + outputs
        known = repeats.find(name, tensors, options)
        if known is None:
            key = dispatch.metadata(name, tensors, options)
            known = dispatch.known(key)
            if known is None:
                check(*args, **kwargs)
            else:
                repeats.keep(name, tensors, options, known)
        _validate(op, args, options, outputs)
        if known is None:
            start = _ready(op, outputs, args, dict(zip(op.out_options, options, strict=True)))
            known = dispatch.remember(key, Known(tuple, start, tuple(map(type, options)), {}))
        if _grad_enabled():
            _start_below_autograd(known, outputs, args)
        else:
            known.start(outputs, *args)

    return call


def _check_outputs(op: Op) -> Callable[..., None]:
    """(*args, **kwargs) of the `.out` overload -> raises where the caller's outputs are not what is specified."""

    def check(*args: Any, **kwargs: Any) -> None:
        functional = {name: value for name, value in kwargs.items() if name in op.options}
        device = dispatch.first_tensor(args).device
        for name, expected in zip(op.outputs, op.specify(*args, **functional), strict=True):
            given = kwargs[name]
            same_shape = given.dim() == len(expected.shape) and all(
                g == e for g, e in zip(given.shape, expected.shape, strict=True)
            )
            if not same_shape or given.dtype != expected.dtype or given.device != device:
                raise ValueError(
                    f"{op.name}.out: {name} is {given.dtype} {tuple(given.shape)} on {given.device}; "
                    f"these arguments need {expected.dtype} {tuple(expected.shape)} on {device}"
                )
            if given.dim() > 1 and checks.strided(given):
                raise ValueError(
                    f"{op.name}.out: {name} has strides {given.stride()}; its last dimension must be contiguous"
                )
            if any(
                checks.certain(s == 0) and checks.certain(n > 1)
                for n, s in zip(given.shape, given.stride(), strict=True)
            ):
                raise ValueError(
                    f"{op.name}.out: {name} has strides {given.stride()} for {tuple(given.shape)}; rows that share "
                    "memory cannot be written: give a tensor that was not expanded"
                )

    return check


def _validate(op: Op, args: tuple[Any, ...], options: tuple[Any, ...], outputs: tuple[torch.Tensor, ...] = ()) -> None:
    if not (args[0].is_cpu or debug.enabled()):
        return
    if op.validate is not None:
        # The `.out` overload's own options come last and concern no value.
        op.validate(*args, **dict(zip(op.options, options, strict=False)))
    _refuse_shared_memory(op, args, outputs)


def _refuse_shared_memory(op: Op, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """ValueError where an output lies in memory of an argument, or of another output."""
    needed = [(name, leaf) for name, value in zip(op.arguments, args, strict=False) for leaf in tree_leaves(value)]
    for name, output in zip(op.outputs, outputs, strict=False):
        for other, value in needed:
            if isinstance(value, torch.Tensor) and checks.share_memory(output, value):
                raise ValueError(
                    f"{op.name}.out: {name} shares memory with {other}, which the call still needs when it writes "
                    f"{name}; give {name} memory of its own"
                )
        needed.append((name, output))


def _fall_through(name: str) -> None:
    """An operator that writes into its arguments has nothing to tell autograd: with gradients on, its implementation is
    below it. A kernel in Python that does so and dispatches once more takes 5 us, as much as the rest of the call."""
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")


def _start_below_autograd(known: Known, outputs: tuple[torch.Tensor, ...], args: tuple[Any, ...]) -> None:
    """Fill the outputs; what is written carries no gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        known.start(outputs, *args)


_define("refuse_backward(Tensor grad, SymInt[] size, str op) -> Tensor")


def _refuse_backward(grad: torch.Tensor, size: Sequence[int], op: str) -> torch.Tensor:
    raise RuntimeError(f"{op} has no backward: it is an inference operator; detach its inputs or use torch.no_grad()")


# An operator of its own, so that a compiled forward over tensors that require grad works and only backward() raises.
_implement("refuse_backward", _refuse_backward, lambda grad, size, op: grad.new_empty(size))


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
