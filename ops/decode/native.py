"""decode on our own kernels: tensors -> parameters -> launch, and the merge of what was split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from mla_suite.core.arch import Arch
from mla_suite.core.dispatch import Backend, Offer, Refusal
from mla_suite.ops.combine import config as combine_configs
from mla_suite.ops.combine.native import merge, merge_config
from mla_suite.ops.decode import crossover, hopper
from mla_suite.ops.decode.cdna4 import cdna4_config
from mla_suite.ops.decode.config import FP8_LAYOUTS, FP8_QUERIES, MOST_ROWS, WIDTHS, CdnaConfig, cdna_config
from mla_suite.ops.decode.hopper import HopperConfig
from mla_suite.ops.plan.layout import HEADER_WORDS, most_items, splits_of
from mla_suite.runtime import Buffer, has_kernel, launch
from mla_suite.runtime.scratch import partials
from mla_suite.toolchain.params import ParamStruct, load

MOST_ROW_TILES = 65535  # of a grid's second dimension
SHORTEST_CUT = 256  # keys: below this, merging costs more than another compute unit saves
RULES: dict[str, Callable[[Any, Arch, int], CdnaConfig]] = {"gfx942": cdna_config, "gfx950": cdna4_config}
SMALLEST_SCALE = 1e-30  # as good as 0, where a masked score of -inf times the scale would be NaN


def offer(problem: Any, arch: Arch | None) -> Offer | Refusal:
    if arch is not None and arch.name == "sm_90":
        return hopper.offer(problem, arch)
    if arch is None:
        return Refusal(f"no arch of ours runs these tensors: it takes {' or '.join(RULES)}, on the GPU or emulated")
    if arch.name not in RULES:
        return Refusal(f"decode has no kernel for {arch.name} yet; it takes {' or '.join(RULES)}")
    why = _unsupported(problem, arch)
    if why is not None:
        return Refusal(why)
    row = crossover.find(problem, arch)
    if row is not None and row.values["use"] == crossover.PORTABLE:
        return Refusal(f"{crossover.reason(row)} leaves it to the portable kernel")
    config = RULES[arch.name](problem, arch, MOST_ROWS if row is None else crossover.TILES[str(row.values["use"])])
    for needed in (config.instance, combine_configs.invariant(arch, problem.head_dim_v).instance):
        if not has_kernel(arch, needed):
            return Refusal(f"kernel {needed} is not built for {arch.name}; run `python -m mla_suite build`")
    tiles = f"tiles of {config.rows} rows for {problem.q_len} x {problem.heads} query rows"
    return Offer(config, tiles if row is None else f"{tiles}, by {crossover.reason(row)}")


def _unsupported(problem: Any, arch: Arch) -> str | None:
    """Why the CDNA kernels cannot take a problem; None when they can."""
    fp8_layout, fp8_query = FP8_LAYOUTS[arch.fp8], FP8_QUERIES[arch.fp8]
    caches = {torch.bfloat16: ("bf16", fp8_layout), torch.float16: ("fp16",), fp8_query: (fp8_layout,)}
    possible = caches.get(problem.q_dtype)
    if possible is None:
        return f"q is {problem.q_dtype}; it takes bfloat16, float16 or {str(fp8_query).removeprefix('torch.')}"
    if problem.layout not in possible:
        return f"layout {problem.layout} with {problem.q_dtype} queries; it takes {' or '.join(possible)}"
    if problem.head_dim not in WIDTHS or problem.head_dim_v != 512:
        return f"rows of {problem.head_dim} values with head_dim_v {problem.head_dim_v}; it takes 576 or 512 with 512"
    if problem.layout == fp8_layout and problem.head_dim != 576:
        return f"fp8 rows of {problem.head_dim} values; it takes 576"
    if problem.rope and (problem.head_dim != 576 or problem.layout != "bf16"):
        return "rope_cos_sin with a cache other than bf16 rows of 576 values"
    if problem.alignment < 16:
        return f"kv_cache is aligned to {problem.alignment} bytes; its address and block stride must be multiples of 16"
    rows = problem.heads * problem.q_len
    if rows < 1 or -(-rows // MOST_ROWS) > MOST_ROW_TILES:
        return f"{rows} query rows per sequence; it takes 1 to {MOST_ROWS * MOST_ROW_TILES}"
    return None


@cache
def _params() -> ParamStruct:
    return load("decode")


def run(
    config: CdnaConfig | HopperConfig,
    outputs: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    kv_descale: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    rope_cos_sin: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    max_q_len: int = 1,
    max_kv_len: int = 0,
    head_dim_v: int = 512,
    causal: bool = True,
    layout: str = "bf16",
    num_splits: int = 0,
    split_size: int = 0,
) -> None:
    out, lse = outputs
    batch, page, heads = seq_lens.shape[0], kv_cache.shape[1], q.shape[-2]
    q_len = q.shape[1] if cu_seqlens_q is None else max_q_len
    rows = q_len * heads
    if batch == 0 or out.numel() == 0:
        return
    tiles = config.tiles(rows)
    on_hopper = isinstance(config, HopperConfig)
    if on_hopper and plan is None:
        split_size = hopper.whole_blocks(split_size)
    if plan is not None:
        splits, slots = 1, int(most_items(plan.shape[0], batch))
        items = min(slots, config.arch.compute_units)
    else:
        bound = max_kv_len or (block_table.shape[1] if block_table is not None else _length(kv_indices)) * page
        splits = num_splits or (
            max(1, int(splits_of(bound, split_size))) if split_size else _splits(config, batch, rows, bound)
        )
        slots = batch * splits if splits > 1 else 0
        items = batch * splits
    if softmax_scale < 0:  # the kernel finds the largest score before it scales
        q, softmax_scale = _negated(q), -softmax_scale
    softmax_scale = max(softmax_scale, SMALLEST_SCALE)
    if on_hopper and q_descale is not None:  # its kernels take 16-bit queries as they are
        q = (q.float() * q_descale).to(q.dtype)
    q = _readable(q)
    final_out = out if _writable(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    final_lse = lse if lse.is_contiguous() else torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    partial_out, partial_lse = partials(q.device, slots, rows, head_dim_v) if slots else (None, None)
    tensors: dict[str, tuple[torch.Tensor | None, str]] = {
        "q": (q, "r"),
        "kv_cache": (kv_cache, "r"),
        "seq_lens": (seq_lens, "r"),
        "block_table": (block_table, "r"),
        "kv_indptr": (kv_indptr, "r"),
        "kv_indices": (kv_indices, "r"),
        "cu_seqlens_q": (cu_seqlens_q, "r"),
        "q_descale": (q_descale, "r"),
        "kv_descale": (kv_descale, "r"),
        "attn_sink": (attn_sink, "r"),
        "rope_cos_sin": (rope_cos_sin, "r"),
        "plan": (plan, "r"),
        "out": (final_out, "w"),
        "lse": (final_lse, "w"),
        "partial_out": (partial_out, "w"),
        "partial_lse": (partial_lse, "w"),
    }
    shape: dict[str, int | float] = dict(
        batch=batch,
        heads=heads,
        q_len=q_len,
        row_tiles=tiles,
        page=page,
        num_splits=splits,
        split_size=split_size if splits > 1 and not num_splits else 0,
        causal=int(causal),
        softmax_scale=softmax_scale,
    )
    if isinstance(config, HopperConfig):
        hopper.start(config, tensors, shape, items)
    else:
        _start(config, tensors, shape, items, max_kv_len)
    if partial_out is not None and partial_lse is not None:
        merge(
            partial_out,
            partial_lse,
            plan[HEADER_WORDS : HEADER_WORDS + batch + 1] if plan is not None else None,
            cu_seqlens_q,
            attn_sink,
            final_out.view(-1, heads, head_dim_v),
            final_lse.view(-1, heads),
            config=merge_config(q, out, rows, batch, -(-slots // batch), split_size > 0),
            batch=batch,
            num_splits=splits,
            skip_none=plan is not None,
        )
    if final_out is not out:
        out.copy_(final_out)
    if final_lse is not lse:
        lse.copy_(final_lse)


def _start(
    config: CdnaConfig,
    tensors: dict[str, tuple[torch.Tensor | None, str]],
    shape: dict[str, int | float],
    workers: int,
    max_kv_len: int,
) -> None:
    """Enqueue a CDNA kernel: a workgroup for every worker and row tile."""
    placed = {name: tensor for name, (tensor, _) in tensors.items() if tensor is not None}
    q, kv_cache, out, block_table = placed["q"], placed["kv_cache"], placed["out"], placed.get("block_table")
    page = kv_cache.shape[1]
    shift = max(page - 1, 0).bit_length()
    params = _params().pack(
        **{name: placed[name].data_ptr() if name in placed else 0 for name in tensors},
        **{f"kv_map_{word}": 0 for word in range(16)},
        counters=0,
        q_batch_stride=q.stride(0) if q.dim() == 4 else 0,
        q_token_stride=q.stride(-3),
        q_head_stride=q.stride(-2),
        kv_page_stride=kv_cache.stride(0),
        kv_token_stride=kv_cache.stride(1),
        block_table_stride=block_table.stride(0) if block_table is not None else 0,
        out_token_stride=out.stride(-3),
        out_head_stride=out.stride(-2),
        rows=int(shape["heads"]) * int(shape["q_len"]),
        pages=kv_cache.shape[0],
        page_magic=-(-(1 << (31 + shift)) // page),
        page_shift=shift,
        workers=workers,
        max_kv_len=max_kv_len,
        merge=0,
        **shape,
    )

    def buffers() -> Iterator[Buffer]:
        return (Buffer(name, tensor, tensors[name][1]) for name, tensor in placed.items())

    grid = (workers, int(shape["row_tiles"]), 1)
    launch("decode", config.instance, q, grid, config.threads, 0, params, buffers)


def _length(kv_indices: torch.Tensor | None) -> int:
    return 0 if kv_indices is None else kv_indices.shape[0]


def _splits(config: CdnaConfig | HopperConfig, batch: int, rows: int, bound: int) -> int:
    """Cuts per sequence where none were asked for: a workgroup for every compute unit, none with too few keys."""
    if isinstance(config, HopperConfig):
        return hopper.cuts(config.arch, batch, rows, -(-bound // hopper.KEYS))
    return max(1, min(config.arch.compute_units // (batch * config.tiles(rows)), bound // SHORTEST_CUT))


def _negated(q: torch.Tensor) -> torch.Tensor:
    return -q if q.element_size() > 1 else (-q.float()).to(q.dtype)


def _readable(q: torch.Tensor) -> torch.Tensor:
    """q with rows that 16-byte loads can read."""
    return q if _in_whole_vectors(q) else q.clone(memory_format=torch.contiguous_format)


def _writable(out: torch.Tensor) -> bool:
    """Whether 16-byte stores reach every row, and one stride leads from token to token."""
    return _in_whole_vectors(out) and (out.dim() == 3 or out.stride(0) == out.shape[1] * out.stride(1))


def _in_whole_vectors(rows: torch.Tensor) -> bool:
    size = rows.element_size()
    return rows.data_ptr() % 16 == 0 and rows.stride(-1) == 1 and all(s * size % 16 == 0 for s in rows.stride()[:-1])


BACKEND = Backend("native", offer, run)
