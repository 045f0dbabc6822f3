"""sparse_decode on our own kernels: tensors -> parameters -> launch, and the merge of what was split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from mla_suite.core.arch import Arch
from mla_suite.core.dispatch import Offer, Refusal, readied
from mla_suite.launch import Buffer, bind, has_kernel, tensor_map
from mla_suite.launch.scratch import take
from mla_suite.ops.combine import config as combine_configs
from mla_suite.ops.combine import native as combine
from mla_suite.ops.decode.native import MOST_ROW_TILES, give_back, merged, reachable, written
from mla_suite.ops.plan.metadata import HEADER_WORDS
from mla_suite.ops.sparse_decode.config import MOST_POOLS, RECORDS, SparseConfig, record_of, sparse_config
from mla_suite.ops.sparse_decode.hopper import HopperSparseConfig, hopper_sparse_config
from mla_suite.ops.sparse_decode.prepare import POOL_POINTERS, Prepared, pack_pool, prepare

ARCHS = ("gfx950", "sm_90")


def offer(problem: Any, arch: Arch | None) -> Offer | Refusal:
    if arch is None:
        return Refusal(f"no arch of ours runs these tensors: it takes {' or '.join(ARCHS)}, AMD's also emulated")
    if arch.name not in ARCHS:
        return Refusal(f"sparse_decode has no kernel for {arch.name}; it takes {' or '.join(ARCHS)}")
    why = _unsupported(problem)
    if why is not None:
        return Refusal(why)
    config = hopper_sparse_config(problem, arch) if arch.name == "sm_90" else sparse_config(problem, arch)
    for needed in (config.instance, combine_configs.invariant(arch, problem.head_dim_v).instance):
        if not has_kernel(arch, needed):
            return Refusal(f"kernel {needed} is not built for {arch.name}; run `python -m mla_suite build`")
    return Offer(config, f"{config.record} records, tiles of {config.rows} rows for {problem.heads} heads")


def _unsupported(problem: Any) -> str | None:
    """Why the kernels cannot take a problem; None when they can."""
    if problem.dtype != torch.bfloat16:
        return f"q is {problem.dtype}; it takes bfloat16"
    kv_formats = [pool.kv_format for pool in problem.pools]
    if record_of(kv_formats, problem.head_dim) is None:
        possible = ", ".join(f"{kv_format} ({width})" for kv_format, width in RECORDS)
        return f"pools in {', '.join(kv_formats)} with rows of {problem.head_dim} values; it takes {possible}"
    if problem.head_dim_v != 512:
        return f"head_dim_v {problem.head_dim_v}; it takes 512"
    if len(problem.pools) > MOST_POOLS:
        return f"{len(problem.pools)} pools; it takes 1 to {MOST_POOLS}"
    for i, pool in enumerate(problem.pools):
        if pool.alignment < 16:
            needed = "its address and block stride must be multiples of 16"
            return f"kv_caches[{i}] is aligned to {pool.alignment} bytes; {needed}"
    if not 1 <= problem.heads <= MOST_ROW_TILES * 128:
        return f"{problem.heads} heads; it takes 1 to {MOST_ROW_TILES * 128}"
    return None


def ready(
    config: SparseConfig | HopperSparseConfig,
    outputs: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    kv_caches: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    indptrs: Sequence[torch.Tensor | None],
    topk_lengths: Sequence[torch.Tensor | None],
    attn_sink: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    *,
    kv_formats: Sequence[str],
    softmax_scale: float,
    head_dim_v: int = 512,
    num_splits: int = 0,
    split_size: int = 0,
) -> Callable[..., None]:
    if outputs[0].numel() == 0:
        return lambda *args, **kwargs: None
    negative = softmax_scale < 0  # the kernels find the largest score before they scale
    known = prepare(
        *(config, outputs, -q if negative else q, kv_caches, indices, indptrs, topk_lengths, attn_sink, plan),
        softmax_scale=abs(softmax_scale),
        num_splits=num_splits,
        split_size=split_size,
    )
    on_hopper, place = known.boxes is not None, (q, known.grid, known.threads, known.shared)
    launch = bind("sparse_decode", known.instance, *place, partial(_buffers, known), overlap=on_hopper)
    tokens = outputs[1].numel() // known.rows
    merge = None
    if known.merge is not None:
        merge = combine.launcher(known.merge, q, partial(merged, known.slots, known.rows, tokens, None))
    copies = known.copies_out, known.copies_lse
    copied = any(copies)
    partial_values = known.slots * known.rows * head_dim_v
    scratch_values = partial_values + known.slots * known.rows

    def start(
        outputs: tuple[torch.Tensor, ...],
        q: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        indices: Sequence[torch.Tensor],
        indptrs: Sequence[torch.Tensor | None],
        topk_lengths: Sequence[torch.Tensor | None],
        attn_sink: torch.Tensor | None = None,
        plan: torch.Tensor | None = None,
        **by_name: Any,
    ) -> None:
        q = -q if negative else q
        if known.copies_q:
            q = q.clone(memory_format=torch.contiguous_format)
        if known.copies_selection:
            indices = [index.contiguous() for index in indices]
            topk_lengths = [lengths if lengths is None else lengths.contiguous() for lengths in topk_lengths]
        out, lse = reachable(outputs, copies) if copied else outputs
        scratch, partial_at, partial_lse_at = None, 0, 0
        if merge is not None:
            scratch = take(q.device, scratch_values)
            partial_at = scratch.data_ptr()
            partial_lse_at = partial_at + 4 * partial_values
        sink_at = 0 if attn_sink is None else attn_sink.data_ptr()
        plan_at = 0 if plan is None else plan.data_ptr()
        out_at, lse_at = out.data_ptr(), lse.data_ptr()
        queries = (q.data_ptr(),) if known.boxes is None else tensor_map.swizzled(q.data_ptr(), *known.boxes)
        packed = [
            known.pack_leading(*queries, sink_at, plan_at, out_at, lse_at, partial_at, partial_lse_at),
            known.numbers[0],
        ]
        pools = [*zip(kv_caches, indices, indptrs, topk_lengths, strict=True)]
        for (cache, index, indptr, lengths), numbers in zip(pools, known.numbers[1:], strict=True):
            indptr_at = 0 if indptr is None else indptr.data_ptr()
            lengths_at = 0 if lengths is None else lengths.data_ptr()
            packed += pack_pool(cache.data_ptr(), index.data_ptr(), indptr_at, lengths_at), numbers
        launch(b"".join(packed), (q, pools, attn_sink, plan, (out, lse), scratch))
        if merge is not None:
            cuts_at = plan_at and plan_at + 4 * HEADER_WORDS
            addresses = partial_at, partial_lse_at, cuts_at, 0, sink_at, out_at, lse_at
            merge(addresses, (attn_sink, plan, (out, lse), scratch))
        if copied:
            give_back(outputs, (out, lse))

    return start


def _buffers(
    known: Prepared,
    q: torch.Tensor,
    pools: Sequence[tuple[torch.Tensor | None, ...]],
    attn_sink: torch.Tensor | None,
    plan: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor],
    scratch: torch.Tensor | None,
) -> Iterator[Buffer]:
    """What the kernel touches; of a pool in the order of POOL_POINTERS."""
    read = {"q": q, "attn_sink": attn_sink, "plan": plan}
    for i, pool in enumerate(pools):
        read |= {f"{name}_{i}": tensor for name, tensor in zip(POOL_POINTERS, pool, strict=True)}
    yield from (Buffer(name, tensor, "r") for name, tensor in read.items() if tensor is not None)
    yield from written(known.slots, known.rows, results, scratch)


BACKEND = readied("native", offer, ready)
run = BACKEND.run
