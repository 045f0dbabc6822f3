"""AITER's two reductions of partial results on our `combine`; `mla_suite.integrations.aiter` passes them on."""

from __future__ import annotations

import math
from typing import Any

import torch

import mla_suite
from mla_suite.integrations import check_kinds, in_words, refuse

_WORDS = {"partial_out": "partial_output", "split_indptr": "reduce_indptr", "out_dtype": "the dtype of final_output"}
"""Arguments of combine -> those of `mla_reduce_v1`."""
_REDUCED_WORDS = _WORDS | {"out": "reduced", "out_dtype": "the dtype of reduced"}
REDUCE_BATCHES = (0, 1, 2, 4, 8)
REDUCE_VECS = (0, 1, 2, 4)


def mla_reduce_v1(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor | None,
    reduce_partial_map: torch.Tensor,
    max_seqlen_q: int,
    num_kv_splits: int,
    final_output: torch.Tensor,
    final_lse: torch.Tensor | None = None,
    *,
    base2: bool = False,
) -> None:
    """Merge the partial results of each tile into final_output (and final_lse), in place.

    partial_output      [rows, heads, head_dim_v] or [rows, 1, heads, head_dim_v] fp32, normalised; a row is one query
                        token of one split. partial_lse [rows, heads], also [rows, 1, heads, 1], fp32 natural log
    reduce_indptr       [tiles + 1] int32: tile i merges entries reduce_indptr[i]..reduce_indptr[i + 1] of
    reduce_partial_map  [entries] int32: first row of each partial; the query tokens of a tile are adjacent rows
    reduce_final_map    [tiles, 2] int32, first and last + 1 query token of each tile; None: max_seqlen_q each, in order
    final_output        [tokens, heads, head_dim_v] bf16, fp16 or fp32; final_lse [tokens, heads] fp32

    A tile of 0 or 1 entries is left untouched: its producer wrote the final rows. num_kv_splits sizes AITER's
    scratch and is not read. The maps are general, so partials are gathered first; where splits are uniform
    `mla_decode_reduce` moves nothing. base2, which AITER does not have: partial_lse is a binary logarithm, as FlashMLA
    keeps it; final_lse is natural all the same.
    """
    name = "mla_reduce_v1"
    needed = dict(partial_output=partial_output, partial_lse=partial_lse, reduce_indptr=reduce_indptr)
    needed |= dict(reduce_partial_map=reduce_partial_map, final_output=final_output)
    optional = dict(reduce_final_map=reduce_final_map, final_lse=final_lse)
    _check(name, needed, optional, dict(max_seqlen_q=max_seqlen_q))
    if final_output.dim() != 3:
        refuse(name, f"final_output has shape {tuple(final_output.shape)}", "it takes [tokens, heads, head_dim_v]")
    heads, head_dim_v = final_output.shape[-2:]
    tiles, tokens, device = reduce_indptr.shape[0] - 1, final_output.shape[0], final_output.device
    if max_seqlen_q < 1:
        refuse(name, f"max_seqlen_q is {max_seqlen_q}", "pass the most query tokens of a tile")
    parts = partial_output.squeeze(1) if partial_output.dim() == 4 else partial_output
    if parts.shape[1:] != (heads, head_dim_v) or not _shaped(partial_lse, (parts.shape[0], heads)):
        given = f"partial_output has shape {tuple(partial_output.shape)}, partial_lse {tuple(partial_lse.shape)}"
        refuse(name, given, f"they take [rows, {heads}, {head_dim_v}] and [rows, {heads}], as final_output has them")
    if final_lse is not None and (final_lse.shape != final_output.shape[:-1] or final_lse.dtype != torch.float32):
        possible = f"it takes float32 [tokens, heads] = {tuple(final_output.shape[:-1])}"
        refuse(name, f"final_lse is {final_lse.dtype} {tuple(final_lse.shape)}", possible)
    if reduce_final_map is not None and (reduce_final_map.shape[1:] != (2,) or reduce_final_map.shape[0] < tiles):
        given = f"reduce_final_map has shape {tuple(reduce_final_map.shape)}"
        refuse(name, given, f"reduce_indptr has {tiles} tiles: it takes [{tiles}, 2]")
    if tiles == 0 or tokens == 0 or parts.shape[0] == 0:
        return
    rows, lse_rows = parts, _natural(partial_lse, base2).reshape(-1, heads)
    step = torch.arange(max_seqlen_q, device=device)
    # Entries past reduce_indptr[-1] hold anything; clamped, they are read and never used.
    source = (reduce_partial_map.long()[:, None] + step).clamp(0, rows.shape[0] - 1)
    gathered = rows[source].flatten(1, 2), lse_rows[source].flatten(1), reduce_indptr
    merged_out, merged_lse = in_words(name, _WORDS, mla_suite.combine, *gathered, out_dtype=final_output.dtype)
    merged_out, merged_lse = merged_out.view(-1, heads, head_dim_v), merged_lse.view(-1, heads)
    if reduce_final_map is None:
        first = torch.arange(tiles, device=device) * max_seqlen_q
        end = first + max_seqlen_q
    else:
        first, end = reduce_final_map[:tiles].long().unbind(1)
    target = first[:, None] + step
    merges = (target < end[:, None]) & (reduce_indptr.diff() > 1)[:, None]
    # Row of the merged result for every query token, or -1; one spare token swallows what is not merged.
    row = torch.full((tokens + 1,), -1, device=device)
    target = torch.where(merges & (target >= 0), target, tokens).clamp(max=tokens)
    row.scatter_(0, target.flatten(), torch.arange(target.numel(), device=device))
    row = row[:tokens]
    taken, found = row >= 0, row.clamp(min=0)
    final_output.copy_(torch.where(taken[:, None, None], merged_out[found], final_output))
    if final_lse is not None:
        final_lse.copy_(torch.where(taken[:, None], merged_lse[found], final_lse))


def mla_decode_reduce(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    reduced: torch.Tensor,
    kv_indptr: torch.Tensor,
    T: int,
    batch: int = 0,
    vec: int = 0,
    num_splits: int = 0,
    *,
    base2: bool = False,
) -> None:
    """Merge num_splits equal splits of each of T query tokens into `reduced`, in place and without a copy.

    partial_output [T, num_splits, heads, head_dim_v] fp32, normalised; partial_lse [T, num_splits, heads] or with a
    last dimension of 1, fp32 natural log, or binary with base2, which AITER does not have; reduced [T, heads,
    head_dim_v] bf16, fp16 or fp32.

    kv_indptr [T + 1] int32: query token t has kv_indptr[t + 1] - kv_indptr[t] pages. With n of them only its first
    min(n, num_splits) splits exist; the others count for nothing, whatever is in their memory. A split that exists
    without keys has an lse of -inf.

    batch (1, 2, 4, 8) and vec (1, 2, 4) are launch shapes of the kernel this call is written for. Ours are chosen by
    `combine`, from its tuned tables; 0 or a legal value changes nothing. num_splits 0 takes partial_output's.
    """
    name = "mla_decode_reduce"
    needed = dict(partial_output=partial_output, partial_lse=partial_lse, reduced=reduced, kv_indptr=kv_indptr)
    _check(name, needed, {}, dict(T=T, num_splits=num_splits))
    if batch not in REDUCE_BATCHES or vec not in REDUCE_VECS:
        refuse(name, f"batch is {batch} and vec is {vec}", f"batch takes {REDUCE_BATCHES}, vec takes {REDUCE_VECS}")
    if reduced.dim() != 3 or reduced.shape[0] != T:
        refuse(name, f"reduced has shape {tuple(reduced.shape)}", f"it takes [T, heads, head_dim_v] with T = {T}")
    heads, head_dim_v = reduced.shape[1:]
    splits = num_splits or (partial_output.shape[1] if partial_output.dim() > 1 else 0)
    expected = (T, splits, heads, head_dim_v)
    if tuple(partial_output.shape) != expected or not _shaped(partial_lse, expected[:3]):
        given = f"partial_output has shape {tuple(partial_output.shape)}, partial_lse {tuple(partial_lse.shape)}"
        refuse(name, given, f"they take [T, num_splits, heads, head_dim_v] = {expected} and the same without the last")
    if splits < 1:
        refuse(name, f"num_splits is {splits}", "a query token has 1 or more")
    if not partial_output.is_contiguous() or not partial_lse.is_contiguous():
        refuse(name, f"partial_output has strides {partial_output.stride()}", "partials lie side by side, as written")
    if tuple(kv_indptr.shape) != (T + 1,):
        refuse(name, f"kv_indptr has shape {tuple(kv_indptr.shape)}", f"it takes [T + 1] = ({T + 1},)")
    exists = torch.arange(splits, device=kv_indptr.device) < kv_indptr.diff()[:, None]
    lse = _natural(partial_lse, base2).view(T, splits, heads).masked_fill(~exists[..., None], -torch.inf)
    in_words(
        *(name, _REDUCED_WORDS, torch.ops.mla_suite.combine.out),
        *(partial_output.view(T * splits, heads, head_dim_v), lse.view(T * splits, heads)),
        num_splits=splits,
        out_dtype=reduced.dtype,
        out=reduced,
        lse=torch.empty((T, heads), dtype=torch.float32, device=reduced.device),
    )


def _check(name: str, needed: dict[str, Any], optional: dict[str, Any], sizes: dict[str, Any]) -> None:
    """TypeError for other kinds of arguments, ValueError for tensors on several devices."""
    check_kinds(name, needed, optional, sizes)
    device = needed["partial_output"].device
    for argument, value in (needed | optional).items():
        if value is not None and value.device != device:
            refuse(name, f"{argument} is on {value.device}", f"partial_output is on {device}: move it there")
    if needed["partial_lse"].dtype != torch.float32:
        refuse(name, f"partial_lse is {needed['partial_lse'].dtype}", "it takes float32", TypeError)


def _shaped(tensor: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether a tensor has these sizes in this order, wherever dimensions of one lie between them."""
    return [size for size in tensor.shape if size != 1] == [size for size in sizes if size != 1]


def _natural(lse: torch.Tensor, base2: bool) -> torch.Tensor:
    return lse * math.log(2) if base2 else lse
