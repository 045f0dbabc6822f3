"""Parts of launching that decode and sparse_decode share on every arch: rows, copies, parameters, partials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from mla_suite.archs.common import combine
from mla_suite.launch import Buffer
from mla_suite.launch.scratch import shaped
from mla_suite.ops.plan.metadata import HEADER_WORDS

MAX_ROW_TILES = 65535  # of a grid's second dimension
MIN_SCALE = 1e-30  # stands for 0, where a masked score of -inf times the scale would be NaN


class Rows(NamedTuple):
    """Rows of queries or results by their metadata."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool  # the address is a multiple of 16

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Rows:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % 16 == 0)

    @property
    def in_whole_vectors(self) -> bool:
        """Whether 16-byte accesses reach every row."""
        size = self.dtype.itemsize
        return self.aligned and self.strides[-1] == 1 and all(s * size % 16 == 0 for s in self.strides[:-1])

    def copied(self) -> Rows:
        """The same rows in contiguous memory of their own."""
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.append(strides[-1] * size)
        return Rows(self.dtype, self.shape, tuple(reversed(strides)), True)


def contiguous_outputs(outputs: tuple[torch.Tensor, ...], copies: tuple[bool, bool]) -> tuple[torch.Tensor, ...]:
    """Contiguous temporaries for outputs whose strides the kernel does not support, the others as they are."""
    replaced = zip(outputs, copies, strict=True)
    return tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) if copied else t for t, copied in replaced])


def copy_back(outputs: tuple[torch.Tensor, ...], made: tuple[torch.Tensor, ...], plus_inf_lse: bool) -> None:
    """Copy results from temporaries of `contiguous_outputs` into the caller's outputs; with `plus_inf_lse` the lse of
    rows without keys becomes +inf."""
    (out, lse), (made_out, made_lse) = outputs, made
    if made_out is not out:
        out.copy_(made_out)
    if made_lse is lse:
        return
    if plus_inf_lse:
        torch.nan_to_num(made_lse, nan=torch.nan, posinf=torch.inf, neginf=torch.inf, out=lse)
    else:
        lse.copy_(made_lse)


def written_buffers(
    slots: int, rows: int, results: tuple[torch.Tensor, torch.Tensor], scratch: torch.Tensor | None
) -> Iterator[Buffer]:
    """The tensors that a kernel writes: results, and partials of `slots` splits of `rows` where there is scratch."""
    tensors = dict(zip(("out", "lse"), results, strict=True))
    if scratch is not None:
        partials = shaped(scratch, slots, rows, results[0].shape[-1])
        tensors |= dict(zip(("partial_out", "partial_lse"), partials, strict=True))
    yield from (Buffer(name, tensor, "w") for name, tensor in tensors.items())


def combined_buffers(
    slots: int,
    rows: int,
    batch: int,
    cu_seqlens_q: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    plan: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor],
    scratch: torch.Tensor,
) -> Iterator[Buffer]:
    """The tensors that the combine of `slots` partials of `rows` rows touches."""
    out, lse = results[0].flatten(0, -3), results[1]  # a view: one stride leads from token to token of out
    partials = shaped(scratch, slots, rows, out.shape[-1])
    indptr = None if plan is None else plan[HEADER_WORDS : HEADER_WORDS + batch + 1]
    partly = plan is not None or cu_seqlens_q is not None
    return combine.buffers(*partials, indptr, cu_seqlens_q, attn_sink, out, lse, partly)
