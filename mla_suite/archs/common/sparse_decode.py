"""Launching sparse_decode: what every arch's kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from struct import Struct
from typing import Any, NamedTuple, Protocol

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.common import combine
from mla_suite.archs.common import combine_config as combine_configs
from mla_suite.archs.common.attention import (
    MAX_ROW_TILES,
    MIN_SCALE,
    Rows,
    combined_buffers,
    contiguous_outputs,
    copy_back,
    written_buffers,
)
from mla_suite.archs.common.combine import AnyCombineConfig, CombineLaunch, missing
from mla_suite.archs.common.decode import DecodeConfig
from mla_suite.build.params import load, pack_numbers, packer, reciprocal
from mla_suite.core.dispatch import Launch, Supported, Unsupported
from mla_suite.launch import Buffer, bind
from mla_suite.launch.driver import Start
from mla_suite.launch.scratch import take
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.plan.metadata import HEADER_WORDS, most_work_tiles
from mla_suite.ops.sparse_decode import Problem, SparseDecodeArgs, splits_by_size

MIN_SPLIT = 128  # keys: below this, combining costs more than another compute unit saves
MAX_POOLS = 4  # groups of pool fields in the kernel's parameters
MAX_HEADS = MAX_ROW_TILES * 128
RECORDS = {
    ("dsv4", 512): "dsv4",
    ("v32", 576): "v32",
    ("v32_pow2", 576): "v32pow2",
    ("bf16", 512): "bf16x512",
    ("bf16", 576): "bf16x576",
}
"""(kv_format, values of a row) -> a kernel's name of the record; all pools of a launch have the same. An arch may have
more."""

POINTERS = ("attn_sink", "plan", "out", "lse", "partial_out", "partial_lse")
POOL_POINTERS = ("cache", "indices", "indptr", "lengths")
_pack_pool = packer(len(POOL_POINTERS)).pack


class SparseConfig(DecodeConfig, Protocol):
    """The configuration of a sparse_decode kernel."""

    @property
    def record(self) -> str: ...
    @property
    def rows(self) -> int: ...


def record_of(kv_formats: Sequence[str], width: int, records: Mapping[tuple[str, int], str] = RECORDS) -> str | None:
    """A kernel's name of the record of pools in these kv_formats; None when no kernel reads them together."""
    names = {records.get((kv_format, width)) for kv_format in kv_formats}
    # A power of two is a number: the kernel for any scale reads both.
    return "v32" if names == {"v32", "v32pow2"} else names.pop() if len(names) == 1 else None


def _unsupported(problem: Problem, records: Mapping[tuple[str, int], str]) -> Unsupported | None:
    """Why no kernel can take a problem; None when one may."""
    if problem.dtype != torch.bfloat16:
        return Unsupported(f"q is {problem.dtype}; it takes bfloat16")
    kv_formats = [pool.kv_format for pool in problem.pools]
    if record_of(kv_formats, problem.head_dim, records) is None:
        possible = ", ".join(f"{kv_format} ({width})" for kv_format, width in records)
        given = f"pools in {', '.join(kv_formats)} with rows of {problem.head_dim} values"
        return Unsupported(f"{given}; it takes {possible}")
    if problem.head_dim_v != 512:
        return Unsupported(f"head_dim_v {problem.head_dim_v}; it takes 512")
    if len(problem.pools) > MAX_POOLS:
        return Unsupported(f"{len(problem.pools)} pools; it takes 1 to {MAX_POOLS}")
    for i, pool in enumerate(problem.pools):
        if pool.alignment < 16:
            needed = "its address and block stride must be multiples of 16"
            return Unsupported(f"kv_caches[{i}] is aligned to {pool.alignment} bytes; {needed}")
    if not 1 <= problem.heads <= MAX_HEADS:
        return Unsupported(f"{problem.heads} heads; it takes 1 to {MAX_HEADS}")
    return None


def supports(
    problem: Problem,
    arch: ArchSpec,
    config_for: Callable[[Problem, ArchSpec], SparseConfig],
    records: Mapping[tuple[str, int], str] = RECORDS,
) -> Supported | Unsupported:
    """The instance that `config_for` gives for the problem, if it was built, and the combine behind it."""
    why = _unsupported(problem, records)
    if why is not None:
        return why
    config = config_for(problem, arch)
    answer = Supported(config, f"{config.record} records, tiles of {config.rows} rows for {problem.heads} heads")
    return missing(arch, config.instance, *combine_configs.invariant_instances(arch, problem.head_dim_v)) or answer


class Shape(NamedTuple):
    """Sizes of a call, from metadata alone."""

    q: Rows  # [tokens, heads, head_dim]
    out: Rows  # [tokens, heads, head_dim_v]
    copies_q: bool  # the kernels take a copy
    copies_out: bool
    lse: tuple[LseLayout, bool]  # as `combine.prepare` has it
    copies_lse: bool
    tokens: int
    heads: int
    keys: int  # selected keys per query token, in the mean
    plan_words: int  # 0 without a plan


def shape_of(args: SparseDecodeArgs, q: torch.Tensor, outputs: tuple[torch.Tensor, ...], any_lse: bool) -> Shape:
    """The sizes of a call with queries `q`, which may be an adjusted copy of the argument. `any_lse` says that the
    kernels store lse with any strides and +inf; the others store [tokens, heads] and -inf, and it is converted."""
    out, lse = outputs
    queries, copies_q = rows_of(q)
    results, copies_out = rows_of(out)
    tokens, heads, _ = results.shape
    keys = sum(index.numel() for index in args.indices) // max(tokens, 1)
    plan_words = 0 if args.plan is None else args.plan.shape[0]
    copies_lse = not any_lse and (args.plus_inf_lse or not lse.is_contiguous())
    wanted = (LseLayout.of(lse), args.plus_inf_lse) if any_lse else (LseLayout.contiguous(heads), False)
    return Shape(queries, results, copies_q, copies_out, wanted, copies_lse, tokens, heads, keys, plan_words)


class Prepared(NamedTuple):
    """One launch of sparse_decode and the combine behind it, without addresses."""

    config: DecodeConfig
    grid: tuple[int, int, int]
    shared: int  # bytes of dynamic shared memory
    overlap: bool  # the kernel may begin before the one ahead of it on the stream ends
    numbers: tuple[bytes, ...]  # the parameters between addresses: before the first pool's, then behind each pool's
    shape: Shape
    slots: int  # splits with partials
    combine: CombineLaunch | None  # None when nothing is split


def splits_of_call(args: SparseDecodeArgs, shape: Shape, own: Callable[[], int]) -> int:
    """Splits of each query token: those of the arguments, else the kernel's `own`; 1 with a plan, which has its own."""
    if shape.plan_words:
        return 1
    return args.num_splits or (splits_by_size(args) if args.split_size else own())


def split_note(shape: Shape, splits: int) -> str:
    """Returns what `explain` says of the splits of a call."""
    if shape.plan_words:
        return f"the plan splits query tokens, into at most {slots_and_tiles(shape, splits)[0]} partial results"
    return f"{splits} splits of each query token" if splits > 1 else "query tokens are not split"


def slots_and_tiles(shape: Shape, splits: int) -> tuple[int, int]:
    """(partials, work tiles) of a launch."""
    if shape.plan_words:
        slots = int(most_work_tiles(shape.plan_words, shape.tokens))
        return slots, slots
    tiles = shape.tokens * splits
    return (tiles if splits > 1 else 0), tiles


def numbers_of(
    kernel: str, leading: tuple[str, ...], args: SparseDecodeArgs, shape: Shape, splits: int, **own: int | float
) -> tuple[bytes, ...]:
    """The parameters that are no addresses, divided where those of the pools lie."""
    lengths = args.topk_lengths or [None] * len(args.kv_caches)
    pools = [_pool(args.q, *pool) for pool in zip(args.kv_caches, args.indices, lengths, strict=True)]
    numbers = dict.fromkeys([f"{name}_{i}" for i in range(MAX_POOLS) for name in (*POOL_POINTERS, *pools[0])], 0)
    numbers |= {f"{name}_{i}": number for i, pool in enumerate(pools) for name, number in pool.items()}
    packed = pack_numbers(
        kernel,
        leading,
        **numbers,
        **own,
        pools=len(pools),
        out_token_stride=shape.out.strides[0],
        out_head_stride=shape.out.strides[1],
        tokens=shape.tokens,
        heads=shape.heads,
        num_splits=splits,
        split_size=args.split_size if splits > 1 and not args.num_splits else 0,
        softmax_scale=max(abs(args.softmax_scale), MIN_SCALE),
    )
    offsets = load(kernel).offsets
    found, begin = [], 0
    for i in range(len(pools)):
        at = [offsets[f"{name}_{i}"] for name in POOL_POINTERS]
        if at != list(range(at[0], at[0] + 8 * len(at), 8)):
            raise RuntimeError(f"{kernel}: a pool's addresses must lie side by side, in the order packed")
        found.append(packed[begin : at[0] - 8 * len(leading)])
        begin = at[-1] + 8 - 8 * len(leading)
    return (*found, packed[begin:])


def combine_launch(config: AnyCombineConfig, args: SparseDecodeArgs, shape: Shape, splits: int) -> CombineLaunch:
    """The launch that combines the partials of sparse_decode."""
    heads, head_dim_v = shape.heads, args.head_dim_v
    return combine.prepare(
        config,
        (shape.tokens, heads, heads),
        ((heads * head_dim_v, head_dim_v), (heads, 1), shape.out.strides[:2]),
        shape.lse,
        True,  # scratch and results begin on 16 bytes
        shape.out.dtype,
        1 if args.attn_sink is None else heads,
        splits,
        (shape.plan_words > 0, False),
    )


def launch_of(
    prepared: Prepared,
    args: SparseDecodeArgs,
    pack_leading: Callable[..., bytes],
    trailing: Struct | None = None,
) -> Launch:
    """The launch of sparse_decode.

    pack_leading  (address of q, *addresses of POINTERS) -> the parameters before the pools
    trailing      packs the address of a third output into the last parameters; None where there are two outputs
    """
    config, shape, slots = prepared.config, prepared.shape, prepared.slots
    rows, tokens, negative = shape.heads, shape.tokens, args.softmax_scale < 0
    named = partial(_buffers, slots, rows)
    launched = args.q, prepared.grid, config.threads, prepared.shared
    enqueue = bind("sparse_decode", config.instance, *launched, named, overlap=prepared.overlap)
    copies_q, (first_numbers, *pool_numbers) = shape.copies_q, prepared.numbers
    copies_selection = any(token_stride(index, 1) is None for index in args.indices) or not all(
        lengths is None or lengths.is_contiguous() for lengths in args.topk_lengths or ()
    )
    copies, plus_inf_lse = (shape.copies_out, shape.copies_lse), args.plus_inf_lse
    copied = any(copies)
    partial_values = slots * rows * args.head_dim_v
    scratch_values = partial_values + slots * rows
    combined = prepared.combine
    enqueue_combine: Start | None = None
    combine_numbers, pack_combine = b"", combine.pack_pointers
    if combined is not None:
        enqueue_combine = combine.bind_launch(combined, args.q, partial(combined_buffers, slots, rows, tokens, None))
        combine_numbers = combined.numbers

    def launch(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
        q, kv_caches, indices, indptrs, topk_lengths, attn_sink, plan = tensors
        outputs, more = outputs[:2], outputs[2:]
        q = -q if negative else q
        if copies_q:
            q = q.clone(memory_format=torch.contiguous_format)
        if copies_selection:
            indices = [index.contiguous() for index in indices]
            topk_lengths = [lengths if lengths is None else lengths.contiguous() for lengths in topk_lengths]
        out, lse = contiguous_outputs(outputs, copies) if copied else outputs
        scratch, partial_at, partial_lse_at = None, 0, 0
        if enqueue_combine is not None:
            scratch = take(q.device, scratch_values)
            partial_at = scratch.data_ptr()
            partial_lse_at = partial_at + 4 * partial_values
        sink_at = 0 if attn_sink is None else attn_sink.data_ptr()
        plan_at = 0 if plan is None else plan.data_ptr()
        out_at, lse_at = out.data_ptr(), lse.data_ptr()
        leading = pack_leading(q.data_ptr(), sink_at, plan_at, out_at, lse_at, partial_at, partial_lse_at)
        packed, pools = [leading, first_numbers], [*zip(kv_caches, indices, indptrs, topk_lengths, strict=True)]
        for (cache, index, indptr, lengths), numbers in zip(pools, pool_numbers, strict=True):
            indptr_at = 0 if indptr is None else indptr.data_ptr()
            lengths_at = 0 if lengths is None else lengths.data_ptr()
            packed += _pack_pool(cache.data_ptr(), index.data_ptr(), indptr_at, lengths_at), numbers
        if trailing is not None:
            packed[-1] = packed[-1][: -trailing.size] + trailing.pack(more[0].data_ptr())
        enqueue(b"".join(packed), (q, pools, attn_sink, plan, (out, lse), scratch))
        if enqueue_combine is not None:
            indptr_at = plan_at and plan_at + 4 * HEADER_WORDS
            leading = pack_combine(partial_at, partial_lse_at, indptr_at, 0, sink_at, out_at, lse_at)
            enqueue_combine(leading + combine_numbers, (attn_sink, plan, (out, lse), scratch))
        if copied:
            copy_back(outputs, (out, lse), plus_inf_lse)

    return launch


def _buffers(
    slots: int,
    rows: int,
    q: torch.Tensor,
    pools: Sequence[tuple[torch.Tensor | None, ...]],
    attn_sink: torch.Tensor | None,
    plan: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor],
    scratch: torch.Tensor | None,
) -> Iterator[Buffer]:
    """The tensors that the kernel touches; each pool in the order of POOL_POINTERS."""
    read = {"q": q, "attn_sink": attn_sink, "plan": plan}
    for i, pool in enumerate(pools):
        read |= {f"{name}_{i}": tensor for name, tensor in zip(POOL_POINTERS, pool, strict=True)}
    yield from (Buffer(name, tensor, "r") for name, tensor in read.items() if tensor is not None)
    yield from written_buffers(slots, rows, results, scratch)


def rows_of(tensor: torch.Tensor) -> tuple[Rows, bool]:
    """[..., heads, width] as [tokens, heads, width], and whether the kernels take a copy, whose rows these then are."""
    apart, *within = token_stride(tensor, 2), *tensor.stride()[-2:]
    shape = (prod(tensor.shape[:-2]), *tensor.shape[-2:])
    rows = Rows(tensor.dtype, shape, (apart or 0, *within), tensor.data_ptr() % 16 == 0)
    return (rows, False) if apart is not None and rows.in_whole_vectors else (rows.copied(), True)


def token_stride(tensor: torch.Tensor, kept: int) -> int | None:
    """Elements from each query token to the next, all dimensions before the last `kept`; None where they vary."""
    sizes, strides = tensor.shape[: tensor.dim() - kept], tensor.stride()[: tensor.dim() - kept]
    if not sizes:
        return 0  # ragged indices
    if len(sizes) == 1 or sizes[1] == 1:
        return strides[0]
    return strides[1] if sizes[0] == 1 or strides[0] == sizes[1] * strides[1] else None


def _pool(q: torch.Tensor, kv_cache: torch.Tensor, index: torch.Tensor, lengths: torch.Tensor | None) -> dict[str, int]:
    """One pool's numbers among the parameters, without its own."""
    pages, page, _ = kv_cache.shape
    per_sequence = lengths is not None and q.dim() == 4 and lengths.dim() == 1
    page_reciprocal, page_shift = reciprocal(max(page, 1))
    apart = token_stride(index, 1)
    return {
        "page_bytes": kv_cache.stride(0) * kv_cache.element_size(),
        "index_stride": index.shape[-1] if apart is None else apart,
        "slots": pages * page,
        "page": page,
        "page_reciprocal": page_reciprocal,
        "page_shift": page_shift,
        "topk": index.shape[-1],
        "tokens_per_length": q.shape[1] if per_sequence else 1,
    }
