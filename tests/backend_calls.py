"""Backends of an operator, called with the operator's own arguments; and what callers ask an operator for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_suite.core.dispatch import Backend, Supported, Unsupported
from mla_suite.core.op import Op


class BackendCalls:
    """One backend of an operator by name."""

    def __init__(self, op: Op, name: str) -> None:
        self.op = op
        self.backend: Backend = next(backend for backend in op.backends if backend.name == name)

    def supports(self, problem: Any, arch: Any) -> Supported | Unsupported:
        return self.backend.supports(problem, arch)

    def run(self, config: Any, outputs: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> None:
        self.backend.run(config, outputs, self.op.Args(*args, **kwargs))

    def prepare(self, config: Any, outputs: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        return self.backend.prepare(config, outputs, self.op.Args(*args, **kwargs))


def assert_refused(answer: Supported | Unsupported, sentence: str) -> None:
    """A backend does not take a problem, and says why."""
    assert isinstance(answer, Unsupported), answer
    assert sentence in answer.reason


class Asked(TorchDispatchMode):
    """The values of one keyword argument in the calls of an overload while the block runs, `default` where left out."""

    def __init__(self, overload: Any, name: str, default: Any) -> None:
        super().__init__()
        self.overload, self.name, self.default = overload, name, default
        self.values: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.overload:
            self.values.append(kwargs.get(self.name, self.default))
        return func(*args, **(kwargs or {}))
