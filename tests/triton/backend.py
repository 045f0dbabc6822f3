"""How these tests call a backend: its outputs are poisoned before it runs."""

from typing import Any

import torch

from mla_suite import testing
from mla_suite.core import register
from mla_suite.core.dispatch import Supported

CPU = torch.device("cpu")


def run(module: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The backend's outputs, poisoned before it runs."""
    record = register.get(op)
    answer = module.supports(record.problem(*args, **kwargs), None)
    assert isinstance(answer, Supported), answer
    outputs = tuple(testing.poison(torch.empty(o.shape, dtype=o.dtype)) for o in record.specify(*args, **kwargs))
    module.run(answer.config, outputs, record.Args(*args, **kwargs))
    return outputs
