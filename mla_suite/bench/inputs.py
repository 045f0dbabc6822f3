"""Tensors of a case, copies of them to rotate through, and whether a result is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import mla_suite
from mla_suite import testing
from mla_suite.bench.sets import Case
from mla_suite.core import allocation, register
from mla_suite.core.op import Op
from mla_suite.ops.decode import DecodeArgs

PLAN = DecodeArgs.__match_args__.index("plan")
EXACT_BYTES = 8 << 20
"""Cases up to this size are compared with an exact result in fp64 on the CPU, larger ones with the reference."""

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""Largest |got - expected| / |expected| of a whole result, by its dtype: its own rounding and that of P."""
ROW_FACTOR = 4
"""A single row may be this much further off: a result is not right on average only."""
LSE_TOLERANCE = 2e-3
"""Absolute, or relative above 1: fp32 sums over keys that a kernel may have rounded to bf16 after rotating them."""


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


def result(op: Op, run: Callable[..., None], call: Call) -> tuple[torch.Tensor, ...]:
    """Returns what a backend computes into poisoned outputs, then the arguments it wrote. `call` is left as it was."""
    own = copy(call) if op.mutates else call
    outputs = tuple(testing.poison(tensor) for tensor in outputs_for(op, own))
    run(outputs, *own.args, **own.kwargs)
    return (*outputs, *(own.args[op.functional.arguments.index(name)] for name in op.mutates))


def by_definition(op: Op, call: Call) -> tuple[torch.Tensor, ...]:
    """`result` of the operator's reference, the last of its backends."""
    return result(op, lambda outputs, *a, **k: op.backends[-1].run(None, outputs, op.Args(*a, **k)), call)


class Right(NamedTuple):
    """A right result, its source, and the error allowed to a backend with fp8 softmax weights.

    outputs      as the operator returns them, then the arguments that it writes
    source       `fp64` or `reference`
    fp8_weights  [..., head_dim_v] elements of the first output; None where the queries are not fp8
    """

    outputs: tuple[torch.Tensor, ...]
    source: str
    fp8_weights: torch.Tensor | None = None


def expected(case: Case, call: Call) -> Right:
    """The right result of a call: in fp64 where that is quick, or needed because the queries are fp8."""
    op = register.get(case.op)
    fp8 = case.op == "decode" and call.args[0].element_size() == 1
    if case.op == "decode" and (fp8 or case.sample.bytes <= EXACT_BYTES):
        if case.sample.bytes <= EXACT_BYTES:
            call = Call(
                *pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, tuple(call))
            )
        return exact(call)
    return Right(by_definition(op, call), "reference")


def exact(call: Call) -> Right:
    """The result of a decode call in fp64, on the device of its tensors."""
    found = testing.exact_decode(*call.args, **call.kwargs)
    fp8 = call.args[0].element_size() == 1
    return Right((found.out, found.lse), "fp64", testing.fp8_weights_bound(*call.args, **call.kwargs) if fp8 else None)


def error(
    got: Sequence[torch.Tensor], right: Sequence[torch.Tensor], *, fp8_weights: torch.Tensor | None = None
) -> float:
    """Relative error of a result's first tensor; ValueError, in a sentence, when a tensor is not what it should be.

    Floating point: by norm, over everything and row by row. Integers: equal. A tensor of one rank less is lse.

    fp8_weights  what elements of the first tensor may be off by, where softmax weights were rounded to fp8
    """
    worst = 0.0
    for index, (mine, theirs) in enumerate(zip(got, right, strict=True)):
        if not mine.is_floating_point():
            if not torch.equal(mine.to(theirs.device), theirs):
                raise ValueError(f"tensor {index} of the result differs from the reference")
            continue
        mine_, theirs_ = mine.to(theirs.device).double(), theirs.double()
        if mine.dim() < got[0].dim():
            _check_lse(mine_, theirs_)
            continue
        off, size = (mine_ - theirs_).norm(dim=-1), theirs_.norm(dim=-1)
        whole = (off.norm() / size.norm().clamp(min=1e-30)).item()
        if fp8_weights is not None and index == 0:
            _check_fp8_weights(mine, theirs_, fp8_weights)
        else:
            _check_norms(mine, whole, (off / size.clamp(min=1e-30)).max().item() if off.numel() else 0.0, index)
        worst = max(worst, whole)
    return worst


def _check_norms(mine: torch.Tensor, whole: float, row: float, index: int) -> None:
    allowed = TOLERANCE[mine.dtype]
    if not (whole <= allowed and row <= ROW_FACTOR * allowed):  # a NaN compares false
        raise ValueError(
            f"tensor {index} is off by {whole:.1e}, its worst row by {row:.1e}; "
            f"{mine.dtype} allows {allowed:.0e} and {ROW_FACTOR * allowed:.0e}"
        )


def _check_fp8_weights(mine: torch.Tensor, theirs: torch.Tensor, bound: torch.Tensor) -> None:
    allowed = bound + testing.ulp(theirs, mine.dtype)
    times = ((mine.to(theirs.device).double() - theirs).abs() / allowed).max().item() if mine.numel() else 0.0
    if not times <= 1.0:
        raise ValueError(f"tensor 0 is {times:.1e} times as far off as softmax weights in fp8 allow")


def _check_lse(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    finite = theirs.isfinite()
    if not torch.equal(torch.where(finite, 0.0, mine), torch.where(finite, 0.0, theirs)):
        raise ValueError("lse is not the infinity it should be")
    off = torch.where(finite, (mine - theirs).abs() / theirs.abs().clamp(min=1.0), 0.0)
    if off.numel() and not off.max().item() <= LSE_TOLERANCE:
        raise ValueError(f"lse is off by {off.max().item():.1e}; {LSE_TOLERANCE:.0e} is allowed")
