"""How a call would run: the backend that dispatch chooses, its reason, and the reasons of those preferred to it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch

from mla_suite.archs import ArchSpec
from mla_suite.core import allocation, dispatch, register
from mla_suite.core.op import Op
from mla_suite.errors import CallError


@dataclass(frozen=True)
class Explanation:
    """One choice, printable.

    op, arch   names; arch is None on a CPU that emulates nothing
    backend    the backend that runs the call, with its configuration and the reason for it, which names the tuned
               table's file and row if one decided
    refused    the backends preferred to it, each with its reason
    notes      which context the choice used, how a native kernel splits the keys, and whether a GPU refuses the call
    problem    all it could depend on
    spec       the record of its launches (`launch.spec.CallSpec`) if a native kernel runs
    """

    op: str
    arch: str | None
    backend: str
    config: Any
    reason: str
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    problem: Hashable
    spec: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        serving = f"native ({self.arch})" if self.backend == "native" else self.backend
        lines = [f"{self.op} on {self.arch or 'cpu'} -> {serving}: {self.reason}"]
        lines += [f"  config: {self.config}"] if self.config is not None else []
        if self.spec is not None:
            lines.append(f"  kernels: {', '.join(launch.kernel for launch in self.spec.launches)}")
        lines += [f"  not {name}: {reason}" for name, reason in self.refused]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Say how `mla_suite.<op>(*args, **kwargs)` would run, without running it.

    The arguments are those of the operator. Bad sizes, dtypes and the like raise what the operator would raise.

    >>> print(explain("decode", q, kv_cache, seq_lens, block_table, softmax_scale=192**-0.5))
    decode on cpu -> reference: fp32 reference (supports every input)
      not native: native kernels need ...
      not triton: needs cuda tensors, got cpu
      context 128 keys per sequence, from block_table width x page_size
    """
    record = register.get(op)
    given, outputs = _checked(record, args, kwargs)
    first = dispatch.first_tensor([getattr(given, record.functional.arguments[0])])
    arch, problem = dispatch.arch_of(first), record.describe(given)
    choice = dispatch.choose(op, record.backends, problem, arch, first.device.type)
    return _explanation(op, (outputs, given), problem, arch, choice, on_gpu=first.is_cuda)


def explain_on(arch: ArchSpec, op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Say how a call would run on a GPU of this arch, which need not be here. The tensors may be of the meta device.

    Tuned rows, objects and the number of compute units are those of this machine and of the arch's record.
    """
    record = register.get(op)
    given, outputs = _checked(record, args, kwargs)
    problem = record.describe(given)
    choice = dispatch.ask(op, record.backends, problem, arch, "cuda")
    return _explanation(op, (outputs, given), problem, arch, choice, on_gpu=True)


def _checked(record: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """(what a choice sees of the arguments, which are checked; the outputs without values)."""
    try:
        if record.defaults is not None:
            kwargs = record.defaults(*args, **kwargs)
        signature(record.Args).bind(*args, **kwargs)
    except CallError:
        raise
    except TypeError as error:
        raise TypeError(f"explain: {record.name}: {error}; give the arguments of mla_suite.{record.name}") from None
    given = record.Args(*args, **kwargs)
    return record.seen(given), allocation.empty(record.check(given), torch.device("meta"))


def _explanation(
    op: str,
    call: tuple[tuple[torch.Tensor, ...], Any],
    problem: Hashable,
    arch: ArchSpec | None,
    choice: dispatch.Choice,
    on_gpu: bool,
) -> Explanation:
    answer = choice.supported
    # A problem may say in words what it is made from, and a configuration how it splits a call; most add nothing.
    notes: tuple[str, ...] = getattr(problem, "notes", tuple)()
    spec = answer.config.spec(*call) if hasattr(answer.config, "spec") else None
    notes += () if spec is None else spec.notes
    if on_gpu and choice.needs_permission:
        notes += ("no kernel takes it: outside `with mla_suite.allow_reference():` the call is an error on a GPU",)
    name = arch.name if arch else None
    return Explanation(
        op, name, choice.backend.name, answer.config, answer.reason, choice.refused, notes, problem, spec
    )


def serving(op: str, arch: ArchSpec | None, device: str) -> str:
    """The backend that dispatch chooses for the operator's first sample that one takes on this arch and device type.

    native, triton or reference, in the order of preference over all samples of the operator.
    """
    record = register.get(op)
    answers = set()
    for sample in record.samples():
        args, kwargs = sample.make(torch.device("cpu"))
        answers.add(dispatch.ask(op, record.backends, record.problem(*args, **kwargs), arch, device).backend.name)
    return next(backend.name for backend in record.backends if backend.name in answers)
