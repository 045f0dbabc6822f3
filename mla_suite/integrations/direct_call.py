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


class DirectCall(NamedTuple):
    """One kind of call of an operator whose outputs are out and lse.

    op          the operator
    tensors_of  the function's own tensors, the first of which is q -> all positional arguments of the operator
    options     all keyword arguments of the `.out` overload, in the schema's order
    """

    op: Op
    tensors_of: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    options: tuple[Any, ...]

    def run(self, given: tuple[Any, ...], head_dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New out [batch, q_len, heads, head_dim_v], and lse [batch, q_len, heads] whose memory is [batch, heads,
        q_len], filled by the operator. Raises what the operator raises, and nothing is launched then."""
        q = given[0]
        batch, q_len, heads, _ = q.shape
        dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype  # of float8 queries
        out = q.new_empty((batch, q_len, heads, max(head_dim_v, 0)), dtype=dtype)
        lse = q.new_empty((batch, heads, q_len), dtype=torch.float32).transpose(1, 2)
        named = dict(zip(self.op.out_options, self.options, strict=True))
        operator = getattr(torch.ops.mla_suite, self.op.name).out
        operator(*self.tensors_of(given), **named, **dict(zip(self.op.outputs, (out, lse), strict=True)))
        return out, lse

    def remember(
        self, known: KnownCalls, given: tuple[Any, ...], settings: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]
    ) -> None:
        """Have `eager.recall(known, ...)` find calls like this one, which `run` has just made with these outputs."""
        if torch.compiler.is_dynamo_compiling() or eager.observed():
            return
        if not (plain(given) and fixed(settings) and fixed(self.options)):
            return
        op, tensors_of, options = self.op, self.tensors_of, self.options
        made = prepared_call(op.known_out.key(tensors_of(given) + outputs, hashable(options)))
        if made is None:
            return
        specs = [Output(tuple(output.shape), output.dtype) for output in outputs]
        allocate = allocation.allocator(specs, given[0].device, [output.stride() for output in outputs])
        launch = made.launch

        def start(outputs: tuple[torch.Tensor, ...], given: tuple[Any, ...]) -> None:
            tensors = tensors_of(given)
            if tensors[0].is_cpu:
                op.validate_values(tensors, options)
            launch((), tensors + outputs)  # outputs are the last tensors of `.out`

        prepared = PreparedCall(allocate, start, tuple(map(type, settings)))
        add_prepared(known.key(given, settings), prepared)
        known.keep(given, settings, prepared)
