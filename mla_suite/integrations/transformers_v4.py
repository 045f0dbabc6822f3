"""DeepSeek V4 of transformers on our `sparse_decode`, behind transformers' attention interface.

V4 hands its attention function the keys whole, which are its values as well: those of the sliding window, then those
that its compressor made of older tokens, with a mask of which token sees which. So compressor, indexer and cache stay
the model's own, of its own size, and its layers are not touched: `attend_visible` reads for each token the keys that
the mask shows, and no scores of the others are held.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import mla_suite
from mla_suite.integrations import WIDE, refuse
from mla_suite.integrations.interface import Interface
from mla_suite.integrations.transformers_attention import POSSIBLE, unknown_tensors
from mla_suite.integrations.transformers_cache import find_store
from mla_suite.integrations.transformers_interface import TESTED, innermost

NAME = "mla_suite_v4"
LAYER = "DeepseekV4Attention"
CALL = ("hidden_states", "position_embeddings", "position_ids", "attention_mask")


def layers(model: nn.Module) -> list[nn.Module]:
    """The attention layers of DeepSeek V4 in a model."""
    return [module for module in model.modules() if type(module).__name__ == LAYER]


class V4Patch:
    """Our attention function in the place of V4's own."""

    def __init__(self, model: nn.Module) -> None:
        found = layers(model)
        self._base = innermost(model, found[0])
        interface = Interface("patch", "transformers", transformers.__version__, TESTED, POSSIBLE)
        interface.takes(LAYER, found[0].forward, CALL)
        interface.warn_if_newer(stacklevel=4)
        self._implementation = self._base.config._attn_implementation
        self._base.config._attn_implementation = NAME
        self._hook = self._base.register_forward_pre_hook(_check_call, with_kwargs=True)

    def restore(self) -> None:
        self._base.config._attn_implementation = self._implementation
        self._hook.remove()


def _check_call(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        refuse("patch", "output_attentions=True", "attention weights are never stored: unpatch the model to see them")
    if any(find_store(given) is not None for given in (*args, *kwargs.values())):
        possible = "give a cache of transformers, which holds its compressor's state, or no cache"
        refuse("patch", f"a cache of latents for a {type(base).__name__}", possible, TypeError)


def attend_visible(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it, where all heads share one row a key, which is the value too.

    query [batch, heads, q_len, dim]; key = value [batch, 1, keys, dim]; attention_mask [1 or batch, 1, q_len, keys] is
    0 where a token sees a key and very negative elsewhere; s_aux is a sink [heads]. The number of visible keys is read
    on the host. Returns ([batch, q_len, heads, dim], None).
    """
    unknown = unknown_tensors(others)
    if type(module).__name__ != LAYER or value is not key or unknown:
        given = f"attention of a {type(module).__name__} with {', '.join(unknown) or 'other values than keys'}"
        refuse("patch", given, f"nobody here knows what it means: {POSSIBLE}", TypeError)
    if dropout:
        refuse("patch", f"attention_dropout {dropout} in training", "call model.eval() first")
    if key.dtype not in WIDE:
        refuse("patch", f"keys in {key.dtype}", "possible are bfloat16, float16 and float32", TypeError)
    batch, heads, q_len, dim = query.shape
    keys = key.shape[2]
    if attention_mask is None:
        visible = torch.ones(batch, q_len, keys, dtype=torch.bool, device=query.device)
    else:
        visible = (attention_mask[:, 0] > torch.finfo(attention_mask.dtype).min / 2).expand(batch, -1, -1)
    sequence, _, column = visible.nonzero(as_tuple=True)
    out, _ = mla_suite.sparse_decode(
        query.transpose(1, 2).reshape(batch * q_len, heads, dim),
        [key.reshape(batch, keys, dim)],  # a page for each sequence
        [(sequence * keys + column).int()],
        [functional.pad(visible.sum(-1).flatten().cumsum(0), (1, 0)).int()],
        attn_sink=None if s_aux is None else s_aux.float(),
        kv_formats=[WIDE[key.dtype]],
        softmax_scale=scaling,
        head_dim_v=dim,
    )
    return out.view(batch, q_len, heads, dim), None


AttentionMaskInterface.register(NAME, eager_mask)
AttentionInterface.register(NAME, attend_visible)
