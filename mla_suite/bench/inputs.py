"""Tensors of a case, copies of them to rotate through, and how far off a result is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import mla_suite
from mla_suite.bench.sets import Case
from mla_suite.core import allocation, check_mode
from mla_suite.core.op import Op
from mla_suite.ops.decode import DecodeArgs

PLAN = DecodeArgs.__match_args__.index("plan")


class Call(NamedTuple):
    """Arguments of one operator call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def make(case: Case, device: torch.device) -> Call:
    """Fresh tensors of a case, with its plan where it has one."""
    return with_plan(case, Call(*case.sample.make(device)))


def with_plan(case: Case, call: Call) -> Call:
    """The call of a case with its balanced plan, where it has one."""
    args, kwargs = call
    if not case.planned:
        return call
    q, seq_lens, cu_seqlens_q = args[0], args[2], args[6]
    made = mla_suite.plan(
        seq_lens,
        cu_seqlens_q,
        num_heads=case.facts["heads"],
        max_seqlen_q=case.facts["q_len"],
        max_seqlen_kv=int(seq_lens.max()) if len(q) else 0,
        num_sm_parts=case.parts or None,
    )
    return Call((*args[:PLAN], made, *args[PLAN + 1 :]), kwargs)


def copy(call: Call) -> Call:
    """The same call on tensors of its own, with the same strides."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # clone() would drop the padding between blocks that a kv_format prescribes
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)

    return Call(*pytree.tree_map(copied, tuple(call)))


def rotation(call: Call, count: int) -> list[Call]:
    """The call and `count` - 1 copies of it; fewer when a third of the device's free memory does not hold them."""
    tensors = [leaf for leaf in pytree.tree_leaves(tuple(call)) if isinstance(leaf, torch.Tensor)]
    if tensors and tensors[0].is_cuda:
        held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        device = tensors[0].device
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
        count = max(1, min(count, 1 + free // 3 // max(held, 1)))
    return [call, *(copy(call) for _ in range(count - 1))]


def outputs_for(op: Op, call: Call) -> tuple[torch.Tensor, ...]:
    """Empty outputs as the operator allocates them."""
    device = next(leaf for leaf in call.args if isinstance(leaf, torch.Tensor)).device
    return allocation.empty(op.specify(*call.args, **call.kwargs), device)


def error(op: Op, config: Any, outputs: tuple[torch.Tensor, ...], call: Call) -> float:
    """Relative error of a call's first result, by norm; ValueError, in a sentence, where a value is further off than
    the operator allows a backend with this configuration, as in check mode."""
    results = check_mode.compared(op, config, outputs, op.Args(*call.args, **call.kwargs))
    wrong = check_mode.first_difference(results)
    if wrong is not None:
        raise ValueError(wrong)
    got, exact = results[0].got.double(), results[0].exact.double()
    asked = got.isfinite() & exact.isfinite()  # nothing is asked of rows behind the last token
    return float((got - exact)[asked].norm() / exact[asked].norm().clamp(min=1e-30))
