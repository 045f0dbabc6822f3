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


def check_layouts(module: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The backend writes `run`'s out into a part of a larger tensor, whose strides do not merge, and its lse by heads
    and apart, with -inf and +inf for rows that see no key."""
    record = register.get(op)
    answer = module.supports(record.problem(*args, **kwargs), None)
    assert isinstance(answer, Supported), answer
    out, lse = run(module, op, args, kwargs)
    assert bool((lse == -torch.inf).any())
    order = (0, 2, 1) if lse.dim() == 3 else (1, 0)
    for plus_inf in (False, True):
        room = torch.full((*(lse.shape[axis] + 1 for axis in order), 2), 7.0)
        view = room[(*[slice(1, None)] * lse.dim(), 1)].permute(order)
        out_room = torch.full([size + 1 for size in out.shape], 7.0, dtype=out.dtype)
        mine = out_room[tuple([slice(size) for size in out.shape])]
        module.run(answer.config, (mine, view), record.Args(*args, **kwargs, plus_inf_lse=plus_inf))
        assert torch.equal(mine, out)
        assert torch.equal(view, lse.masked_fill(lse == -torch.inf, torch.inf) if plus_inf else lse)
        for written, around in ((view, room), (mine, out_room)):
            written.fill_(7.0)
            assert bool((around == 7.0).all()), "something was written beside an output"
