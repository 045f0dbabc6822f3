"""Hugging Face DeepSeek V2 and V3 models on our attention and paged latent cache.

    model = DeepseekV3ForCausalLM.from_pretrained(...)
    patch(model)                                        # undo with unpatch(model), or use it as a context manager
    cache = LatentCache(model, batch=4, max_len=4096)
    model.generate(**inputs, past_key_values=cache)     # without one, a cache that grows is made for you

Only attention changes: parameters stay the model's own, under their names. Prefill is un-absorbed, every step of one
token is absorbed decode over the latent cache. Padding (attention_mask 0) is never cached, so ragged batches cost their
real tokens. What a mask hides must be hidden when the token arrives; tokens already cached stay visible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from mla_suite.integrations._common import WIDE
from mla_suite.integrations.transformers_cache import LatentCache, kv_format_of
from mla_suite.models.cache import Step
from mla_suite.models.config import MLAConfig, Yarn
from mla_suite.models.mla import MLA

ATTENTION_NAME = "mla_suite"


def config_of(config: Any) -> MLAConfig:
    """The MLAConfig of a DeepseekV2Config or DeepseekV3Config."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise ValueError(f"patch: rope_type {kind!r}; default and yarn are possible: leave this model as it is")
    yarn = None
    if kind == "yarn":
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        yarn = Yarn(
            factor=rope.get("factor") or config.max_position_embeddings / rope["original_max_position_embeddings"],
            original_max_position=rope["original_max_position_embeddings"],
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            mscale=rope["mscale"] if both else 1.0,
            mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
        )
    return MLAConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        num_layers=config.num_hidden_layers,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        max_position=config.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        yarn=yarn,
        rope_interleaved=getattr(config, "rope_interleave", True),  # V2 has no such field and always pairs neighbours
        projection_bias=config.attention_bias,
    )


class _Call(NamedTuple):
    """The values that one forward of the model hands to each of its attention layers."""

    cache: LatentCache | None
    step: Step | None
    valid: torch.Tensor | None
    prefix: bool


class LatentAttention(MLA):
    """`MLA` with the parameters and the call signature of a transformers DeepSeek attention."""

    def __init__(self, original: nn.Module, config: MLAConfig) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.kv_format = kv_format_of(cast(nn.Linear, original.kv_b_proj).weight.dtype)
        self.layer_idx = cast(int, original.layer_idx)
        for name, module in original.named_children():
            setattr(self, name, module)
        self.train(original.training)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LatentAttention:
        super()._apply(fn, recurse)  # .half() and its like: caches made from now on have the new dtype
        self.kv_format = WIDE.get(self.kv_b_proj.weight.dtype, self.kv_format)
        return self

    def forward(  # type: ignore[override]  # the signature is that of the module it stands in for
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        mla_suite_call: _Call | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if mla_suite_call is None:
            raise TypeError("patch: a patched attention was called outside its model; call the model that was patched")
        cache, step, valid, prefix = mla_suite_call
        batch, q_len = hidden_states.shape[:2]
        cos_sin = _cos_sin(position_embeddings, batch)
        if cache is None or step is None:
            positions = torch.arange(batch * q_len, device=hidden_states.device)
            return self.prefill(hidden_states, cos_sin, positions=positions, valid=valid), None
        kv_cache = cache.paged.layers[self.layer_idx]
        if q_len == 1:
            return self.decode(hidden_states, kv_cache, step, cos_sin), None
        return self.prefill(hidden_states, cos_sin, kv_cache, step, valid=valid, prefix=prefix), None


def _cos_sin(position_embeddings: Any, batch: int) -> torch.Tensor:
    """fp32 [batch x q_len, 64] from V3's (cos, sin), whose halves repeat, or V2's complex numbers."""
    if isinstance(position_embeddings, tuple):
        cos, sin = (t[..., : t.shape[-1] // 2] for t in position_embeddings)
    else:
        cos, sin = torch.view_as_real(position_embeddings).unbind(-1)
    rows = torch.cat((cos, sin), dim=-1).float()
    return rows.expand(batch, -1, -1).reshape(-1, rows.shape[-1])


class Patch:
    """The changes `patch` made to a model; `unpatch` undoes it, and so does leaving the `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        base = cast(Any, model).model
        self._attentions = [(layer, layer.self_attn) for layer in base.layers]
        self._implementation = base.config._attn_implementation
        config = config_of(base.config)
        replacements = [LatentAttention(_checked(attention, config), config) for _, attention in self._attentions]
        for (layer, _), replacement in zip(self._attentions, replacements, strict=True):
            layer.self_attn = replacement
        base.config._attn_implementation = ATTENTION_NAME
        self._hook = base.register_forward_pre_hook(self._before, with_kwargs=True)

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *_: object) -> None:
        unpatch(self.model)

    def restore(self) -> None:
        """Put back the original attention layers."""
        for layer, attention in self._attentions:
            layer.self_attn = attention
        cast(Any, self.model).model.config._attn_implementation = self._implementation
        self._hook.remove()

    def _before(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Runs before the decoder: one step of the cache for all layers."""
        if args:
            names = ("input_ids", "attention_mask", "position_ids", "past_key_values")
            kwargs = dict(zip(names, args, strict=False), **kwargs)
        if kwargs.get("output_attentions"):
            raise ValueError(
                "patch: output_attentions=True; attention weights are never stored: unpatch the model to see them"
            )
        given = kwargs.get("input_ids")
        shape = kwargs["inputs_embeds"].shape if given is None else given.shape
        batch, q_len = shape[0], shape[1]
        valid = _valid(kwargs.get("attention_mask"), q_len)
        use_cache = kwargs.get("use_cache")
        cache = self._cache(
            kwargs.get("past_key_values"), cast(Any, base.config).use_cache if use_cache is None else use_cache, batch
        )
        step, prefix = None, False
        if cache is not None:
            if kwargs.get("position_ids") is None:
                positions = torch.arange(q_len, device=cache.seen.device) + cache.seen
                kwargs["position_ids"] = positions[None]
            prefix = q_len > 1 and cache.has_prefix
            cache.has_prefix = True
            step = cache.begin(batch, q_len, valid)
        call = _Call(cache, step, valid, prefix)
        return (), {**kwargs, "attention_mask": None, "past_key_values": cache, "mla_suite_call": call}

    def _cache(self, given: Cache | None, use_cache: bool, batch: int) -> LatentCache | None:
        if isinstance(given, LatentCache):
            return given
        if given is None and not use_cache:
            return None
        if torch.compiler.is_compiling():
            raise TypeError("patch: a compiled step needs past_key_values=LatentCache(model, batch, max_len)")
        if given is None:
            return LatentCache(self.model, batch)
        # generate() makes an empty DynamicCache; its holder may pass it again, so it keeps its latent cache.
        kept = vars(given)
        if type(given) is DynamicCache and "latent_cache" not in kept and given.get_seq_length() == 0:
            kept["latent_cache"] = LatentCache(self.model, batch)
        if "latent_cache" not in kept:
            raise TypeError(
                f"patch: past_key_values is a {type(given).__name__} with keys and values of its own; pass "
                "LatentCache(model, batch, max_len), or nothing"
            )
        return cast(LatentCache, kept["latent_cache"])


def _valid(attention_mask: torch.Tensor | None, q_len: int) -> torch.Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(
            f"patch: attention_mask has shape {tuple(attention_mask.shape)}; give [batch, tokens] with 0 for padding"
        )
    return attention_mask[:, -q_len:].bool()


def _checked(attention: nn.Module, config: MLAConfig) -> nn.Module:
    """Refuse an attention layer whose computation is not the one we put in its place."""
    if type(attention) not in (v2.DeepseekV2Attention, v3.DeepseekV3Attention):
        raise TypeError(f"patch: attention is a {type(attention).__name__}; a fresh DeepSeek V2 or V3 model is needed")
    if type(attention.kv_b_proj) is not nn.Linear:
        raise TypeError(f"patch: kv_b_proj is a {type(attention.kv_b_proj).__name__}; absorption needs a plain Linear")
    if abs(cast(float, attention.scaling) - config.softmax_scale) > 1e-6 * config.softmax_scale:
        raise ValueError(
            f"patch: the model scales scores by {attention.scaling}, its config says {config.softmax_scale}: "
            "make the two agree"
        )
    return attention


def patch(model: nn.Module) -> Patch:
    """Put `LatentAttention` under a DeepseekV2ForCausalLM or DeepseekV3ForCausalLM, in place.

    Raises TypeError or ValueError, before anything changes, for a model that it does not know or that is patched.
    """
    if not isinstance(model, (v2.DeepseekV2ForCausalLM, v3.DeepseekV3ForCausalLM)):
        raise TypeError(
            f"patch: a {type(model).__name__}; possible are DeepseekV2ForCausalLM and DeepseekV3ForCausalLM: load one"
        )
    if "mla_suite_patch" in vars(model):
        raise ValueError("patch: this model is patched already; call unpatch(model) first")
    applied = Patch(model)
    vars(model)["mla_suite_patch"] = applied
    return applied


def unpatch(model: nn.Module) -> None:
    """Give the model its own attention back."""
    if "mla_suite_patch" not in vars(model):
        raise ValueError("unpatch: this model is not patched; nothing to undo")
    vars(model).pop("mla_suite_patch").restore()


def _keep_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """Masks stay [batch, tokens]; the patched model reads padding from them and nothing else."""
    return attention_mask


def _no_attention(*_: Any, **__: Any) -> None:
    raise TypeError("attention implementation 'mla_suite' is not a function of q, k and v; call patch(model)")


AttentionMaskInterface.register(ATTENTION_NAME, _keep_mask)
AttentionInterface.register(ATTENTION_NAME, _no_attention)
