"""decode on our own kernels: tensors -> parameters -> launch, and the merge of what was split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from mla_suite.core.arch import Arch
from mla_suite.core.dispatch import Offer, Refusal, readied
from mla_suite.launch import Buffer, bind, has_kernel
from mla_suite.launch.scratch import shaped, take
from mla_suite.ops.combine import config as combine_configs
from mla_suite.ops.combine import native as combine
from mla_suite.ops.decode import crossover, hopper
from mla_suite.ops.decode.cdna4 import cdna4_config
from mla_suite.ops.decode.config import FP8_KV_FORMATS, FP8_QUERIES, MOST_ROWS, WIDTHS, CdnaConfig, cdna_config
from mla_suite.ops.decode.hopper import HopperConfig
from mla_suite.ops.decode.prepare import POINTERS, Prepared, pack_leading, prepare
from mla_suite.ops.plan.metadata import HEADER_WORDS

MOST_ROW_TILES = 65535  # of a grid's second dimension
RULES: dict[str, Callable[[Any, Arch, int], CdnaConfig]] = {"gfx942": cdna_config, "gfx950": cdna4_config}


def offer(problem: Any, arch: Arch | None) -> Offer | Refusal:
    if arch is not None and arch.name == "sm_90":
        return hopper.offer(problem, arch)
    if arch is None:
        return Refusal("no arch of ours runs these tensors: it takes gfx942, gfx950 and sm_90, AMD's also emulated")
    if arch.name not in RULES:
        return Refusal(f"decode has no kernel for {arch.name} yet; it takes gfx942, gfx950 and sm_90")
    why = _unsupported(problem, arch)
    if why is not None:
        return Refusal(why)
    row = crossover.find(problem, arch)
    if row is not None and row.values["use"] == crossover.TRITON:
        return Refusal(f"{crossover.reason(row)} leaves it to the triton kernel")
    config = RULES[arch.name](problem, arch, MOST_ROWS if row is None else crossover.TILES[str(row.values["use"])])
    for needed in (config.instance, combine_configs.invariant(arch, problem.head_dim_v).instance):
        if not has_kernel(arch, needed):
            return Refusal(f"kernel {needed} is not built for {arch.name}; run `python -m mla_suite build`")
    tiles = f"tiles of {config.rows} rows for {problem.q_len} x {problem.heads} query rows"
    return Offer(config, tiles if row is None else f"{tiles}, by {crossover.reason(row)}")


def _unsupported(problem: Any, arch: Arch) -> str | None:
    """Why the CDNA kernels cannot take a problem; None when they can."""
    fp8_kv_format, fp8_query = FP8_KV_FORMATS[arch.fp8], FP8_QUERIES[arch.fp8]
    caches = {torch.bfloat16: ("bf16", fp8_kv_format), torch.float16: ("fp16",), fp8_query: (fp8_kv_format,)}
    possible = caches.get(problem.q_dtype)
    if possible is None:
        return f"q is {problem.q_dtype}; it takes bfloat16, float16 or {str(fp8_query).removeprefix('torch.')}"
    if problem.kv_format not in possible:
        return f"kv_format {problem.kv_format} with {problem.q_dtype} queries; it takes {' or '.join(possible)}"
    if problem.head_dim not in WIDTHS or problem.head_dim_v != 512:
        return f"rows of {problem.head_dim} values with head_dim_v {problem.head_dim_v}; it takes 576 or 512 with 512"
    if problem.kv_format == fp8_kv_format and problem.head_dim != 576:
        return f"fp8 rows of {problem.head_dim} values; it takes 576"
    if problem.rope and (problem.rope != 64 or problem.head_dim != 576 or problem.kv_format != "bf16"):
        given = f"rope_cos_sin of {problem.rope} values with {problem.kv_format} rows of {problem.head_dim}"
        return f"{given}; it turns 64 of bf16 rows of 576"
    if problem.alignment < 16:
        return f"kv_cache is aligned to {problem.alignment} bytes; its address and block stride must be multiples of 16"
    rows = problem.heads * problem.q_len
    if rows < 1 or -(-rows // MOST_ROWS) > MOST_ROW_TILES:
        return f"{rows} query rows per sequence; it takes 1 to {MOST_ROWS * MOST_ROW_TILES}"
    return None


def ready(
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
    max_seqlen_q: int = 1,
    max_seqlen_kv: int = 0,
    head_dim_v: int = 512,
    causal: bool = True,
    kv_format: str = "bf16",
    num_splits: int = 0,
    split_size: int = 0,
) -> Callable[..., None]:
    out, lse = outputs
    batch = seq_lens.shape[0]
    if batch == 0 or out.numel() == 0:
        return lambda *args, **kwargs: None
    on_hopper = isinstance(config, HopperConfig)
    adjust = _adjustment(softmax_scale < 0, q_descale is not None and on_hopper)
    if adjust is not None:
        q = adjust(q, q_descale)
    known = prepare(
        config,
        (q.dtype, q.shape, q.stride(), q.data_ptr() % 16 == 0),
        (kv_cache.shape, kv_cache.stride()),
        None if block_table is None else (block_table.shape, block_table.stride()),
        0 if kv_indices is None else kv_indices.shape[0],
        batch,
        0 if cu_seqlens_q is None else max_seqlen_q,
        0 if plan is None else plan.shape[0],
        attn_sink is not None,
        (out.dtype, out.stride(), out.data_ptr() % 16 == 0),
        lse.is_contiguous(),
        (abs(softmax_scale), max_seqlen_kv, head_dim_v, causal, num_splits, split_size),
    )
    named = partial(_buffers, known)
    launch = bind("decode", known.instance, q, known.grid, known.threads, known.shared, named, overlap=on_hopper)
    merge = None if known.merge is None else combine.launcher(known.merge, q, partial(merged, known.slots, known.rows))
    copies = known.copies_out or known.copies_lse
    partial_values = known.slots * known.rows * head_dim_v
    scratch_values = partial_values + known.slots * known.rows

    def start(
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
        **by_name: Any,
    ) -> None:
        if adjust is not None:
            q = adjust(q, q_descale)
        if known.copies_q:
            q = q.clone(memory_format=torch.contiguous_format)
        out, lse = reachable(outputs, (known.copies_out, known.copies_lse)) if copies else outputs
        scratch, partial_at, partial_lse_at = None, 0, 0
        if merge is not None:
            scratch = take(q.device, scratch_values)
            partial_at = scratch.data_ptr()
            partial_lse_at = partial_at + 4 * partial_values
        inputs = (
            *(q, kv_cache, seq_lens, block_table, kv_indptr, kv_indices, cu_seqlens_q, q_descale),
            *(kv_descale, attn_sink, rope_cos_sin, plan),
        )
        inputs_at = [0 if tensor is None else tensor.data_ptr() for tensor in inputs]  # as POINTERS begins
        q_at, cache_at, lens_at, table_at, indptr_at, indices_at, tokens_at, _, _, sink_at, _, plan_at = inputs_at
        out_at, lse_at = out.data_ptr(), lse.data_ptr()
        outputs_at = out_at, lse_at, partial_at, partial_lse_at
        if known.boxes is not None:
            pages_at = indices_at if block_table is None else table_at
            pointers = cache_at, lens_at, pages_at, indptr_at, tokens_at, sink_at, plan_at, *outputs_at
            leading = hopper.leading(*known.boxes, q_at, pointers)
        else:
            leading = pack_leading(*inputs_at, *outputs_at)
        launch(leading + known.numbers, (inputs, (out, lse), scratch))
        if merge is not None:
            cuts_at = plan_at and plan_at + 4 * HEADER_WORDS
            addresses = partial_at, partial_lse_at, cuts_at, tokens_at, sink_at, out_at, lse_at
            merge(addresses, (batch, cu_seqlens_q, attn_sink, plan, (out, lse), scratch))
        if copies:
            give_back(outputs, (out, lse))

    return start


def _adjustment(negative: bool, descale: bool) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None:
    """(q, q_descale) -> q as the kernels take it; None where they take it as it is.

    They find the largest score before they scale it, so the scale must be positive; sm_90's know no q_descale.
    """
    if not negative and not descale:
        return None

    def adjust(q: torch.Tensor, q_descale: torch.Tensor | None) -> torch.Tensor:
        if negative:
            q = -q if q.element_size() > 1 else (-q.float()).to(q.dtype)
        return q if q_descale is None or not descale else (q.float() * q_descale).to(q.dtype)

    return adjust


def reachable(outputs: tuple[torch.Tensor, ...], copies: tuple[bool, bool]) -> tuple[torch.Tensor, ...]:
    """Results where the kernel can write: copies, where it cannot reach the rows of the given ones as they lie."""
    replaced = zip(outputs, copies, strict=True)
    return tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) if copied else t for t, copied in replaced])


def give_back(outputs: tuple[torch.Tensor, ...], made: tuple[torch.Tensor, ...]) -> None:
    """Results that `reachable` had written elsewhere, into the given ones."""
    for given, result in zip(outputs, made, strict=True):
        if result is not given:
            given.copy_(result)


_INPUTS = POINTERS[: POINTERS.index("out")]


def _buffers(
    known: Prepared,
    inputs: tuple[torch.Tensor | None, ...],
    results: tuple[torch.Tensor, torch.Tensor],
    scratch: torch.Tensor | None,
) -> Iterator[Buffer]:
    """What the kernel touches; inputs in the order of _INPUTS."""
    yield from (Buffer(name, tensor, "r") for name, tensor in zip(_INPUTS, inputs, strict=True) if tensor is not None)
    yield from written(known.slots, known.rows, results, scratch)


def written(
    slots: int, rows: int, results: tuple[torch.Tensor, torch.Tensor], scratch: torch.Tensor | None
) -> Iterator[Buffer]:
    """What the kernel writes: the results, and partials of `slots` splits of so many rows where there is scratch."""
    tensors = dict(zip(("out", "lse"), results, strict=True))
    if scratch is not None:
        parts = shaped(scratch, slots, rows, results[0].shape[-1])
        tensors |= dict(zip(("partial_out", "partial_lse"), parts, strict=True))
    yield from (Buffer(name, tensor, "w") for name, tensor in tensors.items())


def merged(
    slots: int,
    rows: int,
    batch: int,
    cu_seqlens_q: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    plan: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor],
    scratch: torch.Tensor,
) -> Iterator[Buffer]:
    """What the merge of `slots` partials of so many rows touches."""
    out, lse = results[0].flatten(0, -3), results[1].flatten(0, -2)  # views: one stride leads from token to token
    parts = shaped(scratch, slots, rows, out.shape[-1])
    indptr = None if plan is None else plan[HEADER_WORDS : HEADER_WORDS + batch + 1]
    partly = plan is not None or cu_seqlens_q is not None
    return combine.buffers(*parts, indptr, cu_seqlens_q, attn_sink, out, lse, partly)


BACKEND = readied("native", offer, ready)
run = BACKEND.run
