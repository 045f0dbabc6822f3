"""combine on our own kernels: tensors -> parameters -> launch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from mla_suite.core.arch import Arch
from mla_suite.core.dispatch import Backend, Offer, Refusal
from mla_suite.ops.combine import config as configs
from mla_suite.ops.combine.config import HEAD_DIMS_V, Config
from mla_suite.runtime import Buffer, current_arch, has_kernel, launch
from mla_suite.toolchain.params import ParamStruct, load

OUT_TYPES = {torch.bfloat16: (0, "bf16"), torch.float16: (1, "fp16"), torch.float32: (2, "fp32")}
MOST_ROWS = 2**31 - 1  # over the batch: the kernel's row numbers are 31 bits


def offer(problem: Any, arch: Arch | None) -> Offer | Refusal:
    if arch is None:
        return Refusal("no arch of ours runs these tensors: it takes gfx942, gfx950 and sm_90, AMD's also emulated")
    if problem.head_dim_v not in HEAD_DIMS_V:
        possible = " or ".join(map(str, HEAD_DIMS_V))
        return Refusal(f"head_dim_v {problem.head_dim_v}; its kernels hold rows of {possible}")
    if problem.rows * problem.batch > MOST_ROWS:
        return Refusal(f"{problem.rows} rows x {problem.batch} sequences; it takes {MOST_ROWS} rows")
    splits = problem.num_splits or -(-problem.splits // max(problem.batch, 1))
    out_dtype = OUT_TYPES[problem.out_dtype][1]
    config, reason = configs.choose(arch, problem.head_dim_v, out_dtype, problem.rows, problem.batch, splits)
    for needed in (config, configs.unaligned(arch, problem.head_dim_v)):
        if not has_kernel(arch, needed.instance):
            return Refusal(f"kernel {needed.instance} is not built for {arch.name}; run `python -m mla_suite build`")
    return Offer(config, f"{config.instance}, {reason}; one value at a time where an address or stride is odd")


@cache
def _params() -> ParamStruct:
    return load("combine")


@cache
def _division(divisor: int) -> tuple[int, int]:
    """(reciprocal, shift) with n // divisor == n * reciprocal >> 31 + shift for 0 <= n < 2^31."""
    shift = (divisor - 1).bit_length()
    return -(-(1 << 31 + shift) // divisor), shift


def _in_vectors(rows: torch.Tensor) -> bool:
    """Whether 16-byte accesses reach every vector of every row."""
    strides = 0
    for stride in rows.stride()[:-1]:
        strides |= stride
    return (rows.data_ptr() | strides * rows.element_size()) % 16 == 0


def merge(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    split_indptr: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    config: Config,
    batch: int,
    num_splits: int,
    skip_none: bool = False,
    skip_single: bool = False,
) -> None:
    """Merge partials [splits, q_len x heads, D_v] into out [tokens, heads, D_v] and lse [tokens, heads]; any strides.

    Sequence b owns the splits that split_indptr says, or num_splits; and the tokens that cu_seqlens_q says, or q_len.
    Sequences without a split, or with one, are left as they are when told to skip them.
    """
    rows, heads = partial_lse.shape[1], out.shape[1]
    if batch == 0 or rows == 0:
        return
    if config.vec > 1 and not (_in_vectors(partial_out) and _in_vectors(out)):
        config = configs.unaligned(config.arch, config.head_dim_v)
    rows_reciprocal, rows_shift = _division(rows)
    heads_reciprocal, heads_shift = _division(heads)
    params = _params().pack(
        partial_out=partial_out.data_ptr(),
        partial_lse=partial_lse.data_ptr(),
        split_indptr=0 if split_indptr is None else split_indptr.data_ptr(),
        cu_seqlens_q=0 if cu_seqlens_q is None else cu_seqlens_q.data_ptr(),
        attn_sink=0 if attn_sink is None else attn_sink.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        partial_split_stride=partial_out.stride(0),
        partial_row_stride=partial_out.stride(1),
        partial_lse_split_stride=partial_lse.stride(0),
        partial_lse_row_stride=partial_lse.stride(1),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        lse_token_stride=lse.stride(0),
        lse_head_stride=lse.stride(1),
        batch=batch,
        q_len=rows // heads,
        heads=heads,
        sink_heads=1 if attn_sink is None else attn_sink.shape[0],
        num_splits=num_splits,
        out_type=OUT_TYPES[out.dtype][0],
        skip_none=int(skip_none),
        skip_single=int(skip_single),
        rows_reciprocal=rows_reciprocal,
        rows_shift=rows_shift,
        heads_reciprocal=heads_reciprocal,
        heads_shift=heads_shift,
    )

    def buffers() -> Iterator[Buffer]:
        read = dict(partial_out=partial_out, partial_lse=partial_lse, split_indptr=split_indptr)
        read |= dict(cu_seqlens_q=cu_seqlens_q, attn_sink=attn_sink)
        yield from (Buffer(name, tensor, "r") for name, tensor in read.items() if tensor is not None)
        access = "rw" if skip_none or skip_single or cu_seqlens_q is not None else "w"
        yield from (Buffer("out", out, access), Buffer("lse", lse, access))

    grid = (config.grid(batch * rows), 1, 1)
    launch("combine", config.instance, partial_out, grid, config.threads, 0, params, buffers, overlap=True)


def run(
    config: Config,
    outputs: tuple[torch.Tensor, ...],
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    split_indptr: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    *,
    num_splits: int = 0,
    out_dtype: torch.dtype,
    skip_single: bool = False,
) -> None:
    out, lse = outputs
    merge(
        partial_out,
        partial_lse,
        split_indptr,
        None,
        attn_sink,
        out,
        lse,
        config=config,
        batch=out.shape[0],
        num_splits=num_splits,
        skip_single=skip_single,
    )


def merge_config(place: torch.Tensor, out: torch.Tensor, rows: int, batch: int, splits: int, fixed: bool) -> Config:
    """The kernel for `merge` on the device of `place`; `fixed` asks for the one that does not depend on the batch."""
    arch = current_arch(place)
    if arch is None:
        raise RuntimeError(f"combine: {place.device} has no native kernels")
    if fixed:
        return configs.invariant(arch, out.shape[-1])
    return configs.choose(arch, out.shape[-1], OUT_TYPES[out.dtype][1], rows, batch, splits)[0]


BACKEND = Backend("native", offer, run)
