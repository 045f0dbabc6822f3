"""Latent cache layers that take the place of a transformers cache's own layers.

`LatentLayer` implements transformers' interface of a cache layer, so whichever cache object a caller holds, a
`LatentCache` or an empty DynamicCache of the caller's own, answers for the latents behind it: lengths, crop, reset,
reorder_cache, batch_repeat_interleave and batch_select_indices. The layers of one cache share a `LatentStore`, which
counts tokens once for all of them.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from mla_suite.integrations.transformers_store import LatentStore


class LatentLayer(CacheLayerMixin):
    """One layer of latent attention in a transformers cache."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, store: LatentStore, layer_idx: int) -> None:
        super().__init__()
        self.store, self.layer_idx = store, layer_idx
        self.is_compileable = not store.growable
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        return self.store.batch

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: a store is made whole."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new latents and k_pe as they are: our attention function is given them and writes them."""
        self.store.check_patched()
        return key_states, value_states

    def update_indexer(self, key_states: torch.Tensor) -> torch.Tensor:
        self.store.check_patched()
        return self.store.update_indexer(key_states, self.layer_idx)

    def get_seq_length(self) -> Any:
        return self.store.length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.store.length() + query_length if self.store.growable else self.store.max_len), 0

    def get_max_length(self) -> int:
        return -1 if self.store.growable else self.store.max_len

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -tokens_to_remove tokens, as after a rejected draft; padding counts as tokens here.

        Raises ValueError for a positive number, which transformers refuses, too.
        """
        if tokens_to_remove > 0:
            given = f"crop({tokens_to_remove})"
            raise ValueError(f"LatentCache: {given}; give -{tokens_to_remove} to drop that number of tokens")
        if self._last():
            self.store.crop(-tokens_to_remove)

    def reset(self) -> None:
        if self._last():
            self.store.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.store.select_tokens(self.layer_idx, beam_idx)
        if self._last():
            self.store.select_counts(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.store.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(torch.arange(self.store.batch, device=indices.device)[indices])

    def offload(self) -> NoReturn:
        raise NotImplementedError("LatentCache: latents are not offloaded to the CPU; use a cache without offloading")

    prefetch = offload

    def _last(self) -> bool:
        """Whether this layer is the last of its cache that is asked, and so counts for all."""
        return self.layer_idx == self.store.indices[-1]


class LatentCache(Cache):
    """A transformers cache whose latent layers are ours, for a fixed batch.

    Layers without latent attention, as the linear ones of Kimi Linear, keep the state that transformers gives them.
    Layers with an indexer have its keys here too, a row for each cached token.

    With `max_len`, rounded up to whole pages of `page_size` tokens, memory for `batch` sequences of that length is
    taken at once and nothing moves afterwards, so a compiled decode step runs at any length. Without it the cache grows
    as it fills, in eager mode only. Eager calls raise past max_len; compiled steps on a GPU cannot check, so the caller
    must stop in time.
    """

    def __init__(self, model: nn.Module, batch: int, max_len: int | None = None, *, page_size: int = 64) -> None:
        if batch < 1 or page_size < 1 or (max_len is not None and max_len < 1):
            given = f"batch {batch}, max_len {max_len} and page_size {page_size}"
            raise ValueError(f"LatentCache: {given}; each is 1 or more, and max_len None for a cache that grows")
        self.store = LatentStore(model, batch, max_len, page_size)
        super().__init__(layers=layers_of(self.store, model))

    @property
    def max_len(self) -> int:
        """Tokens per sequence that fit as the cache stands."""
        return self.store.max_len

    @property
    def seq_lens(self) -> torch.Tensor:
        """int32 [batch]: cached tokens of every sequence, without padding."""
        return self.store.seq_lens


def layers_of(store: LatentStore, model: nn.Module) -> list[Any]:
    """A cache's layers: ours where attention is latent, transformers' own elsewhere.

    The config may name fewer layers than the model has, as while generate() drafts with the first layers.
    """
    own = DynamicCache(config=cast(Any, model.config).get_text_config(decoder=True)).layers
    layers: list[Any] = [
        LatentLayer(store, layer_idx) if layer_idx in store.latents else own[layer_idx]
        for layer_idx in range(max(len(own), store.indices[-1] + 1))
    ]
    store.others = [layer for layer in layers if not isinstance(layer, LatentLayer)]
    return layers


def find_store(cache: Any) -> LatentStore | None:
    """The store behind a cache's latent layers, if it has any."""
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, LatentLayer):
            return layer.store
    return None


def store_of(cache: Cache, model: nn.Module, batch: int) -> LatentStore:
    """The store behind a cache; an empty DynamicCache gets latent layers in the place of its own."""
    found = find_store(cache)
    if found is not None:
        return found
    if torch.compiler.is_compiling():
        raise TypeError("patch: a compiled step needs a LatentCache(model, batch, max_len) as its cache")
    if type(cache) is not DynamicCache or cache.offloading or cache.get_seq_length() != 0:
        raise TypeError(
            f"patch: the cache is a {type(cache).__name__} with keys and values of its own; pass LatentCache(model, "
            "batch, max_len), an empty DynamicCache, or nothing"
        )
    store = LatentStore(model, batch, None, 64)
    store.explicit = False
    cache.layers[:] = layers_of(store, model)
    return store
