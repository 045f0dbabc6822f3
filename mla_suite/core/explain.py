"""Why a call would run where it would: the backend dispatch chooses, its reason, and who refused."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from mla_suite.core import dispatch, library
from mla_suite.core.dispatch import Choice


@dataclass(frozen=True)
class Explanation:
    """One choice, printable.

    op, arch   names; arch is None on a CPU that emulates nothing
    choice     backend, offer (its configuration; its reason names the tuned table's file and row where one decided) and
               the refusals of the backends preferred to it
    notes      which context the choice used
    problem    all it could depend on
    """

    op: str
    arch: str | None
    choice: Choice
    notes: tuple[str, ...]
    problem: Hashable

    @property
    def backend(self) -> str:
        return self.choice.backend.name

    @property
    def reason(self) -> str:
        return self.choice.offer.reason

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        return self.choice.refused

    def __str__(self) -> str:
        config = self.choice.offer.config
        lines = [f"{self.op} on {self.arch or 'cpu'} -> {self.backend}: {self.reason}"]
        lines += [f"  config: {config}"] if config is not None else []
        lines += [f"  not {name}: {reason}" for name, reason in self.refused]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Say how `mla_suite.<op>(*args, **kwargs)` would run, without running it.

    Arguments as for the operator, checked like them; raises what the operator would raise for bad metadata.

    >>> print(explain("decode", q, kv_cache, seq_lens, block_table, softmax_scale=192**-0.5))
    decode on cpu -> reference: the fp32 definition takes every problem
      context 128 keys per sequence, from block_table width x page
    """
    record = library.get(op)
    try:
        signature(record.specify).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {op}: {error}; give the arguments of mla_suite.{op}") from None
    record.specify(*args, **kwargs)
    problem = record.problem(*args, **kwargs)
    first = dispatch.first_tensor(args or (kwargs[record.arguments[0]],))
    arch = dispatch.arch_of(first)
    choice = dispatch.choose(op, record.backends, problem, arch, first.device.type)
    # A problem may say in words what it is made from; most have nothing to add.
    notes: tuple[str, ...] = getattr(problem, "notes", tuple)()
    return Explanation(op, arch.name if arch else None, choice, notes, problem)
