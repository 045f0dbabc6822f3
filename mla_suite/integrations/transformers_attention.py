"""Our attention under the latent attention layers of any transformers model, which keep all else of their own.

Every such layer of transformers does three things in one order: it gives its normed latents and its rotated k_pe
to the cache, expands what the cache returns with its method `expand_kv`, and calls the attention function that
`config._attn_implementation` names. `LatentLayer.update` returns the new tokens alone, `keep_latents` takes the place
of `expand_kv`, and so `attend` is called with latents: no class of a model, no norm, scale, gate or rope is named here.

Latents of a width that no kernel reads are padded with zeros (`cached_widths`), which change no score and no value.
Layers with a sliding window decode with `window_left`; their prompts attend to themselves and to the cached window.

Models with an indexer pass the positions it selects on to the attention function, and `attend` has `sparse_decode` read
these alone, for prompts as for single tokens. Where the indexer selects all keys there are, attention is dense.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

import mla_suite
from mla_suite.integrations import WIDE, refuse
from mla_suite.integrations.transformers_store import Call, cached_widths
from mla_suite.models import prefill
from mla_suite.models.absorb import absorbed, head_values
from mla_suite.models.cache import slots
from mla_suite.models.config import ROPE

MAX_LATENT = 1024  # the window layers of dots3_note; wider ones nobody has asked for
POSSIBLE = "leave this model as it is"
# Tensors that models hand to every attention function and that change nothing here.
UNUSED = ("position_ids", "cache_position", "labels", "token_type_ids", "mm_token_type_ids")
# Indexers whose selection reaches the attention function, and what else is missing for the models of the others.
INDEXERS = (
    "AXK2Indexer",
    "DeepseekV32Indexer",
    "Dots3NoteTextIndexer",
    "GlmMoeDsaIndexer",
    "HYV4Indexer",
    "MistralLarge4TextIndexer",
)
MISSING = {
    "HYV4VLIndexer": "keys at positions that the model carries from call to call outside of its cache",
    "Glm5NextTextIndexer": "pools of keys by columns of the mask, padding among them, of which generate() gives a step "
    "its own tokens' columns alone, and hands its choice on as a mask where other indexers hand on positions",
}


def check_indexers(model: nn.Module) -> None:
    """Raise TypeError for a model whose selection of keys does not reach `attend`."""
    for name in sorted({type(module).__name__ for module in model.modules()}):
        if name.endswith("Indexer") and name not in INDEXERS:
            selected = MISSING.get(name, "keys in a way that is not known here")
            given = f"{type(model).__name__} selects {selected} ({name})"
            refuse("patch", given, f"possible are the models of docs/transformers_models.md: {POSSIBLE}", TypeError)


def check(attention: nn.Module) -> None:
    """Raise TypeError or ValueError for a latent attention layer that computes more than `attend` does."""
    layer = cast(Any, attention)
    name = type(layer).__name__
    if type(layer.kv_b_proj) is not nn.Linear or layer.kv_b_proj.bias is not None:
        refuse("patch", f"kv_b_proj of {name} is {layer.kv_b_proj}", "absorption needs a plain Linear", TypeError)
    if not hasattr(layer, "expand_kv"):
        refuse("patch", f"{name} has no expand_kv", "transformers 5.20 or newer is needed", TypeError)
    if layer.kv_lora_rank > MAX_LATENT or layer.qk_rope_head_dim > ROPE:
        given = f"kv_lora_rank {layer.kv_lora_rank} and qk_rope_head_dim {layer.qk_rope_head_dim}"
        refuse("patch", given, f"a cached token is {MAX_LATENT} + {ROPE} elements at most: {POSSIBLE}")


def keep_latents(kv_c: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The method `expand_kv` of a patched layer: nothing is expanded."""
    return kv_c, k_pe


def unknown_tensors(others: dict[str, Any]) -> list[str]:
    """Names of the tensors, among those that an attention function was given, whose meaning is not known here."""
    return [name for name, value in others.items() if isinstance(value, torch.Tensor) and name not in UNUSED]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    mla_suite_call: Call | None = None,
    indices: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it, for the new tokens' latents.

    query [batch, heads, q_len, nope + rope], rotated; key [batch, 1, q_len, kv_lora_rank], the normed latents; value
    [batch, 1, q_len, rope], the rotated k_pe. The model's hook passes its `Call` as mla_suite_call, or as the mask in
    models that have masks by kind of layer. With an indexer, indices are int32 [batch, q_len, topk] positions and the
    mask is bool [batch, 1, q_len, keys]: which keys the indexer chose among. s_aux is a sink [heads].
    Returns ([batch, q_len, heads, v_head_dim], None).
    """
    call = attention_mask if mla_suite_call is None else mla_suite_call
    if not isinstance(call, Call) or not hasattr(module, "kv_b_proj"):
        raise TypeError(
            f"patch: attention of a {type(module).__name__} was called outside its model; call patch(model)"
        )
    unknown = unknown_tensors(others)
    if unknown or scaling is None:
        given = f"attention of a {type(module).__name__} is called with {', '.join(unknown) or 'no scaling'}"
        refuse("patch", given, f"nobody here knows what it means: {POSSIBLE}", TypeError)
    if s_aux is not None and indices is None:
        given = f"attention of a {type(module).__name__} is called with a sink and without an indexer's choice"
        refuse("patch", given, f"nothing adds a sink to dense attention here: {POSSIBLE}", TypeError)
    layer, scale = cast(Any, module), scaling
    window = getattr(layer, "sliding_window", None)
    q, kv_c, k_pe = query.transpose(1, 2), key.squeeze(1), value.squeeze(1)
    k_pe = k_pe.to(kv_c.dtype)  # under autocast norms return fp32
    latent, rope = cached_widths(layer)
    kv_c, k_pe = _widened(kv_c, latent), _widened(k_pe, rope)
    q_len = q.shape[1]
    chosen = None
    if indices is not None and (s_aux is not None or indices.shape[-1] < attention_mask.shape[-1]):
        # Where fewer keys are visible than an indexer is to select, it selects hidden ones as well.
        chosen = torch.where(attention_mask[:, 0].gather(-1, indices.long()), indices, -1)
    if call.store is None or call.step is None:
        if chosen is not None:
            pool = torch.cat((kv_c, k_pe), dim=-1)  # a page for each sequence
            table = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)[:, None]
            return _attend_selected(layer, q, chosen, pool, WIDE[pool.dtype], table, scale, s_aux), None
        k, v = _expanded(layer, key, value)
        return prefill.causal_attention(q, k, v, softmax_scale=scale, valid=call.valid, window=window), None
    kv_cache = call.store.kv_cache(layer.layer_idx)
    mla_suite.append_kv(
        kv_c.reshape(-1, latent),
        k_pe.reshape(kv_c.shape[0] * q_len, rope),
        kv_cache,
        call.step.slot_mapping,
        kv_format=call.store.kv_format,
    )
    if chosen is not None:
        kv_format, table = call.store.kv_format, call.step.block_table
        return _attend_selected(layer, q, chosen, kv_cache, kv_format, table, scale, s_aux), None
    if q_len == 1:
        return _attend_cached(layer, q, call, kv_cache, call.step.seq_lens, scale, causal=True)[0], None
    k, v = _expanded(layer, key, value)
    if not call.prefix:
        return prefill.causal_attention(q, k, v, softmax_scale=scale, valid=call.valid, window=window), None
    lens = call.step.seq_lens
    new = torch.full_like(lens, q_len) if call.valid is None else call.valid.sum(1, dtype=torch.int32)
    if window is not None:
        return _attend_window(layer, q, k, v, call, kv_cache, lens - new, scale), None
    own = prefill.causal_attention_with_lse(q, k, v, softmax_scale=scale, valid=call.valid)
    past = _attend_cached(layer, q, call, kv_cache, lens - new, scale, causal=False)
    return prefill.merged(own, past, query.dtype), None


def _attend_window(
    layer: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    kv_cache: torch.Tensor,
    past: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Values [batch, q_len, heads, v_head_dim] of new tokens behind `past` [batch] cached ones, in a sliding window.

    The rows before the first new token that its window reaches are expanded and take the place of earlier new tokens.
    """
    assert call.step is not None
    reach, batch = layer.sliding_window - 1, q.shape[0]
    positions = past.long()[:, None] + torch.arange(-reach, 0, device=past.device)
    found = slots(call.step.block_table, positions.clamp(min=0), kv_cache.shape[1])
    rows = kv_cache.view(-1, kv_cache.shape[-1])[found][:, None]
    latent, _ = cached_widths(layer)
    earlier = _expanded(layer, rows[..., : layer.kv_lora_rank], rows[..., latent : latent + layer.qk_rope_head_dim])
    k, v = (torch.cat(pair, dim=1) for pair in zip(earlier, (k, v), strict=True))
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if call.valid is None else call.valid
    valid = torch.cat((positions >= 0, valid), dim=1)
    q = torch.cat((q.new_zeros(batch, reach, *q.shape[2:]), q), dim=1)
    out = prefill.causal_attention(q, k, v, softmax_scale=scale, valid=valid, window=layer.sliding_window)
    return out[:, reach:]


def _attend_cached(
    layer: Any, q: torch.Tensor, call: Call, kv_cache: torch.Tensor, seq_lens: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [batch, q_len, heads, v_head_dim] and lse [batch, q_len, heads] of the first seq_lens tokens cached."""
    assert call.store is not None
    assert call.step is not None
    q, w_uv = _absorbed(layer, q)
    window = getattr(layer, "sliding_window", None)
    out, lse = mla_suite.decode(
        q,
        kv_cache,
        seq_lens,
        call.step.block_table,
        softmax_scale=scale,
        max_seqlen_q=q.shape[1],
        head_dim_v=cached_widths(layer)[0],
        causal=causal,
        kv_format=call.store.kv_format,
        window_left=-1 if window is None else window - 1,  # transformers' window counts the token itself
    )
    return head_values(out[..., : layer.kv_lora_rank], w_uv), lse


def _attend_selected(
    layer: Any,
    q: torch.Tensor,
    chosen: torch.Tensor,
    pool: torch.Tensor,
    kv_format: str,
    block_table: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Values [batch, q_len, heads, v_head_dim] of the tokens at the chosen positions [batch, q_len, topk]; -1: none."""
    positions = chosen.clamp(min=0).long().flatten(1)
    found = slots(block_table, positions, pool.shape[1]).view(chosen.shape)
    q, w_uv = _absorbed(layer, q)
    out, _ = mla_suite.sparse_decode(
        q,
        [pool],
        [torch.where(chosen < 0, -1, found).int()],
        attn_sink=None if sink is None else sink.float(),
        kv_formats=[kv_format],
        softmax_scale=scale,
        head_dim_v=cached_widths(layer)[0],
    )
    return head_values(out[..., : layer.kv_lora_rank], w_uv)


def _absorbed(layer: Any, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch, q_len, heads, nope + rope] as wide as cached tokens are, and W_UV [heads, v_head_dim, rank]."""
    rank, rope = layer.kv_lora_rank, layer.qk_rope_head_dim
    weight = layer.kv_b_proj.weight.view(q.shape[2], layer.qk_nope_head_dim + layer.v_head_dim, rank)
    w_uk, w_uv = weight.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
    q_nope, q_pe = q.split([layer.qk_nope_head_dim, rope], dim=-1)
    q = absorbed(q_nope, q_pe, w_uk)
    widths = cached_widths(layer)
    if (rank, rope) != widths:
        latent, pe = q.split([rank, rope], dim=-1)
        q = torch.cat((_widened(latent, widths[0]), _widened(pe, widths[1])), dim=-1)
    return q, w_uv


def _expanded(layer: Any, kv_c: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [batch, q_len, heads, dim] of the new tokens, by the layer's own `expand_kv`."""
    k, v = type(layer).expand_kv(layer, kv_c, k_pe)
    return k.transpose(1, 2), v.transpose(1, 2)


def _widened(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[-1] == size else functional.pad(x, (0, size - x.shape[-1]))
