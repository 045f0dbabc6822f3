"""`MLA` in place of a transformers attention layer that computes what DeepSeek V2's or V3's does, in any class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from mla_suite.integrations import WIDE, refuse
from mla_suite.integrations.transformers_store import Call, kv_format_of
from mla_suite.models.config import LATENT, ROPE, MLAConfig, Yarn
from mla_suite.models.mla import MLA

# The classes whose forward is DeepSeek V2's or V3's, statement for statement.
DEEPSEEK_LAYERS = (
    "DeepseekV2Attention",
    "DeepseekV3Attention",
    "AXK1Attention",
    "Glm4MoeLiteAttention",
    "YoutuAttention",
)

# What a layer of ours and the one that it stands in for have in common, so that neither misses what is added to either.
SHARED = (
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
FLAGS = ("training", "_is_full_backward_hook")


def config_of(config: Any) -> MLAConfig:
    """The MLAConfig of a DeepseekV2Config, a DeepseekV3Config, or a config with the same fields."""
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


def replaceable(attention: nn.Module) -> bool:
    """Whether this layer computes what `MLA` computes with `config_of` its config, and nothing wraps its forward."""
    if type(attention).__name__ not in DEEPSEEK_LAYERS or "forward" in vars(attention):
        return False
    forward: Any = type(attention).forward
    while forward is not None:  # transformers' own decorators lie around it, and others may, on the class
        if getattr(forward, "__globals__", {}).get("__name__", "").partition(".")[0] != "transformers":
            return False
        forward = getattr(forward, "__wrapped__", None)
    config = cast(Any, attention).config
    if (config.kv_lora_rank, config.qk_rope_head_dim) != (LATENT, ROPE):
        return False
    if config.rope_parameters.get("rope_type", "default") not in ("default", "yarn"):
        return False
    scaling = cast(float, attention.scaling)
    return abs(scaling - config_of(config).softmax_scale) <= 1e-6 * scaling


class LatentAttention(MLA):
    """`MLA` with the parameters and the call signature of a transformers DeepSeek attention."""

    def __init__(self, original: nn.Module, config: MLAConfig) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.kv_format = kv_format_of(cast(nn.Linear, original.kv_b_proj).weight.dtype)
        self.layer_idx = cast(int, original.layer_idx)
        self.kv_lora_rank, self.qk_rope_head_dim = config.kv_lora_rank, config.qk_rope_head_dim
        vars(self).update((name, vars(original)[name]) for name in (*SHARED, *FLAGS))

    def check_forward(self) -> None:
        """TypeError where something wraps our forward, which would be lost with this layer."""
        if "forward" in vars(self):
            given = f"the attention of layer {self.layer_idx} got a forward of its own while the model was patched"
            refuse("unpatch", given, "delete it first, and wrap the layer before patch(model) or after", TypeError)

    def hand_back(self, original: nn.Module) -> None:
        """Give the layer that this one stands in for what has changed in the meantime."""
        vars(original).update((name, vars(self)[name]) for name in FLAGS)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LatentAttention:
        super()._apply(fn, recurse)  # .half() and its like: caches made from now on have the new dtype
        self.kv_format = WIDE.get(self.kv_b_proj.weight.dtype, self.kv_format)
        return self

    def forward(  # type: ignore[override]  # the signature is that of the module it stands in for
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        *,
        mla_suite_call: Call | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if mla_suite_call is None:
            raise TypeError("patch: a patched attention was called outside its model; call the model that was patched")
        store, step, valid, prefix = mla_suite_call
        batch, q_len = hidden_states.shape[:2]
        cos_sin = _cos_sin(position_embeddings, batch)
        if store is None or step is None:
            positions = torch.arange(batch * q_len, device=hidden_states.device)
            return self.prefill(hidden_states, cos_sin, positions=positions, valid=valid), None
        kv_cache = store.kv_cache(self.layer_idx)
        if q_len == 1:
            return self.decode(hidden_states, kv_cache, step, cos_sin), None
        return self.prefill(hidden_states, cos_sin, kv_cache, step, valid=valid, prefix=prefix), None


def _cos_sin(position_embeddings: Any, batch: int) -> torch.Tensor:
    """fp32 [batch x q_len, 64] from V3's (cos, sin), whose halves repeat, or V2's complex numbers."""
    if isinstance(position_embeddings, tuple):
        cos, sin = (t[..., : t.shape[-1] // 2].float() for t in position_embeddings)  # autocast joins few dtypes
    else:
        cos, sin = torch.view_as_real(position_embeddings).unbind(-1)
    rows = torch.cat((cos, sin), dim=-1)
    return rows.expand(batch, -1, -1).reshape(-1, rows.shape[-1])
