"""Calls of an operator's `.out` overload for the interfaces of other libraries.

The overload writes lse in the other library's layout. A call with the metadata of an earlier call skips all checks but
those of metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mla_suite.core import allocation, eager
from mla_suite.core.op import Op, Output
from mla_suite.core.prepared import KnownCalls, PreparedCall, add_prepared, fixed, hashable, plain, prepared_call
from mla_suite.core.register import WithoutBackward


class DirectCall(NamedTuple):
    """One kind of call of an operator whose outputs are out and lse.

    op          the operator
    tensors_of  the function's own tensors, the first of which is q -> all positional arguments of the operator
    options     all keyword arguments of the `.out` overload, in the schema's order
    """

    op: Op
    tensors_of: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    options: tuple[Any, ...]

    def run(
        self, given: tuple[Any, ...], head_dim_v: int, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`out` or a new [batch, q_len, heads, head_dim_v], and lse [batch, q_len, heads] whose memory is [batch,
        heads, q_len], filled by the operator. Raises what the operator raises, and nothing is launched then."""
        q = given[0]
        batch, q_len, heads, _ = q.shape
        if out is None:
            dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype  # of float8 queries
            out = q.new_empty((batch, q_len, heads, max(head_dim_v, 0)), dtype=dtype)
        strides = heads * q_len, 1, q_len  # of a tensor of its own, since views carry no gradient through `.out`
        lse = q.new_empty_strided((batch, q_len, heads), strides, dtype=torch.float32)
        self._call(given, (out, lse))
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            read = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
            if read:
                out, lse = (WithoutBackward.apply(result, self.op.name, *read) for result in (out, lse))
        return out, lse

    def _call(self, given: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        named = dict(zip(self.op.out.options, self.options, strict=True))
        operator = getattr(torch.ops.mla_suite, self.op.name).out
        operator(*self.tensors_of(given), **named, **dict(zip(self.op.outputs, outputs, strict=True)))

    def store(
        self,
        known: KnownCalls,
        given: tuple[Any, ...],
        settings: tuple[Any, ...],
        outputs: tuple[torch.Tensor, ...],
        allocates_out: bool = True,
    ) -> None:
        """Have `eager.lookup(known, ...)` find calls like this one, which `run` has just made with these outputs.

        Where the caller gives out, the operator's own fast path is taken, since it sees whether out overlaps an input;
        the prepared call then allocates lse alone.
        """
        if torch.compiler.is_dynamo_compiling() or eager.observed():
            return
        if not (plain(given) and fixed(settings) and fixed(self.options)):
            return
        op, tensors_of, options = self.op, self.tensors_of, self.options
        tensors = tensors_of(given)
        if len(tensors) != len(op.out.positional):
            raise TypeError(
                f"{op.name} takes {len(op.out.positional)} tensors, not {len(tensors)}: no call is like them"
            )
        made = prepared_call(op.out.known.key(tensors + outputs, hashable(options)))
        if made is None:
            return
        new = outputs if allocates_out else outputs[1:]
        specs = [Output(tuple(output.shape), output.dtype) for output in new]
        allocate = allocation.allocator(specs, given[0].device, [output.stride() for output in new])
        launch = made.launch

        def start(outputs: tuple[torch.Tensor, ...], given: tuple[Any, ...]) -> None:
            tensors = tensors_of(given)
            if tensors[0].is_cpu:
                op.validate_values(tensors, options)
            launch((), tensors + outputs)  # outputs are the last tensors of `.out`

        run = start if allocates_out else lambda outputs, given: self._call(given, outputs)
        prepared = PreparedCall(allocate, run, tuple(map(type, settings)))
        add_prepared(known.key(given, settings), prepared)
        known.keep(given, settings, prepared)
