"""A call that is due in check mode: its results are compared with the exact ones; a wrong one is reported and saved.

The exact results are those of the reference, attention in fp64, from the call's own inputs after the call. No operator
changes what its results depend on: append_kv writes whole rows, whose former values count for nothing.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from mla_suite.core import allocation, checks, dispatch, saved_call
from mla_suite.core.dispatch import Choice
from mla_suite.core.op import Compared, Op
from mla_suite.errors import WrongResult

logger = logging.getLogger("mla_suite.check")


ON_DIFFERENCE = ("warn", "raise")


class Check:
    """A switched-on check mode: it counts the calls of each operator, in every thread that shares it."""

    def __init__(self, every: int, on_difference: str) -> None:
        self.every, self.on_difference = every, on_difference
        self._calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    def due(self, op: str) -> bool:
        """Count a call of an operator; whether it is the first, or n calls after the last that was due."""
        return next(self._calls[op]) % self.every == 0


_checking: ContextVar[Check | None] = ContextVar(  # the default counts for all contexts
    "mla_suite_checking", default=Check(checks.CHECK_EVERY, "warn") if checks.CHECK_EVERY else None
)
checking: Callable[[], Check | None] = _checking.get


@contextmanager
def check(every: int = 1, *, on_difference: str = "warn") -> Iterator[None]:
    """While the block runs, compare every n-th call of each operator with the reference, on the call's own inputs.

    every          n; the first call is checked, and then each n-th. 0 turns it off
    on_difference  `warn` logs the first value that is further off than the stated bounds allow, `raise` raises that as
                   a `WrongResult`

    The call is saved to a file that `python -m mla_suite replay FILE` runs again, in the folder `MLA_SUITE_CHECK_DIR`
    or a new temporary one. `MLA_SUITE_CHECK=n` turns it on for a process (read once at import). A call that the
    reference serves has nothing to be compared with, and one that a CUDA graph captures cannot be: both pass unchecked.
    """
    if not checks.is_whole(every) or every < 0:
        raise ValueError(
            f"check: every is {every!r}; it takes a whole number n, to check every n-th call, or 0 for none"
        )
    if on_difference not in ON_DIFFERENCE:
        raise ValueError(f"check: on_difference is {on_difference!r}; it takes {' or '.join(ON_DIFFERENCE)}")
    with checks.switched(_checking, Check(int(every), on_difference) if every else None):
        yield


class Call(NamedTuple):
    """A call of an operator that has returned.

    outputs   the tensors that it made, or was given by the `.out` overload
    tensors   every positional argument in the schema's order
    options   every keyword argument likewise
    """

    op: Op
    outputs: tuple[torch.Tensor, ...]
    tensors: tuple[Any, ...]
    options: tuple[Any, ...]

    @property
    def record(self) -> Any:
        return self.op.bind(self.tensors, self.options)


def run(call: Call, on_difference: str) -> None:
    """Check a call that has returned. WrongResult where a difference is to raise."""
    op = call.op
    if call.tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        _skipped(op, "a CUDA graph captures it", "run the model without graphs to check what they replay")
        return
    choice = op.choose(call.record)
    if choice.backend.name == "reference":
        return
    try:
        op.validate_values(call.tensors, call.options)  # the reference indexes with them
    except ValueError as error:
        _skipped(op, "its arguments are not right", str(error))
        return
    try:
        found = difference(call, choice.supported.config)
    except torch.OutOfMemoryError as error:
        _skipped(op, "the reference needs more memory than is free", str(error))
        return
    if found is not None:
        sentence = f"{op.name} ran as {served_by(call, choice)} and is wrong: {found}; {_arguments(call)}"
        sentence += f"; {saved_call.save(call, choice, sentence)}"
        if on_difference == "raise":
            raise WrongResult(sentence)
        logger.warning("%s", sentence)


def difference(call: Call, config: Any) -> str | None:
    """The first value that is further off than allowed, in words; None where there is none."""
    return first_difference(compared(call.op, config, call.outputs, call.record))


def compared(op: Op, config: Any, outputs: tuple[torch.Tensor, ...], record: Any) -> Sequence[Compared]:
    """The results of a call that a backend ran with `config` beside the exact ones."""
    device = getattr(record, op.functional.arguments[0]).device
    with torch.autocast(device.type, enabled=False):  # it would round operands to 16 bits
        return _equal(op, outputs, record, device) if op.compare is None else op.compare(config, outputs, record)


def first_difference(results: Sequence[Compared]) -> str | None:
    """The first value that is further off than allowed, in words; None where there is none."""
    return next(filter(None, map(_first_difference, results)), None)


def _equal(op: Op, outputs: tuple[torch.Tensor, ...], record: Any, device: torch.device) -> Sequence[Compared]:
    """The outputs beside those of the reference, which sees the rounded bounds that the call was made with."""
    record = op.seen(record)
    exact = allocation.empty(op.check(record), device)
    op.backends[-1].run(None, exact, record)
    return [
        Compared(f"output {at}" if len(exact) > 1 else "the output", got, right, 0.0)
        for at, (got, right) in enumerate(zip(outputs, exact, strict=True))
    ]


def _first_difference(result: Compared) -> str | None:
    name, got, exact, allowed = result
    limit = torch.as_tensor(allowed, dtype=torch.float64, device=got.device).expand(got.shape)
    # A value that the exact one rounds to is right, the same infinity too; NaN is right where NaN is exact.
    same = (got == exact.to(got.dtype)) | (got.isnan() & exact.isnan())
    off = (got.double() - exact.double()).abs()
    wrong = ~(same | (off <= limit) | (limit == torch.inf))
    count = int(wrong.sum())
    if not count:
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    largest = torch.where(wrong, off, 0.0).nan_to_num(torch.inf).max().item()
    return (
        f"{name} at {list(at)} is {got[at].item():.6g}, exact is {exact[at].item():.6g}, and {limit[at].item():.3g} is "
        f"allowed between them; {count} of {got.numel()} values are too far off, the furthest by {largest:.3g}"
    )


def served_by(call: Call, choice: Choice) -> str:
    """The backend, its configuration and the arch, in words."""
    config, first = choice.supported.config, call.tensors[0]
    instance = getattr(config, "instance", None)
    named = f" ({instance})" if isinstance(instance, str) else "" if config is None else f" ({config})"
    arch = dispatch.arch_of(first) if choice.backend.name != "reference" else None
    where = first.device.type if arch is None else f"an emulated {arch.name}" if first.is_cpu else arch.name
    return f"{choice.backend.name}{named} on {where}"


def _arguments(call: Call) -> str:
    """Sizes and dtypes of the tensors that were given, and the options that are not at their defaults."""
    options = zip(call.op.out.options.items(), call.options, strict=False)
    given = [*zip(call.op.functional.arguments, call.tensors, strict=False)]
    given += [(name, value) for (name, default), value in options if value != default]
    return ", ".join(f"{name} {_shape(value)}" for name, value in given if value is not None)


def _shape(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shape, value))}]"
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return str(value)


def _skipped(op: Op, reason: str, detail: str) -> None:
    """Log a reason once for each operator, with the detail of the first call that has it."""
    dispatch.warn_once(f"check of {op.name}: {reason}", f"a call of {op.name} is not checked: {reason}: {detail}")
