"""Backends of an operator, called with the operator's own arguments."""

from __future__ import annotations

from typing import Any

import torch

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
