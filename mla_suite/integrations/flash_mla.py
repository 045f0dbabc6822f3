"""FlashMLA's Python interface on our operators: a script written for it runs after one changed import.

    from mla_suite.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata

Conventions are FlashMLA's: lse is [batch, heads, q_len], and +inf where a query token sees no key (out is 0 there);
docs/serving_engineer.md lists what is the same, more and different. Beyond that are taken: dense calls over records (by
the fp32 reference alone, which a GPU runs where it is allowed), V4.1's records on any GPU, bf16 and fp16 caches in
sparse calls, and queries of fp32. The last parameters are those of SGLang's wheel of FlashMLA, sgl-flash-mla 1.0.0;
`out` is that of vLLM's copy. A FlashMLASchedMeta of either is taken as well.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mla_suite.core import eager
from mla_suite.core.prepared import KnownCalls
from mla_suite.errors import CallError
from mla_suite.integrations import FP8, PRECISION, WIDE, absent, check_kinds, flash_mla_kv_heads, in_words, restate
from mla_suite.integrations import refuse as _refuse
from mla_suite.integrations.direct_call import DirectCall
from mla_suite.integrations.flash_mla_metadata import Config, check_config, check_pair, forget_trace, holder_of, plan_of
from mla_suite.integrations.flash_mla_metadata import FlashMLASchedMeta as FlashMLASchedMeta
from mla_suite.integrations.flash_mla_metadata import get_mla_decoding_metadata as get_mla_decoding_metadata
from mla_suite.integrations.flash_mla_metadata import get_mla_metadata as get_mla_metadata
from mla_suite.integrations.flash_mla_prefill import flash_mla_sparse_fwd as flash_mla_sparse_fwd
from mla_suite.ops.decode import DECODE, PRECISIONS
from mla_suite.ops.plan.metadata import OPEN
from mla_suite.ops.sparse_decode import SPARSE_DECODE

_WORDS = {
    **{"kv_cache": "k_cache", "kv_caches[0]": "k_cache", "kv_caches[1]": "extra_k_cache", "kv_format": "format"},
    **{"seq_lens": "cache_seqlens", "indices[0]": "indices", "indices[1]": "extra_indices_in_kvcache"},
    **{"topk_lengths[0]": "topk_length", "topk_lengths[1]": "extra_topk_length", "plan": "tile_scheduler_metadata"},
    **{"q_descale": "descale_q", "kv_descale": "descale_k", "num_heads x max_seqlen_q": "q_len x heads"},
}
"""Arguments of the operators -> those of `flash_mla_with_kvcache`."""
_KNOWN = KnownCalls("flash_mla_with_kvcache")
_V41 = {False: "v41_interleaved", True: "v41"}  # V4.1's two page orders, by use_legacy
_V41_FP4 = {False: "v41_fp4_interleaved", True: "v41_fp4"}
FORMAT_NAMES = {
    **{"V32": {"v32"}, "V4": {"dsv4"}, "V32_NO_ROPE": {"v32_nope"}},
    **{"V41": {*_V41.values()}, "V41_FP4": {*_V41_FP4.values()}},
}
"""FlashMLA's names of records -> kv_formats."""


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    precision: str = PRECISION,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over a paged cache, dense with block_table and cache_seqlens or sparse with indices.

    q                [batch, q_len, heads, head_dim]
    k_cache          [num_pages, page_size, 1, head_dim] in q's dtype, or uint8 / float8 records, recognised by the
                     last dimension: 656 bytes per token (V3.2, the kv_format v32), 584 (V4, dsv4), 528 and 288 (V4.1,
                     v41 and v41_fp4, in the page order that use_legacy says). Rows of q's dtype may have several KV
                     heads, [num_pages, page_size, kv_heads, head_dim], in dense calls: heads / kv_heads query heads
                     that follow each other share one. Dense calls take rows of float8 as well
    block_table      [batch, width] int32; cache_seqlens [batch] int32
    tile_scheduler_metadata, num_splits   what get_mla_metadata returned, or another library's FlashMLASchedMeta; sparse
                     calls need none and take None, too
    softmax_scale    1 / sqrt(head_dim) if None
    causal           dense calls: query token i of n sees keys up to cache_seqlens - n + i; otherwise all keys
    is_fp8_kvcache   None: as k_cache's dtype says
    indices          [batch, q_len, topk] int32, page id x page + offset; -1 or out of range selects nothing
    attn_sink        [heads] fp32, adds exp(sink) to the denominator of `out`
    extra_k_cache, extra_indices_in_kvcache   a second pool under the same softmax
    topk_length, extra_topk_length   [batch] int32: how many of the indices count
    enable_batch_invariant   sparse calls do not split keys, so a sequence's bits do not depend on its batch
    use_legacy       the page order of V4.1's records: True for scales at the end of a page, False for scales behind
                     each token; not read with others, where it chooses between FlashMLA's own kernels
    kv_format        V32, V4, V41, V41_FP4, where given what k_cache's records must be, or V32_NO_ROPE for records of
                     528 bytes, of either pool, that are V3.2's without rope values (v32_nope)
    descale_q, descale_k   [1] fp32, multiply float8 queries and rows
    out              is written and returned, of the shape and dtype below; its last dimension is contiguous
    precision        'fp8' allows dense calls of float8 queries and rows sums in fewer bits, as `mla_suite.decode` says,
                     and as FlashMLA's own kernel makes them; by default 'full', unless MLA_SUITE_PRECISION=fp8 is set

    -> out [batch, q_len, heads, head_dim_v] in q's dtype, bf16 for float8 queries; lse [batch, heads, q_len] fp32,
    natural log, without the sink.

    ValueError or TypeError, in one sentence, for what is not supported; nothing is written then.
    """
    holder = holder_of(tile_scheduler_metadata)
    held, plan = (None, None) if holder is None else (holder.config, holder.tile_scheduler_metadata)
    given = (
        *(q, k_cache, block_table, cache_seqlens, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache),
        *(topk_length, extra_topk_length, descale_q, descale_k, plan, out),
    )
    chosen = enable_batch_invariant, use_legacy, kv_format
    settings = head_dim_v, softmax_scale, causal, is_fp8_kvcache, *chosen, precision, held
    known = None if held is None or num_splits is not None else eager.lookup(_KNOWN, given, settings)
    name, plan = "flash_mla_with_kvcache", None
    if known is not None:
        outputs = known.allocate() if out is None else (out, *known.allocate())
        try:
            known.launch(outputs, given)
        except CallError as error:
            restate(name, _WORDS, error)
        return outputs[0], outputs[1].transpose(1, 2)
    optional = dict(block_table=block_table, cache_seqlens=cache_seqlens, indices=indices, attn_sink=attn_sink)
    optional |= dict(extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache)
    optional |= dict(num_splits=num_splits, topk_length=topk_length, extra_topk_length=extra_topk_length, out=out)
    optional |= dict(descale_q=descale_q, descale_k=descale_k)
    flags = dict(causal=causal, enable_batch_invariant=enable_batch_invariant, use_legacy=use_legacy)
    flags |= {} if is_fp8_kvcache is None else dict(is_fp8_kvcache=is_fp8_kvcache)
    check_kinds(name, dict(q=q, k_cache=k_cache), optional, dict(head_dim_v=head_dim_v), flags)
    if precision not in PRECISIONS:
        _refuse(name, f"precision is {precision!r}", f"it takes {' or '.join(map(repr, PRECISIONS))}")
    if q.dim() != 4:
        _refuse(name, f"q has shape {tuple(q.shape)}", "it takes [batch, q_len, heads, head_dim]")
    if k_cache.dim() == 4 and k_cache.shape[2] > 1:
        beside = indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length
        if k_cache.dtype.itemsize == 1 or any(tensor is not None for tensor in beside):
            several = f"k_cache has shape {tuple(k_cache.shape)}, {k_cache.shape[2]} KV heads"
            _refuse(name, several, "records, selections of keys and sinks go with 1 KV head")
        if out is not None:
            _refuse(name, f"out is given with {k_cache.shape[2]} KV heads", "their results are joined: pass None")
        if block_table is None or cache_seqlens is None:
            _refuse(name, "block_table or cache_seqlens is missing", "dense attention needs both")
        problem = flash_mla_kv_heads.split(name, q, k_cache, block_table, cache_seqlens)
        results = flash_mla_with_kvcache(
            *(*problem, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal, is_fp8_kvcache),
            enable_batch_invariant=enable_batch_invariant,
            use_legacy=use_legacy,
            kv_format=kv_format,
            descale_q=descale_q,
            descale_k=descale_k,
            precision=precision,
        )
        return flash_mla_kv_heads.join(*results, k_cache.shape[2])
    dense_rows = q.shape[-1] if indices is None else None
    stored = _kv_format(name, "k_cache", k_cache, is_fp8_kvcache, dense_rows, use_legacy, kv_format)
    if kv_format is not None and (not isinstance(kv_format, str) or stored not in FORMAT_NAMES.get(kv_format, ())):
        possible = (
            "it takes V32 for records of 656 bytes, V4 for those of 584, V41 or V32_NO_ROPE for those of 528, V41_FP4 "
            "for those of 288, or None"
        )
        _refuse(name, f"kv_format is {kv_format!r} and k_cache holds {stored}", possible)
    if extra_k_cache is not None:
        extra_stored = _kv_format(name, "extra_k_cache", extra_k_cache, is_fp8_kvcache, None, use_legacy, kv_format)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    config = Config(
        batch=q.shape[0],
        q_len=q.shape[1],
        heads=q.shape[2],
        page_size=k_cache.shape[1],
        causal=causal,
        is_fp8_kvcache=k_cache.dtype.itemsize == 1,
        topk=None if indices is None else indices.shape[-1],
        extra_page_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[-1],
        enable_batch_invariant=enable_batch_invariant,
    )
    if holder is not None:
        if num_splits is not None:
            _refuse(name, "num_splits is given with a FlashMLASchedMeta", "pass None: the holder has the splits")
        forget_trace(holder, q)
        check_config(name, holder, config)
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        _refuse(name, "only one of extra_k_cache and extra_indices_in_kvcache is given", "pass both or neither")
    if indices is not None:
        for argument, selected in (("indices", indices), ("extra_indices_in_kvcache", extra_indices_in_kvcache)):
            if selected is not None and selected.dim() != 3:
                _refuse(name, f"{argument} has shape {tuple(selected.shape)}", "it takes [batch, q_len, topk]")
        if causal:
            _refuse(name, "causal is True with indices", "the indices say what is visible: pass causal=False")
        if descale_q is not None or descale_k is not None:
            _refuse(name, "a descale is given with indices", "they go with dense calls over float8 rows: pass None")
        if holder is None and (tile_scheduler_metadata is not None or num_splits is not None):
            check_pair(name, tile_scheduler_metadata, num_splits, q.shape[0])  # not read further
        kv_formats = [stored]
        if extra_k_cache is not None:
            kv_formats.append(extra_stored)
        elif extra_topk_length is not None:
            _refuse(name, "extra_topk_length is given without an extra pool", "pass extra_k_cache and its indices")
        split_size = OPEN if enable_batch_invariant else 0
        call = DirectCall(SPARSE_DECODE, _sparse_tensors, (kv_formats, scale, head_dim_v, 0, split_size, True))
    else:
        if extra_k_cache is not None or topk_length is not None or extra_topk_length is not None:
            _refuse(name, "a sparse argument is given without indices", "pass indices, or only the dense arguments")
        if block_table is None or cache_seqlens is None:
            _refuse(name, "block_table or cache_seqlens is missing", "dense attention needs both, sparse needs indices")
        if enable_batch_invariant:
            possible = "pass indices, or call mla_suite.decode with split_size"
            _refuse(name, "enable_batch_invariant is True in a dense call", possible)
        metadata = tile_scheduler_metadata if holder is None else holder
        plan = plan_of(name, _WORDS, metadata, num_splits, cache_seqlens, q.shape[1] * q.shape[2])
        options = scale, q.shape[1], 0, head_dim_v, causal, stored, 0, 0, 1, 0, 1, -1, precision, True
        call = DirectCall(DECODE, _dense_tensors, options)
    given = (*given[:-2], plan, out)
    attended, lse = in_words(name, _WORDS, call.run, given, head_dim_v, out)
    if holder is not None:
        holder.have_initialized, holder.config = True, config
        holder.tile_scheduler_metadata = plan
        call.store(_KNOWN, given, (*settings[:-1], config), (attended, lse), allocates_out=out is None)
    return attended, lse.transpose(1, 2)


def _dense_tensors(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of decode from those of `flash_mla_with_kvcache`."""
    q, cache, block_table, lens, _, sink, _, _, _, _, descale_q, descale_k, plan, _ = given
    descales = descale_q, descale_k
    return q, _rows(cache), lens, block_table, None, None, None, *descales, sink, None, plan, None, None, None


def _sparse_tensors(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of sparse_decode from those of `flash_mla_with_kvcache`."""
    q, cache, _, _, indices, sink, extra, extra_indices, length, extra_length, *_ = given
    if extra is None:
        return q, [_rows(cache)], [indices], [None], [length], sink, None, None, None, None
    pools, lengths = [_rows(cache), _rows(extra)], [length, extra_length]
    return q, pools, [indices, extra_indices], [None, None], lengths, sink, None, None, None, None


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """A cache [num_pages, page_size, 1, width] as the operators take it."""
    return (cache.view(torch.uint8) if cache.dtype is torch.int8 else cache).squeeze(2)


_PREFILL = ("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func")
_NO_PREFILL = (
    "this interface has no un-absorbed prefill; see mla_suite.models.MLA.prefill, or call torch's "
    "scaled_dot_product_attention"
)
__getattr__ = absent(__name__, dict.fromkeys(_PREFILL, _NO_PREFILL))
_FUSED = "fused_norm_rope_attn_rope_cast"
_FUNCTIONS = {name: f"{_FUSED}.{name}" for name in ("prefill", "decode", "permute_q_b_proj", "permute_wv_proj")}
_NO_FUSION = (
    "V4.1's fused kernel of Blackwell GPUs is not in this interface; call flash_mla_sparse_fwd or "
    "flash_mla_with_kvcache between the norm and rotation of q and the rotation and cast of out"
)
_fused = absent(_FUSED, dict.fromkeys(_FUNCTIONS.values(), _NO_FUSION))
fused_norm_rope_attn_rope_cast = SimpleNamespace(**{name: _fused(full) for name, full in _FUNCTIONS.items()})
"""sgl-flash-mla's module of this name, whose functions refuse."""


def has_legacy() -> bool:
    """Whether calls with use_legacy=True run: of sgl-flash-mla, whether its wheel has their kernels; here always."""
    return True


def _kv_format(
    name: str,
    argument: str,
    cache: torch.Tensor,
    is_fp8_kvcache: bool | None,
    dense_rows: int | None,
    use_legacy: bool,
    stated: str | None = None,
) -> str:
    """The kv_format of a cache [num_pages, page_size, 1, width]; rows of `dense_rows` values may be float8."""
    if cache.dim() != 4 or cache.shape[2] != 1 or cache.shape[1] < 1:
        _refuse(name, f"{argument} has shape {tuple(cache.shape)}", "it takes [num_pages, page_size, 1, width]")
    width = cache.shape[-1]
    if dense_rows is not None and width != dense_rows and cache.dtype in WIDE:
        given = f"{argument} has shape {tuple(cache.shape)}"
        _refuse(name, given, f"q has rows of {dense_rows} values: it takes [num_pages, page_size, 1, {dense_rows}]")
    records = {656: "v32", 584: "dsv4_fnuz" if cache.dtype == torch.float8_e4m3fnuz else "dsv4"}
    records |= {528: "v32_nope" if stated == "V32_NO_ROPE" else _V41[use_legacy], 288: _V41_FP4[use_legacy]}
    kv_format = records.get(width) if cache.dtype.itemsize == 1 else WIDE.get(cache.dtype)
    if width == dense_rows:
        kv_format = FP8.get(cache.dtype, kv_format)
    if kv_format is None:
        _refuse(
            name,
            f"{argument} is {cache.dtype} of width {width}",
            "it takes bfloat16, float16 or float32 rows, 1-byte records of 656 (V3.2), 584 (V4), 528 or 288 (V4.1) "
            "bytes, or in dense calls float8 rows",
            TypeError,
        )
    if is_fp8_kvcache is not None and is_fp8_kvcache != (cache.dtype.itemsize == 1):
        _refuse(name, f"is_fp8_kvcache is {is_fp8_kvcache} and {argument} is {cache.dtype}", "the two must agree")
    return kv_format
