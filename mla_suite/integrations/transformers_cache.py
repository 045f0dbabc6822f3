"""Our paged latent cache in the place of a transformers cache."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from mla_suite.integrations import WIDE
from mla_suite.models.cache import PagedLatentCache, Step, slots

ATTENTION_NAME = "mla_suite"


class Call(NamedTuple):
    """The values that one forward of the model hands to each of its attention layers."""

    cache: LatentCache | None
    step: Step | None
    valid: torch.Tensor | None
    prefix: bool


class LatentCache(Cache):
    """The paged latent cache in the place of a transformers cache, for a fixed batch.

    Layers without latent attention, as the linear ones of Kimi Linear, keep the state that transformers gives them.
    Layers with an indexer have its keys here too, in `index_keys`: a token's row is its position among those cached, so
    that positions an indexer selects are positions in the block table's pages.

    With `max_len`, pages for `batch` sequences of that many tokens are taken at once and nothing moves afterwards, so
    a compiled decode step runs at any length. Without it the cache grows as it fills, in eager mode only.
    Tokens past max_len are refused, but for those of compiled steps on a GPU, which nobody waits to count: end there in
    time. Beam search is refused; `crop` and `reset` work.
    """

    @torch.inference_mode(False)  # tensors made in inference mode could not be written to outside of it
    def __init__(self, model: nn.Module, batch: int, max_len: int | None = None, *, page_size: int = 64) -> None:
        if batch < 1 or page_size < 1 or (max_len is not None and max_len < 1):
            given = f"batch {batch}, max_len {max_len} and page_size {page_size}"
            raise ValueError(f"LatentCache: {given}; each is 1 or more, and max_len None for a cache that grows")
        dtype, device = cast(torch.dtype, model.dtype), cast(torch.device, model.device)
        self.growable = max_len is None
        width = 1 if max_len is None else -(-max_len // page_size)
        config = cast(Any, model.config).get_text_config(decoder=True)
        indices = sorted(cast(int, attention.layer_idx) for _, _, attention in latent_attentions(model))
        if not indices:
            raise TypeError(f"LatentCache: a {type(model).__name__} has no layers of latent attention to cache for")
        self._config = config
        self._position = {layer_idx: position for position, layer_idx in enumerate(indices)}
        kv_format = kv_format_of(dtype)
        self.paged = PagedLatentCache(len(indices), batch * width, page_size, kv_format=kv_format, device=device)
        self.sequences = [self.paged.allocate(width * page_size) for _ in range(batch)]
        self.block_table = self._table()
        self._index = torch.empty(0, dtype=torch.int64, device=device)  # these two of the step that `begin` began
        self._selectable = 0
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.index_keys = {
            layer_idx: torch.zeros(batch, self.max_len + 1, head_dim, dtype=dtype, device=device)
            for layer_idx, head_dim in _index_head_dims(model).items()
        }
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        self._eager = 0  # of the tokens seen, those of eager calls
        self.has_prefix = False
        own = DynamicCache(config=config).layers
        for layer_idx in indices:
            own[layer_idx] = _CacheLayer(batch, not self.growable)
        self._others = [layer for layer in own if not isinstance(layer, _CacheLayer)]
        super().__init__(layers=own)
        tensors = (*self.paged.layers, *self.index_keys.values(), self.block_table, self.seq_lens, self.seen)
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)

    @property
    def max_len(self) -> int:
        """Tokens per sequence that fit as the cache stands."""
        return self.block_table.shape[1] * self.paged.page_size

    def kv_cache(self, layer_idx: int) -> torch.Tensor:
        """The cache tensor of the model's layer `layer_idx`."""
        if layer_idx not in self._position:
            raise TypeError(
                f"LatentCache: no tokens of layer {layer_idx}, which has latent attention; this cache was made for "
                "another model: make it with the model that is run"
            )
        return self.paged.layers[self._position[layer_idx]]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's new latents and k_pe as they are: our attention function is given them and writes them."""
        if self._config._attn_implementation != ATTENTION_NAME:
            raise TypeError("LatentCache: this model's attention is not ours; call patch(model) before using the cache")
        return key_states, value_states

    def update_indexer(self, key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write an indexer's keys [batch, q_len, head_dim] of the new tokens; return those of all that may be selected.

        Padding, and what is past max_len, goes to the spare last row, which is never returned.
        """
        keys = self.index_keys[layer_idx]
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        keys[rows, self._index.clamp(max=self.max_len)] = key_states
        return keys[:, : self._selectable]

    def visible(self) -> torch.Tensor:
        """bool [batch, 1, q_len, keys]: which of the keys that `update_indexer` returns a new token may select."""
        positions = torch.arange(self._selectable, device=self.seq_lens.device)
        return (positions <= self._index[..., None])[:, None]

    def begin(self, batch: int, q_len: int, valid: torch.Tensor | None) -> Step:
        """Make room for q_len tokens per sequence, those that `valid` [batch, q_len] marks, and say where they go.

        Positions count the rows of `cos_sin` that the model's own rotary_emb makes for this call.
        """
        if batch != self.block_table.shape[0]:
            raise ValueError(
                f"LatentCache: a batch of {batch} for a cache of {self.block_table.shape[0]} sequences; make the cache "
                "with the batch that is decoded"
            )
        if not torch.compiler.is_compiling():
            self._make_room(q_len)
        start = self.seq_lens.long()[:, None]
        if valid is None:
            index = start + torch.arange(q_len, device=self.seq_lens.device)
            slot_mapping = slots(self.block_table, index, self.paged.page_size)
            self.seq_lens.add_(q_len)
        else:
            # Padding looks up token 0, which every sequence has room for, and is then skipped.
            index = torch.where(valid, start + valid.cumsum(1) - 1, -1)
            slot_mapping = slots(self.block_table, index.clamp(min=0), self.paged.page_size)
            slot_mapping = torch.where(valid, slot_mapping, -1)
            self.seq_lens.add_(valid.sum(1, dtype=torch.int32))
        self.seen.add_(q_len)
        if self.index_keys:
            self._index, self._selectable = index, self.max_len if self.has_prefix else q_len
        self.has_prefix = True
        positions = torch.arange(batch * q_len, device=self.seq_lens.device)
        return Step(self.block_table, self.seq_lens, slot_mapping.flatten(), positions)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens seen so far, padding included, as a tensor: no step waits for it."""
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.max_len, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1 if self.growable else self.max_len

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -tokens_to_remove tokens, as after a rejected draft: as many of every sequence.

        A negative number, as generate() passes one; ValueError for a positive one, which transformers refuses, too.
        """
        if tokens_to_remove > 0:
            given = f"crop({tokens_to_remove})"
            raise ValueError(f"LatentCache: {given}; give -{tokens_to_remove} to drop that number of tokens")
        for layer in self._others:
            cast(Any, layer).crop(tokens_to_remove)
        self.seq_lens.add_(tokens_to_remove).clamp_(min=0)
        self.seen.add_(tokens_to_remove).clamp_(min=0)
        self._eager = max(self._eager + tokens_to_remove, 0)

    def reset(self) -> None:
        for layer in self._others:
            layer.reset()
        self.seq_lens.zero_()
        self.seen.zero_()
        self._eager = 0
        self.has_prefix = False

    def reorder_cache(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("LatentCache: a beam search copies sequences, this cache does not; use num_beams=1")

    batch_repeat_interleave = batch_select_indices = reorder_cache

    def _make_room(self, q_len: int) -> None:
        waits = self.growable or not self.seen.is_cuda  # a fixed cache never waits for the device
        needed = (int(self.seen) if waits else self._eager) + q_len
        if needed > self.max_len and not self.growable:
            raise RuntimeError(
                f"LatentCache: {needed} tokens per sequence for a cache of max_len {self.max_len}; make it longer"
            )
        self._eager += q_len
        if needed <= self.max_len:
            return
        self._grow(max(-(-needed // self.paged.page_size), 2 * self.block_table.shape[1]))

    @torch.inference_mode(False)
    def _grow(self, width: int) -> None:
        """Hold `width` pages of every sequence."""
        self.paged.grow(len(self.sequences) * (width - self.block_table.shape[1]))
        for sequence in self.sequences:
            self.paged.reserve(sequence, width * self.paged.page_size)
        self.block_table = self._table()
        for layer_idx, keys in self.index_keys.items():
            self.index_keys[layer_idx] = functional.pad(keys, (0, 0, 0, self.max_len + 1 - keys.shape[1]))

    def _table(self) -> torch.Tensor:
        rows = [self.paged.pages(sequence) for sequence in self.sequences]
        return torch.tensor(rows, dtype=torch.int32, device="cpu").to(self.paged.device)


class _CacheLayer(CacheLayerMixin):
    """One layer as transformers counts them; what it asks of a layer is answered by `LatentCache`."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: int, compileable: bool) -> None:
        super().__init__()
        self.batch_size = batch
        self.is_compileable = compileable
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._refuse()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._refuse()

    def get_mask_sizes(self, query_length: int) -> Any:
        self._refuse()

    def get_seq_length(self) -> Any:
        self._refuse()

    def get_max_length(self) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TypeError("LatentCache: a layer holds no keys and values of its own; call patch(model) before using it")


def latent_attentions(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name in it, layer) of every latent attention layer in the model, patched or not."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "kv_b_proj") and hasattr(child, "layer_idx")
    ]


def _index_head_dims(model: nn.Module) -> dict[int, int]:
    """By layer: the width of its indexer's keys, for layers that have an indexer of their own."""
    layers = (cast(Any, attention) for _, _, attention in latent_attentions(model))
    return {layer.layer_idx: layer.indexer.head_dim for layer in layers if getattr(layer, "indexer", None) is not None}


def kv_format_of(dtype: torch.dtype) -> str:
    """The cache kv_format that stores latents in the model's own dtype."""
    if dtype not in WIDE:
        raise TypeError(
            f"patch: a model in {dtype}; possible are bfloat16, float16 and float32: convert it with model.to"
        )
    return WIDE[dtype]
