"""The record of an operator: what torch's registration, dispatch, tests and benchmarks derive everything else from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch

from mla_suite.core import dispatch
from mla_suite.core.dispatch import Backend, Choice
from mla_suite.core.prepared import KnownCalls, Rounded

NAMESPACE = "mla_suite"


_KINDS = {
    **{"torch.Tensor": "Tensor", "int": "SymInt", "torch.dtype": "ScalarType", "Sequence[str]": "str[]"},
    **{"Sequence[torch.Tensor]": "Tensor[]", "Sequence[torch.Tensor | None]": "Tensor?[]"},
}
"""The annotation of an argument -> its type in a schema, where that has another name."""


def _argument(entry: Field[Any], writes: str = "") -> str:
    """One argument of a schema. A list of tensors has no default there: the public function spells None out."""
    annotation = str(entry.type).removesuffix(" | None")
    kind = _KINDS.get(annotation, annotation) + ("(a!)" if entry.name == writes else "")
    if entry.default is MISSING or annotation.startswith("Sequence"):
        return f"{kind} {entry.name}"
    return f"{kind}{'?' if entry.default is None else ''} {entry.name}={entry.default!r}"


class Output(NamedTuple):
    """An output to allocate: contiguous, on the device of the operator's first tensor."""

    shape: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Sample:
    """A named problem: `make(device)` returns fresh (args, kwargs); bytes and flops are the least a kernel must do."""

    name: str
    make: Callable[[torch.device], tuple[tuple[Any, ...], dict[str, Any]]]
    bytes: int
    flops: int


class Compared(NamedTuple):
    """A result of a call beside the exact one.

    name     the result, as a sentence names it
    got      what a backend computed
    exact    the same in fp64, or integers
    allowed  how far each value may be off; inf where nothing is asked of it
    """

    name: str
    got: torch.Tensor
    exact: torch.Tensor
    allowed: torch.Tensor | float


@dataclass(frozen=True)
class Op:
    """One operator.

    name      as in `torch.ops.mla_suite.<name>`; of an overload that `register_overload` adds, `<name>.<overload>`
    results   as a schema says them: `(Tensor out, Tensor lse)`
    Args      frozen dataclass of the arguments, with annotations as text, from which the schema is made; a field is
              keyword-only where the schema's argument is
    check     (Args) -> the outputs; raises on bad arguments; reads metadata only
    describe  (Args) -> the hashable facts that a choice of implementation may depend on; reads metadata only
    backends  in order of preference
    samples   named problems for tests, benchmarks and the demo
    validate  (Args) -> raises on bad values inside tensors; runs on CPU and in debug mode, before any write
    writes    the argument that the operator writes; empty when it writes none
    outputs   names of the outputs in the `.out` overload; empty when the operator has no such overload
    out_only  names of the fields of Args that are arguments of the `.out` overload alone
    strided   names of the outputs that may have any strides; the last dimension of the others is contiguous
    defaults  arguments of the public function -> keyword arguments of the schema, where the two differ
    compare   (configuration, outputs, Args) after a call -> each result beside the exact one, with the stated bounds;
              without it outputs are equal to the reference's. Runs no kernel, and reads what `validate` accepted
    pages     (Args) -> name of each argument with caches -> for each of them the page ids whose values a call reads;
              without it the operator reads no cache
    rounded   (tensors, options) -> the options by which calls are known: those that only bound a length rounded up, and
              behind them, if there are any of `sized`, how many values each of those counts as having. Choices and
              launches are made from these, so one call serves many lengths. It gets whatever a caller gives
    sized     names of tensors [n] that count as `rounded` says
    """

    name: str
    results: str
    Args: type[Any]
    check: Callable[[Any], tuple[Output, ...]]
    describe: Callable[[Any], Hashable]
    backends: tuple[Backend, ...]
    samples: Callable[[], Sequence[Sample]]
    validate: Callable[[Any], None] | None = None
    writes: str = ""
    outputs: tuple[str, ...] = ()
    out_only: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()
    defaults: Callable[..., dict[str, Any]] | None = None
    compare: Callable[[Any, tuple[torch.Tensor, ...], Any], Sequence[Compared]] | None = None
    pages: Callable[[Any], dict[str, Sequence[torch.Tensor]]] | None = None
    rounded: Rounded | None = None
    sized: tuple[str, ...] = ()

    def specify(self, *args: Any, **kwargs: Any) -> tuple[Output, ...]:
        """The outputs of a call with these arguments; raises on bad ones."""
        return self.check(self.Args(*args, **kwargs))

    def problem(self, *args: Any, **kwargs: Any) -> Hashable:
        """The facts that the choice of implementation may depend on in a call with these arguments."""
        return self.describe(self.seen(self.Args(*args, **kwargs)))

    def bind(self, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
        """`Args` from all positional and all keyword arguments, those of the `.out` overload too, in schema order."""
        return self.Args(*tensors, **dict(zip(self.out.options, options, strict=False)))

    def seen(self, record: Any) -> Any:
        """The `Args` of all calls that are known as this one: what choices and launches are made from.

        Tensors of `sized` have no values there, and the sizes that `rounded` says.
        """
        if self.rounded is None:
            return record
        tensors = [getattr(record, name) for name in record.__match_args__]
        options = tuple([getattr(record, name) for name in self.out.options])
        rounded = self.rounded(tuple(tensors), options)
        if rounded == options:
            return record
        for name, size in zip(self.sized, rounded[len(options) :], strict=False):
            at = record.__match_args__.index(name)
            if tensors[at] is not None:
                tensors[at] = torch.empty(size, dtype=tensors[at].dtype, device="meta")
        return self.bind(tensors, rounded[: len(options)])

    def first(self, record: Any) -> torch.Tensor:
        """The tensor of an `Args` on whose device the call runs."""
        first: torch.Tensor = getattr(record, record.__match_args__[0])
        return first

    def choose(self, record: Any) -> Choice:
        """The backend that serves the call of an `Args`."""
        return self.choose_seen(self.seen(record))

    def choose_seen(self, record: Any) -> Choice:
        """The same for an `Args` that `seen` has answered."""
        first, problem = self.first(record), self.describe(record)
        return dispatch.choose(self.name, self.backends, problem, dispatch.arch_of(first), first.device.type)

    @property
    def qualname(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments that the functional overload writes."""
        return (self.writes,) if self.writes else ()

    @cached_property
    def functional(self) -> Overload:
        """The overload that returns new outputs."""
        return Overload(self, self.name, f"{self._given(self.out_only)} -> {self.results}", self.mutates)

    @cached_property
    def out(self) -> Overload:
        """That which the caller gives its outputs: the functional arguments, then `out_only`, then the outputs."""
        written = [f"Tensor({chr(ord('a') + i)}!) {name}" for i, name in enumerate(self.outputs)]
        return Overload(self, f"{self.name}.out", f"{self._given((), written)} -> ()", self.outputs)

    def validate_values(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None:
        """Raise on bad values inside tensors, which reads device data."""
        if self.validate is not None:
            self.validate(self.bind(tensors, options))

    def _given(self, without: Sequence[str], more: Sequence[str] = ()) -> str:
        """The fields of `Args` as a schema's arguments in parentheses, without some and with more behind them."""
        wanted = [entry for entry in fields(self.Args) if entry.name not in without]
        positional = [_argument(entry, self.writes) for entry in wanted if not entry.kw_only]
        options = [*(_argument(entry) for entry in wanted if entry.kw_only), *more]
        return f"({', '.join([*positional, *(['*'] if options else []), *options])})"


_PASSED_ON = {torch._C.FloatType: float, torch._C.IntType: int, torch._C.SymIntType: int}
_PASSED_ON |= {torch._C.BoolType: bool, torch._C.StringType: str}
"""Types of a schema -> what torch's dispatcher passes on for an argument of such a type."""


class Overload:
    """One overload of an operator as it is called: what its schema says of its arguments, and its prepared calls.

    name         decode, or decode.out
    schema       arguments and results, without the name: `(Tensor q, ..., *, float scale) -> (Tensor out, Tensor lse)`
    arguments    names of the tensors, which are the arguments that may be given by position and the outputs of `.out`
                 behind them, then of the options, which are the other keyword arguments
    positional   the defaults of those that may be given by position, None where there is none
    options      the options and their defaults, likewise
    kinds        for each option the type that torch's dispatcher passes on; None for one that has several
    required     names of the arguments without a default
    may_be_none  names of the arguments that may be left out by giving None
    needed       positions of the tensors that may not be left out
    known        the prepared calls
    """

    def __init__(self, op: Op, name: str, schema: str, written: Sequence[str]) -> None:
        """`written` are the names of the tensors that it writes."""
        declared = torch._C.parse_schema(f"{NAMESPACE}::overload{schema}").arguments
        positional = [a for a in declared if not a.kwarg_only]
        options = [a for a in declared if a.kwarg_only and a.name not in written]
        tensors = list(dict.fromkeys([*(a.name for a in positional), *written]))
        self.op, self.name, self.schema = op, name, schema
        self.arguments = (*tensors, *(a.name for a in options))
        self.positional = tuple([a.default_value for a in positional])
        self.options: dict[str, Any] = {a.name: a.default_value for a in options}
        self.kinds = tuple([_PASSED_ON.get(type(a.real_type)) for a in options])
        self.required = frozenset([a.name for a in declared if not a.has_default_value()])
        self.may_be_none = frozenset([a.name for a in declared if isinstance(a.type, torch._C.OptionalType)])
        self.needed = tuple([at for at, each in enumerate(tensors) if each in self.required])
        lists = any(isinstance(a.type, torch._C.ListType) for a in positional)
        mutated, sized = (tuple(map(tensors.index, names)) for names in (written, op.sized))
        self.known = KnownCalls(name, lists, mutated, sized, op.rounded)

    def validate_values(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None:
        """`Op.validate_values` of a call of this overload."""
        self.op.validate_values(tensors[: len(self.positional)], options)


def converted(kinds: Sequence[type | None], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Options as torch's dispatcher passes them on; `kinds` are those of `Overload`."""
    pairs = zip(kinds, options, strict=True)
    return tuple([value if value.__class__ is kind else _CONVERT.get(kind, _as_it_is)(value) for kind, value in pairs])


def _as_float(value: Any) -> Any:
    """An int or a NumPy number as a float; anything else, and an int that no float holds, as it is, to be refused."""
    if not isinstance(value, int) and (not hasattr(value, "__array__") or value.shape):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _as_int(value: Any) -> Any:
    """A number of NumPy or in a tensor [] as Python's; anything else as it is, for torch to refuse."""
    if type(value) is int or not hasattr(value, "__index__"):
        return value
    return value.item() if hasattr(value, "__array__") and not value.shape else value


def _as_it_is(value: Any) -> Any:
    return value


_CONVERT: dict[type | None, Callable[[Any], Any]] = {float: _as_float, int: _as_int}
