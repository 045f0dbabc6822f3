"""The backends of an operator that can run a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from mla_suite.bench import inputs
from mla_suite.bench.inputs import Call, Right
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

    run          one call, as it is timed on the device
    answer       its result, comparable with the reference's: outputs were poisoned before
    eager        one call as a user makes it, for host time
    fp8_weights  whether it rounds softmax weights to fp8, which have an error bound of their own
    """

    name: str
    config: str
    reason: str
    run: Callable[[Call], object]
    answer: Callable[[Call], Tensors]
    eager: Callable[[Call], object]
    fp8_weights: bool = False

    def error(self, call: Call, right: Right) -> float:
        """Relative error of its result; ValueError, in a sentence, when that is not right."""
        bound = right.fp8_weights if self.fp8_weights else None
        return inputs.error(self.answer(call), right.outputs, fp8_weights=bound)


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
        outputs = inputs.outputs_for(op, call)
        run_into(outputs, *call.args, **call.kwargs)
        return outputs

    def run_into(outputs: Tensors, *args: Any, **kwargs: Any) -> None:
        record = op.Args(*args, **kwargs)
        backend.run(config, outputs, record, op.seen(record))

    answer = partial(inputs.result, op, run_into)
    named = "" if config is None else str(config)
    return Runner(backend.name, named, reason, run, answer, run, fp8_weights(config))


def fp8_weights(config: Any) -> bool:
    """Whether a kernel of this configuration rounds softmax weights to fp8."""
    return bool(getattr(config, "fp8_weights", False))
