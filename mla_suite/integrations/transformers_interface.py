"""Whether this transformers and this model have the interface that `patch` was made for.

What is found decides, signatures and attributes, and never a version's number: a newer release whose interface matches
works, with one warning, and one that differs is refused before anything is computed.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NoReturn

import transformers
from torch import nn

from mla_suite.integrations import refuse
from mla_suite.integrations.transformers_cache import LatentLayer

TESTED = ("5.20", "5.24")
"""Oldest and newest release that the tests have run with."""
CACHE_NAMES = ("cache", "past_key_values")
"""How a forward names its cache, the newer name first."""
DECODER = {"input_ids", "attention_mask", "position_ids", "inputs_embeds"}
LAYER = {"hidden_states", "position_embeddings", "attention_mask"}
_warned: set[str] = set()


def check_interface(base: nn.Module, replaced: list[nn.Module]) -> str:
    """The name of the decoder's cache argument; raises TypeError where an interface is not the one known here.

    base      the decoder that is hooked
    replaced  its attention layers that are replaced whole
    """
    name = _cache_name(base, DECODER)
    for layer in replaced:
        _cache_name(layer, LAYER)
    if missing := sorted(LatentLayer.__abstractmethods__):
        _differs("CacheLayerMixin", f"has methods that are not implemented here: {', '.join(missing)}")
    _warn_of_a_newer_release()
    return name


def check_projections(layers: list[Any]) -> None:
    """TypeError for a projection whose weight is read in decode steps and whose module does more than multiply by it.

    An adapter or a hook would be part of prompts, which call the module, and not of single tokens.
    """
    for layer in layers:
        found = layer.kv_b_proj
        if type(found) is not nn.Linear or found.bias is not None:
            given = f"kv_b_proj of layer {layer.layer_idx} is {type(found).__name__}"
        elif found._forward_hooks or found._forward_pre_hooks or "forward" in found.__dict__:
            given = f"kv_b_proj of layer {layer.layer_idx} has a hook or a forward of its own"
        else:
            continue
        possible = "absorption needs a plain Linear without bias: merge the adapter into it, or call unpatch(model)"
        refuse("patch", given, possible, TypeError)


def _cache_name(module: nn.Module, needed: set[str]) -> str:
    names = set(inspect.signature(module.forward).parameters)
    if missing := sorted(needed - names):
        _differs(type(module).__name__, f"takes no {', '.join(missing)}")
    for name in CACHE_NAMES:
        if name in names:
            return name
    _differs(type(module).__name__, f"takes its cache as none of {', '.join(CACHE_NAMES)}")


def _differs(what: str, how: str) -> NoReturn:
    given = f"{what} of transformers {transformers.__version__} {how}"
    refuse("patch", given, f"install transformers {TESTED[0]} to {TESTED[1]}, or leave this model as it is", TypeError)


def _warn_of_a_newer_release() -> None:
    found = transformers.__version__
    numbers = tuple(int(part) for part in found.split(".")[:2])
    if numbers > tuple(int(part) for part in TESTED[1].split(".")) and found not in _warned:
        _warned.add(found)
        warnings.warn(
            f"patch: transformers {found} is newer than {TESTED[1]}, the newest that mla_suite was tested with; its "
            "interface is the same",
            stacklevel=5,
        )
