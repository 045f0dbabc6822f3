"""Launching combine: by itself as an operator, and behind a decode that left partials."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.common import combine_config as configs
from mla_suite.archs.common.combine_config import HEAD_DIMS_V, CombineConfig
from mla_suite.build.params import pack_numbers, packer, reciprocal
from mla_suite.core.dispatch import HOW_TO_BUILD, Launch, Supported, Unsupported, cached
from mla_suite.launch import Buffer, bind, has_kernel
from mla_suite.launch.driver import Start
from mla_suite.ops.combine import CombineArgs, Problem
from mla_suite.ops.combine.reference import LseLayout, empty_lse

OUT_TYPES = {torch.bfloat16: (0, "bf16"), torch.float16: (1, "fp16"), torch.float32: (2, "fp32")}
MAY_BE_MERGED = 2
"""The first of `skip` behind a decode that may have merged rows itself (csrc/sm_90/combine/merged_rows.hpp)."""
MAX_ROWS = 2**31 - 1  # over the batch: the kernel's row numbers are 31 bits


class AnyCombineConfig(Protocol):
    """The configuration of any kernel that takes the parameters of combine."""

    @property
    def arch(self) -> ArchSpec: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def vec(self) -> int: ...
    @property
    def instance(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def grid(self, rows: int) -> int: ...
    def __hash__(self) -> int: ...


def supports(problem: Problem, arch: ArchSpec) -> Supported | Unsupported:
    if problem.head_dim_v not in HEAD_DIMS_V:
        possible = " or ".join(map(str, HEAD_DIMS_V))
        return Unsupported(f"head_dim_v {problem.head_dim_v}; its kernels hold rows of {possible}")
    if problem.rows * problem.batch > MAX_ROWS:
        return Unsupported(f"{problem.rows} rows x {problem.batch} sequences; it takes {MAX_ROWS} rows")
    splits = problem.num_splits or -(-problem.splits // max(problem.batch, 1))
    out_dtype = OUT_TYPES[problem.out_dtype][1]
    uniform = problem.num_splits > 0 and not problem.skip_single
    config, reason = configs.choose(arch, problem.head_dim_v, out_dtype, problem.rows, problem.batch, splits, uniform)
    answer = Supported(config, f"{config.instance}, {reason}; one value at a time where an address or stride is odd")
    return missing(arch, config.instance, configs.unaligned(arch, problem.head_dim_v).instance) or answer


def missing(arch: ArchSpec, *instances: str) -> Unsupported | None:
    """The reason why kernels that exist in source cannot run: one was not built. None when all were."""
    wanted = next((instance for instance in instances if not has_kernel(arch, instance)), None)
    if wanted is None:
        return None
    return Unsupported(f"kernel {wanted} is not built for {arch.name}; {HOW_TO_BUILD}")


class CombineLaunch(NamedTuple):
    """A launch apart from its pointers. It follows from metadata, so equal calls share one."""

    instance: str
    grid: tuple[int, int, int]
    threads: int
    numbers: bytes  # the parameters after the pointers


_POINTERS = ("partial_out", "partial_lse", "split_indptr", "cu_seqlens_q", "attn_sink", "out", "lse")
pack_pointers = packer(len(_POINTERS)).pack


@lru_cache(maxsize=4096)
def prepare(
    config: AnyCombineConfig,
    shape: tuple[int, int, int],
    strides: tuple[tuple[int, ...], ...],
    lse: tuple[LseLayout, bool],
    aligned: bool,
    out_dtype: torch.dtype,
    sink_heads: int,
    num_splits: int,
    skip: tuple[int, bool],
) -> CombineLaunch:
    """The launch of combine for tensors with this metadata.

    shape       (batch, rows, heads), with rows = q_len x heads
    strides     those of partial_out and of partial_lse, which begin with [splits, rows], and of out: [tokens, heads]
    lse         where it lies, and whether a row without keys has +inf there instead of -inf
    num_splits  splits of every sequence where there is no split_indptr, which says which splits a sequence owns; behind
                a decode that merges rows itself (MAY_BE_MERGED), the SM parts that it walks at once
    skip        which sequences are left as they are: those without a split (MAY_BE_MERGED: and rows that decode has
                marked as merged), and those with one split
    """
    batch, rows, heads = shape
    partial, partial_lse, out = strides
    # 16-byte accesses must reach every vector of every row.
    whole = (partial[0] | partial[1]) % 4 == 0 and (out[0] | out[1]) * out_dtype.itemsize % 16 == 0
    if config.vec > 1 and not (aligned and whole):
        config = configs.unaligned(config.arch, config.head_dim_v)
    rows_reciprocal, rows_shift = reciprocal(rows)
    heads_reciprocal, heads_shift = reciprocal(heads)
    grid = config.grid(batch * rows)
    numbers = pack_numbers(
        "combine",
        _POINTERS,
        partial_split_stride=partial[0],
        partial_row_stride=partial[1],
        partial_lse_split_stride=partial_lse[0],
        partial_lse_row_stride=partial_lse[1],
        out_token_stride=out[0],
        out_head_stride=out[1],
        **lse_numbers(*lse),
        batch=batch,
        q_len=rows // heads,
        heads=heads,
        sink_heads=sink_heads,
        num_splits=num_splits,
        out_type=OUT_TYPES[out_dtype][0],
        skip_none=int(skip[0]),
        skip_single=int(skip[1]),
        rows_reciprocal=rows_reciprocal,
        rows_shift=rows_shift,
        heads_reciprocal=heads_reciprocal,
        heads_shift=heads_shift,
        workgroups=grid,
    )
    return CombineLaunch(config.instance, (grid, 1, 1), config.threads, numbers)


def lse_numbers(layout: LseLayout, plus_inf: bool) -> dict[str, int | float]:
    """The parameters that say where and how a kernel stores lse."""
    lse_tokens_reciprocal, lse_tokens_shift = reciprocal(layout.tokens)
    return dict(
        lse_token_stride=layout.token,
        lse_head_stride=layout.head,
        lse_batch_stride=layout.batch,
        lse_tokens_reciprocal=lse_tokens_reciprocal,
        lse_tokens_shift=lse_tokens_shift,
        empty_lse=empty_lse(plus_inf),
    )


def bind_launch(launch: CombineLaunch, tensor: torch.Tensor, named: partial[Iterator[Buffer]] | Any) -> Start:
    """Bind a launch to the device of `tensor`.

    The function that is returned takes the packed parameters and the call's tensors, `given`; `named(*given)` lists
    these for the emulator.
    """
    return bind("combine", launch.instance, tensor, launch.grid, launch.threads, 0, named, overlap=True)


def buffers(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    split_indptr: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    partly: bool,
) -> Iterator[Buffer]:
    """The tensors of a combine; `partly` where some rows of the results are left as they are."""
    read = dict(partial_out=partial_out, partial_lse=partial_lse, split_indptr=split_indptr)
    read |= dict(cu_seqlens_q=cu_seqlens_q, attn_sink=attn_sink)
    yield from (Buffer(name, tensor, "r") for name, tensor in read.items() if tensor is not None)
    access = "rw" if partly else "all"
    yield from (Buffer("out", out, access), Buffer("lse", lse, access))


def prepare_operator(config: CombineConfig, outputs: tuple[torch.Tensor, ...], args: CombineArgs) -> Launch:
    """The launch of the operator `combine`."""
    out, lse = outputs
    partial_out, partial_lse = args.partial_out, args.partial_lse
    batch, rows = lse.shape
    if batch == 0 or rows == 0:
        return lambda outputs, tensors: None
    prepared = prepare(
        config,
        (batch, rows, rows),
        (partial_out.stride(), partial_lse.stride(), out.stride()),
        (LseLayout.of(lse), args.plus_inf_lse),
        (partial_out.data_ptr() | out.data_ptr()) % 16 == 0,
        out.dtype,
        1 if args.attn_sink is None else args.attn_sink.shape[0],
        args.num_splits,
        (False, args.skip_single),
    )
    enqueue, numbers = bind_launch(prepared, partial_out, partial(buffers, partly=args.skip_single)), prepared.numbers

    def launch(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
        out, lse = outputs
        partial_out, partial_lse, split_indptr, attn_sink = tensors
        pointers = pack_pointers(
            partial_out.data_ptr(),
            partial_lse.data_ptr(),
            0 if split_indptr is None else split_indptr.data_ptr(),
            0,
            0 if attn_sink is None else attn_sink.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
        )
        enqueue(pointers + numbers, (partial_out, partial_lse, split_indptr, None, attn_sink, out, lse))

    return launch


@cached
def config_for(
    arch: ArchSpec,
    head_dim_v: int,
    out_dtype: torch.dtype,
    rows: int,
    batch: int,
    splits: int,
    fixed: bool,
    uniform: bool = False,
) -> CombineConfig:
    """The kernel that combines `splits` per sequence of `rows` rows; `fixed` asks for the one that does not depend on
    the batch, `uniform` says that all sequences have that many splits and rows."""
    if fixed:
        return configs.invariant(arch, head_dim_v, rows * batch)
    return configs.choose(arch, head_dim_v, OUT_TYPES[out_dtype][1], rows, batch, splits, uniform)[0]
