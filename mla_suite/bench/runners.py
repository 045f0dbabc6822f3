"""The backends of an operator that can run a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from mla_suite import testing
from mla_suite.bench import inputs
from mla_suite.bench.inputs import Call
from mla_suite.core import dispatch
from mla_suite.core.dispatch import Backend, Supported
from mla_suite.core.op import Op

Tensors = tuple[torch.Tensor, ...]


class Refused(NamedTuple):
    """A backend that cannot run a case, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Runner:
    """A backend on one case.

    run    one call, as it is timed on the device
    error  how far its result is off; ValueError, in a sentence, when that is not right
    eager  one call as a user makes it, for host time
    """

    name: str
    config: str
    reason: str
    run: Callable[[Call], object]
    error: Callable[[Call], float]
    eager: Callable[[Call], object]


def backends(op: Op, call: Call, names: Sequence[str], device: torch.device) -> Iterator[Runner | Refused]:
    """Each backend of the operator that is asked for."""
    problem = op.problem(*call.args, **call.kwargs)
    arch = dispatch.arch_of(dispatch.first_tensor(call.args))
    chosen = dispatch.choose(op.name, op.backends, problem, arch, device.type).backend
    operator = getattr(torch.ops.mla_suite, op.name)
    for backend in op.backends:
        if backend.name not in names:
            continue
        if device.type not in backend.devices:
            yield Refused(backend.name, f"it runs on {' and '.join(backend.devices)}, not on {device.type}")
            continue
        answer = backend.supports(problem, arch)
        if isinstance(answer, Supported):
            made = configured(op, backend, answer.config, answer.reason)
            # Users reach what dispatch prefers through the operator; the others only by a direct call.
            eager = (lambda call: operator(*call.args, **call.kwargs)) if backend is chosen else made.run
            yield replace(made, eager=eager)
        else:
            yield Refused(backend.name, answer.reason)


def configured(op: Op, backend: Backend, config: Any, reason: str) -> Runner:
    """A backend with a configuration of the caller's choice, and with the launches of a user's call."""

    def run(call: Call) -> Tensors:
        return into(inputs.outputs_for(op, call), call)

    def into(outputs: Tensors, call: Call) -> Tensors:
        record = op.Args(*call.args, **call.kwargs)
        backend.run(config, outputs, record, op.seen(record))
        return outputs

    def error(call: Call) -> float:
        own = inputs.copy(call) if op.mutates else call
        outputs = into(tuple(testing.poison(tensor) for tensor in inputs.outputs_for(op, own)), own)
        return inputs.error(op, config, outputs, own)

    named = "" if config is None else str(config)
    return Runner(backend.name, named, reason, run, error, run)
