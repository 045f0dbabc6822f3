"""sparse_decode on our own kernels: tensors -> parameters -> launch, and the merge of what was split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from mla_suite.core.arch import Arch
from mla_suite.core.dispatch import Backend, Offer, Refusal
from mla_suite.ops.combine import config as combine_configs
from mla_suite.ops.combine.native import merge, merge_config
from mla_suite.ops.plan.layout import HEADER_WORDS, most_items, splits_of
from mla_suite.ops.sparse_decode import hopper
from mla_suite.ops.sparse_decode.config import MOST_POOLS, RECORDS, SparseConfig, record_of, sparse_config
from mla_suite.ops.sparse_decode.hopper import HopperSparseConfig, hopper_sparse_config
from mla_suite.runtime import Buffer, has_kernel, launch
from mla_suite.runtime.scratch import partials
from mla_suite.toolchain.params import ParamStruct, load

ARCHS = ("gfx950", "sm_90")
MOST_ROW_TILES = 65535  # of a grid's second dimension
SHORTEST_CUT = 128  # keys: below this, merging costs more than another compute unit saves
SMALLEST_SCALE = 1e-30  # as good as 0, where a masked score of -inf times the scale would be NaN


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
    layouts = [pool.layout for pool in problem.pools]
    if record_of(layouts, problem.head_dim) is None:
        possible = ", ".join(f"{layout} ({width})" for layout, width in RECORDS)
        return (
            f"pools in {', '.join(layouts)} with rows of {problem.head_dim} values; it takes pools of one of {possible}"
        )
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


@cache
def _params(name: str) -> ParamStruct:
    return load(name)


def run(
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
    layouts: Sequence[str],
    softmax_scale: float,
    head_dim_v: int = 512,
    num_splits: int = 0,
    split_size: int = 0,
) -> None:
    out, lse = outputs
    heads = q.shape[-2]
    if out.numel() == 0:
        return
    if softmax_scale < 0:  # the kernel finds the largest score before it scales
        q, softmax_scale = -q, -softmax_scale
    on_hopper = isinstance(config, HopperSparseConfig)
    queries = _in_whole_vectors(q.flatten(0, -3))
    queries = hopper.in_rows(queries) if on_hopper else queries
    tokens = queries.shape[0]
    flat_out, flat_lse = out.flatten(0, -3), lse.flatten(0, -2)  # copies where leading strides do not merge
    final_out = flat_out if _aligned(flat_out) else torch.empty_like(flat_out, memory_format=torch.contiguous_format)
    final_lse = flat_lse.contiguous()
    tiles = config.tiles(heads)
    if plan is not None:
        splits, slots = 1, int(most_items(plan.shape[0], tokens))
        workers = hopper.workers(config.arch, slots, tiles) if on_hopper else min(slots, config.arch.compute_units)
    else:
        splits = num_splits or _splits(config, tokens, heads, indices, indptrs, split_size)
        slots = tokens * splits if splits > 1 else 0
        workers = hopper.workers(config.arch, tokens * splits, tiles) if on_hopper else tokens * splits
    partial_out, partial_lse = partials(q.device, slots, heads, head_dim_v) if slots else (None, None)
    tensors: dict[str, tuple[torch.Tensor | None, str]] = {
        "attn_sink": (attn_sink, "r"),
        "plan": (plan, "r"),
        "out": (final_out, "w"),
        "lse": (final_lse, "w"),
        "partial_out": (partial_out, "w"),
        "partial_lse": (partial_lse, "w"),
    }
    numbers: dict[str, int] = {}
    for i in range(MOST_POOLS):
        if i < len(kv_caches):
            made, counted = _pool(q, kv_caches[i], indices[i], indptrs[i], topk_lengths[i])
        else:
            made, counted = dict.fromkeys(_POOL_TENSORS), dict.fromkeys(_POOL_NUMBERS, 0)
        tensors |= {f"{name}_{i}": (tensor, "r") for name, tensor in made.items()}
        numbers |= {f"{name}_{i}": number for name, number in counted.items()}
    if on_hopper:
        name, grid, numbers = "sparse_decode_tma", (workers * tiles, 1, 1), numbers | hopper.query_map(queries)
    else:
        name, grid = "sparse_decode", (workers, tiles, 1)
        tensors["q"] = (queries, "r")
        numbers |= {"q_token_stride": queries.stride(0), "q_head_stride": queries.stride(1)}
    params = _params(name).pack(
        **{name: 0 if tensor is None else tensor.data_ptr() for name, (tensor, _) in tensors.items()},
        **numbers,
        out_token_stride=final_out.stride(0),
        out_head_stride=final_out.stride(1),
        tokens=tokens,
        heads=heads,
        row_tiles=tiles,
        pools=len(kv_caches),
        num_splits=splits,
        split_size=split_size if splits > 1 and not num_splits else 0,
        workers=workers,
        softmax_scale=max(softmax_scale, SMALLEST_SCALE),
    )

    def buffers() -> Iterator[Buffer]:
        return (Buffer(name, tensor, access) for name, (tensor, access) in tensors.items() if tensor is not None)

    shared = config.lds if isinstance(config, HopperSparseConfig) else 0
    place = "sparse_decode", config.instance, q, grid, config.threads, shared
    launch(*place, params, buffers, overlap=on_hopper)
    if partial_out is not None and partial_lse is not None:
        merge(
            partial_out,
            partial_lse,
            plan[HEADER_WORDS : HEADER_WORDS + tokens + 1] if plan is not None else None,
            None,
            attn_sink,
            final_out,
            final_lse,
            config=merge_config(q, out, heads, tokens, -(-slots // tokens), split_size > 0),
            batch=tokens,
            num_splits=splits,
            skip_none=plan is not None,
        )
    if final_out.data_ptr() != out.data_ptr():
        out.copy_(final_out.view(out.shape))
    if final_lse.data_ptr() != lse.data_ptr():
        lse.copy_(final_lse.view(lse.shape))


_POOL_TENSORS = ("cache", "indices", "indptr", "lengths")
_POOL_NUMBERS = ("page_bytes", "index_stride", "slots", "page", "page_magic", "page_shift", "topk", "tokens_per_length")


def _pool(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    index: torch.Tensor,
    indptr: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> tuple[dict[str, torch.Tensor | None], dict[str, int]]:
    """One pool's fields of the parameters, without their number."""
    pages, page, _ = kv_cache.shape
    rows = index if indptr is not None else index.flatten(0, -2)
    rows = rows if rows.stride(-1) == 1 or rows.shape[-1] < 2 else rows.contiguous()
    per_sequence = lengths is not None and q.dim() == 4 and lengths.dim() == 1
    shift = max(page - 1, 0).bit_length()
    found = (kv_cache, rows, indptr, lengths.flatten() if lengths is not None else None)
    numbers = (
        kv_cache.stride(0) * kv_cache.element_size(),
        rows.stride(0),
        pages * page,
        page,
        -(-(1 << (31 + shift)) // max(page, 1)),
        shift,
        rows.shape[-1],
        q.shape[1] if per_sequence else 1,
    )
    return dict(zip(_POOL_TENSORS, found, strict=True)), dict(zip(_POOL_NUMBERS, numbers, strict=True))


def _splits(
    config: SparseConfig | HopperSparseConfig,
    tokens: int,
    heads: int,
    indices: Sequence[torch.Tensor],
    indptrs: Sequence[torch.Tensor | None],
    split_size: int,
) -> int:
    """Cuts per query token where no number was asked for: by cost on sm_90, else a workgroup for every compute unit,
    none with too few keys.

    In batch-invariant mode as many as the widths of dense indices need; of ragged indices nothing on the host bounds
    one token's keys, so they are not cut.
    """
    if split_size:
        ragged = any(indptr is not None for indptr in indptrs)
        return 1 if ragged else max(1, int(splits_of(sum(index.shape[-1] for index in indices), split_size)))
    keys = sum(index.numel() for index in indices) // tokens
    if isinstance(config, HopperSparseConfig):
        return hopper.splits(config.arch, tokens, heads, keys)
    return max(1, min(config.arch.compute_units // (tokens * config.tiles(heads)), keys // SHORTEST_CUT))


def _in_whole_vectors(q: torch.Tensor) -> torch.Tensor:
    """q with rows that 16-byte loads can read."""
    return q if _aligned(q) else q.clone(memory_format=torch.contiguous_format)


def _aligned(rows: torch.Tensor) -> bool:
    """Whether 16-byte accesses reach every row."""
    size = rows.element_size()
    return rows.data_ptr() % 16 == 0 and rows.stride(-1) == 1 and all(s * size % 16 == 0 for s in rows.stride()[:-1])


BACKEND = Backend("native", offer, run)
