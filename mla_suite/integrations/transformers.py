"""Hugging Face models with latent attention on our attention and paged latent cache.

    model = DeepseekV3ForCausalLM.from_pretrained(...)
    patch(model)                                        # undo with unpatch(model), or use it as a context manager
    cache = LatentCache(model, batch=4, max_len=4096)
    model.generate(**inputs, past_key_values=cache)     # without one, a cache that grows is made for you

Only attention changes: parameters stay the model's own, under their names. Prefill is un-absorbed, every step of one
token is absorbed decode over the latent cache. Padding (attention_mask 0) is never cached, so ragged batches cost their
real tokens; a mask that later shows or hides other tokens than it did when they came is refused.

Layers that are DeepSeek V2's or V3's own are replaced whole (`transformers_layer`), all others keep their projections,
norms and rope and call our attention (`transformers_attention`); DeepSeek V4 keeps its cache too (`transformers_v4`).
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache

from mla_suite.integrations import refuse
from mla_suite.integrations.transformers_attention import POSSIBLE, attend, check, check_indexers, keep_latents
from mla_suite.integrations.transformers_cache import LatentCache, find_store, store_of
from mla_suite.integrations.transformers_interface import (
    capturing,
    check_interface,
    check_projections,
    forget_capturing,
    innermost,
)
from mla_suite.integrations.transformers_layer import LatentAttention, config_of, replaceable
from mla_suite.integrations.transformers_store import ATTENTION_NAME, Call, at_columns, kv_format_of, latent_attentions
from mla_suite.integrations.transformers_v4 import V4Patch
from mla_suite.integrations.transformers_v4 import layers as v4_layers
from mla_suite.models import prefill

__all__ = ["ATTENTION_NAME", "LatentCache", "Patch", "config_of", "patch", "unpatch"]

LATENT_KINDS = ("indexed_attention", "full_attention", "sliding_attention")
"""Kinds of layers with latent attention, as models name them."""


class Patch:
    """The changes `patch` made to a model; `unpatch` undoes it, and so does leaving the `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._changes = V4Patch(model) if v4_layers(model) else LatentPatch(model)

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *_: object) -> None:
        unpatch(self.model)

    def restore(self) -> None:
        """Put back the original attention."""
        self._changes.restore()


class LatentPatch:
    """Our attention and cache under layers that cache latents."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._attentions = latent_attentions(model)
        self._base = _decoder(model, [attention for _, _, attention in self._attentions])
        self._names = tuple(inspect.signature(self._base.forward).parameters)
        self._implementation = self._base.config._attn_implementation
        self._layer_types = _layer_types(self._base.config, [attention for _, _, attention in self._attentions])
        self._indexed = self._layer_types is not None and "indexed_attention" in self._layer_types
        replaced = [replaceable(attention) for _, _, attention in self._attentions]
        whole_layers = [each for whole, (*_, each) in zip(replaced, self._attentions, strict=True) if whole]
        self._keeps_layers = not all(replaced)
        self._cache_name = check_interface(self._base, whole_layers)
        replacements = [
            LatentAttention(attention, config_of(cast(Any, attention).config)) if whole else attention
            for whole, (_, _, attention) in zip(replaced, self._attentions, strict=True)
        ]
        for (parent, name, _), replacement in zip(self._attentions, replacements, strict=True):
            if isinstance(replacement, LatentAttention):
                setattr(parent, name, replacement)
            else:
                cast(Any, replacement).expand_kv = keep_latents
        self._base.config._attn_implementation = ATTENTION_NAME
        self._capturing = capturing(model)
        self._layers = [getattr(parent, name) for parent, name, _ in self._attentions]
        self._hooks = (
            self._base.register_forward_pre_hook(self._before, with_kwargs=True),
            self._base.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    def restore(self) -> None:
        layers = zip(self._layers, self._attentions, strict=True)
        replaced = [(ours, own) for ours, (_, _, own) in layers if isinstance(ours, LatentAttention)]
        for ours, _ in replaced:
            ours.check_forward()
        for ours, own in replaced:
            ours.hand_back(own)
        for parent, name, attention in self._attentions:
            setattr(parent, name, attention)
            vars(attention).pop("expand_kv", None)
        self._base.config._attn_implementation = self._implementation
        for hook in self._hooks:
            hook.remove()
        if replaced and capturing(self.model) != self._capturing:
            forget_capturing(self.model)

    def _before(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Runs before the decoder: one step of the cache for all layers."""
        if args:
            kwargs = dict(zip(self._names, args, strict=False), **kwargs)
        if kwargs.get("output_attentions"):
            raise ValueError(
                "patch: output_attentions=True; attention weights are never stored: unpatch the model to see them"
            )
        dropout = getattr(base.config, "attention_dropout", None)
        if base.training and dropout:
            refuse("patch", f"attention_dropout {dropout} in training", "call model.eval() first")
        check_projections(self._layers)
        implementation = self._base.config._attn_implementation
        if self._keeps_layers and implementation != ATTENTION_NAME:
            changed = f"attn_implementation is {implementation!r} since this model was patched"
            refuse("patch", changed, "a patched model has no other than ours: call unpatch(model) to use it", TypeError)
        given, embeddings = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if (given is None) == (embeddings is None):
            return (), kwargs  # the model refuses both, and neither
        shape = cast(torch.Tensor, embeddings if given is None else given).shape
        batch, q_len = shape[0], shape[1]
        masks = kwargs.get("attention_mask")
        if isinstance(masks, dict):
            masks = next(masks[kind] for kind in LATENT_KINDS if kind in masks)
        _check_mask(masks, batch)
        cache = self._cache(kwargs, batch)  # which takes the older name away: with both transformers warns
        kwargs = {**kwargs, self._cache_name: cache}
        call = self._begin(kwargs, batch, q_len, masks)
        if self._indexed:
            if call.store is None:
                device, valid = cast(Any, base).device, call.valid
                visible = prefill.visible(0, q_len, q_len, device, valid).expand(batch, 1, -1, -1)
            else:
                visible = call.store.visible()
            own = {**dict.fromkeys(LATENT_KINDS), "indexed_attention": visible}
            return (), {**kwargs, "attention_mask": own, "mla_suite_call": call}
        if self._layer_types is None:
            return (), {**kwargs, "attention_mask": None, "mla_suite_call": call}
        # The kernels of linear layers take no keyword that they do not know, so the call goes where the mask goes.
        # They get the columns that transformers gives them, which are the mask's last, however wide it is.
        linear = None if q_len == 1 or masks is None else masks[:, -q_len:]
        return (), {**kwargs, "attention_mask": {**dict.fromkeys(LATENT_KINDS, call), "linear_attention": linear}}

    def _after(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Runs after the decoder, after an error too, in which case there is no output."""
        cache = kwargs.get(self._cache_name)
        store = find_store(cache)
        if store is not None and output is None:
            store.roll_back()
        elif store is not None:
            store.commit()

    def _begin(self, kwargs: dict[str, Any], batch: int, q_len: int, mask: torch.Tensor | None) -> Call:
        """The call that this forward's attention layers get; sets position_ids where the caller left them out."""
        cache = kwargs[self._cache_name]
        if cache is None:
            _refuse_packed(kwargs.get("position_ids"), mask)
            valid = None if mask is None else at_columns(mask, torch.arange(q_len, device=mask.device))
            return Call(None, None, valid, False)
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            given = "torch.export.export of a step with a cache, which tracing without strict=True would advance"
            refuse("patch", given, "pass strict=True to it", TypeError)
        store = store_of(cache, self.model, batch)
        store.check_dtype(cast(Any, self._layers[0]).kv_b_proj.weight.dtype)
        call = store.begin(batch, q_len, mask)
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = (torch.arange(q_len, device=store.seen.device) + store.seen)[None]
        return call

    def _cache(self, kwargs: dict[str, Any], batch: int) -> Cache | None:
        """The cache of this forward: the caller's, a new one if it uses one, or None."""
        # With both names given transformers takes the newer one, even if it is None.
        old = kwargs.pop("past_key_values", None)
        given = kwargs.get(self._cache_name, old)
        use_cache = kwargs.get("use_cache")
        if given is None and not (self._base.config.use_cache if use_cache is None else use_cache):
            return None
        return DynamicCache() if given is None else given


def _check_mask(mask: torch.Tensor | None, batch: int) -> None:
    if mask is not None and (mask.dim() != 2 or mask.shape[0] != batch or not mask.shape[1]):
        raise ValueError(
            f"patch: attention_mask has shape {tuple(mask.shape)} for {batch} sequences; give [batch, tokens], where "
            "column j is token j of the cache and 0 is padding"
        )


def _refuse_packed(position_ids: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    """ValueError for several sequences in one row, which transformers finds by positions that begin again."""
    if position_ids is None or mask is not None or torch.compiler.is_compiling():
        return
    if bool((position_ids.diff(dim=-1) != 1).any()):
        refuse("patch", "position_ids of packed sequences", "give each sequence a row of its own, with attention_mask")


def _decoder(model: nn.Module, attentions: list[nn.Module]) -> Any:
    """The innermost transformers model that holds these layers; refuses layers that `attend` is not right for."""
    check_indexers(model)
    if not attentions:
        given = f"{type(model).__name__} has no layers of multi-head latent attention (no kv_b_proj)"
        refuse("patch", given, f"possible are the models of docs/transformers_models.md: {POSSIBLE}", TypeError)
    for attention in attentions:
        if isinstance(attention, LatentAttention) or "expand_kv" in vars(attention):
            refuse("patch", "this model is patched already", "call unpatch(model) first")
        check(attention)
        kv_format_of(cast(Any, attention).kv_b_proj.weight.dtype)
    return innermost(model, attentions[0])


def _layer_types(config: Any, attentions: list[nn.Module]) -> list[str] | None:
    """The kinds of the decoder's layers where they differ; None where each has latent attention over all tokens."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None or set(kinds) <= {"full_attention"}:
        return None
    windows = sum(getattr(attention, "sliding_window", None) is not None for attention in attentions)
    known = set(kinds) <= {*LATENT_KINDS, "linear_attention"} and kinds.count("sliding_attention") == windows
    if not known or {"indexed_attention", "linear_attention"} <= set(kinds):
        given = f"layers of the kinds {sorted(set(kinds))}, {windows} with latents and a sliding window"
        possible = f"possible are {', '.join(LATENT_KINDS)} with latents, and linear_attention without an indexer"
        refuse("patch", given, f"{possible}: {POSSIBLE}")
    return kinds


def patch(model: nn.Module) -> Patch:
    """Put our attention and latent cache under a transformers model with multi-head latent attention, in place.

    Raises TypeError or ValueError, before anything changes, for a model that it does not know or that is patched.
    """
    if "mla_suite_patch" in vars(model):
        raise ValueError("patch: this model is patched already; call unpatch(model) first")
    applied = Patch(model)
    vars(model)["mla_suite_patch"] = applied
    return applied


def unpatch(model: nn.Module) -> None:
    """Give the model its own attention back."""
    if "mla_suite_patch" not in vars(model):
        raise ValueError("unpatch: this model is not patched; nothing to undo")
    vars(model)["mla_suite_patch"].restore()
    del vars(model)["mla_suite_patch"]


def _keep_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """Masks stay [batch, tokens]; the patched model reads padding from them and nothing else."""
    return attention_mask


AttentionMaskInterface.register(ATTENTION_NAME, _keep_mask)
AttentionInterface.register(ATTENTION_NAME, attend)
