"""Whether this transformers and this model have the interface that `patch` was made for.

How that is decided, `interface.py` says.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from mla_suite.integrations import refuse
from mla_suite.integrations.interface import Interface
from mla_suite.integrations.transformers_cache import LatentLayer
from mla_suite.models.absorb import ABSORBABLE, not_absorbable

TESTED = ("5.20", "5.24")
"""Oldest and newest release that the tests have run with."""
CACHE_NAMES = ("cache", "past_key_values")
"""How a forward names its cache, the newer name first."""
DECODER = {"input_ids", "attention_mask", "position_ids", "inputs_embeds"}
_CAPTURES = "_output_capturing_hooks_installed"
LAYER = {"hidden_states", "position_embeddings", "attention_mask"}


def check_interface(base: nn.Module, replaced: list[nn.Module]) -> str:
    """The name of the decoder's cache argument; raises TypeError where an interface is not the one known here.

    base      the decoder that is hooked
    replaced  its attention layers that are replaced whole
    """
    interface = Interface("patch", "transformers", transformers.__version__, TESTED, "leave this model as it is")
    name = _cache_name(interface, base, DECODER)
    for layer in replaced:
        _cache_name(interface, layer, LAYER)
    interface.implemented("CacheLayerMixin", LatentLayer)
    interface.warn_if_newer(stacklevel=4)
    return name


def innermost(model: nn.Module, layer: nn.Module) -> Any:
    """The innermost transformers model that holds a layer; TypeError where a bare layer is given."""
    holders = [
        module for module in model.modules() if isinstance(module, PreTrainedModel) and layer in module.modules()
    ]
    if not holders:
        refuse("patch", f"{type(model).__name__} holds no transformers model", "give the whole model", TypeError)
    return holders[-1]


def check_projections(layers: list[Any]) -> None:
    """TypeError for a projection whose weight is read in decode steps and whose module does more than multiply by it.

    An adapter or a hook would be part of prompts, which call the module, and not of single tokens.
    """
    for layer in layers:
        given = not_absorbable(layer.kv_b_proj)
        if given is not None:
            possible = f"{ABSORBABLE}, or call unpatch(model)"
            refuse("patch", f"kv_b_proj of layer {layer.layer_idx} {given}", possible, TypeError)


def capturing(model: nn.Module) -> list[nn.Module]:
    """The modules for which transformers has installed the hooks that capture hidden states and attention weights."""
    return [module for module in model.modules() if _CAPTURES in vars(module)]


def forget_capturing(model: nn.Module) -> None:
    """Remove those hooks, so that transformers installs them anew: it does so once, by the classes that it finds then,
    which are not those of layers that were replaced."""
    for module in model.modules():
        vars(module).pop(_CAPTURES, None)
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__module__", None) == "transformers.utils.output_capturing":
                del module._forward_hooks[key]


def _cache_name(interface: Interface, module: nn.Module, needed: set[str]) -> str:
    what = type(module).__name__
    interface.takes(what, module.forward, needed)
    names = inspect.signature(module.forward).parameters
    for name in CACHE_NAMES:
        if name in names:
            return name
    interface.differs(what, f"takes its cache as none of {', '.join(CACHE_NAMES)}")
