"""The latents behind a transformers cache: pages of rows, and which tokens of the batch they are of."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from mla_suite.integrations import WIDE, capturing, refuse
from mla_suite.models.cache import Step, slots

ATTENTION_NAME = "mla_suite"
LEAST_LATENT, LEAST_ROPE = 16, 32  # values that a Triton kernel of decode reads at least


class Call(NamedTuple):
    """The values that one forward of the model hands to each of its attention layers."""

    store: LatentStore | None
    step: Step | None
    valid: torch.Tensor | None
    prefix: bool


class LatentStore:
    """The latents of a fixed batch in pages, and which of the batch's columns they are of.

    A column is a position of transformers' 2-D attention mask. A token that the mask hides takes up a column and no
    row of the cache, so ragged batches cost their real tokens. Sequence b owns pages b x width to (b + 1) x width - 1
    of every layer. `begin` says where a forward's tokens go, and `commit` makes them part of the cache; a forward that
    ends in an error in between leaves the cache as it was.

    With `max_len` nothing moves after construction, so a compiled step runs at any length. Without it the store grows
    as it fills, in eager mode only.
    """

    @torch.inference_mode(False)  # tensors made in inference mode could not be written to outside of it
    def __init__(self, model: nn.Module, batch: int, max_len: int | None, page_size: int) -> None:
        self.growable = max_len is None
        self.page_size = page_size
        attentions = [cast(Any, attention) for _, _, attention in latent_attentions(model)]
        if not attentions:
            raise TypeError(f"LatentCache: a {type(model).__name__} has no layers of latent attention to cache for")
        self.indices = sorted(attention.layer_idx for attention in attentions)
        dtype, device = next(attentions[0].kv_b_proj.parameters()).dtype, cast(torch.device, model.device)
        self.kv_format = kv_format_of(dtype)
        self.others: list[Any] = []  # layers without latent attention, which transformers made
        self._saved: list[dict[str, Any]] = []
        width = 1 if max_len is None else -(-max_len // page_size)
        self.latents = {
            attention.layer_idx: torch.zeros(
                batch * width, page_size, sum(cached_widths(attention)), dtype=dtype, device=device
            )
            for attention in attentions
        }
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        self._columns = 0  # of those seen, the ones of eager calls
        self.has_prefix = False
        self.hides = False  # whether an eager call's mask has hidden a token
        self.explicit = True  # whether the caller made a LatentCache, whose compiled steps need no mask
        self._set_width(batch, width)
        # The last column is spare: a compiled step on a GPU that runs past max_len marks it instead.
        self.kept = torch.zeros(batch, self.max_len + 1, dtype=torch.bool, device=device)
        self.index_keys = {
            layer_idx: torch.zeros(batch, self.max_len + 1, head_dim, dtype=dtype, device=device)
            for layer_idx, head_dim in _index_head_dims(model).items()
        }
        self._index = torch.empty(0, dtype=torch.int64, device=device)  # these two of the step that `begin` began
        self._selectable = 0
        self._pending: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] | None = None
        self._mark_static()

    @property
    def batch(self) -> int:
        return self.block_table.shape[0]

    @property
    def max_len(self) -> int:
        """Tokens per sequence that fit as the store stands."""
        return self.block_table.shape[1] * self.page_size

    def kv_cache(self, layer_idx: int) -> torch.Tensor:
        """The cache tensor of the model's layer `layer_idx`."""
        if layer_idx not in self.latents:
            raise TypeError(
                f"LatentCache: no tokens of layer {layer_idx}, which has latent attention; this cache was made for "
                "another model: make it with the model that is run"
            )
        return self.latents[layer_idx]

    def begin(self, batch: int, q_len: int, mask: torch.Tensor | None) -> Call:
        """Make room for q_len columns of every sequence, and say where their tokens go.

        `mask` is transformers' 2-D attention mask [batch, any width], whose column j is column j of the cache; what it
        does not reach is hidden. Positions count the rows of `cos_sin` that the model's own rotary_emb makes for this
        call.
        """
        if batch != self.batch:
            raise ValueError(
                f"LatentCache: a batch of {batch} for a cache of {self.batch} sequences; make the cache with the batch "
                "that is decoded"
            )
        eager = not torch.compiler.is_compiling()
        if eager:
            self._make_room(q_len)
            self._saved = [_copy(vars(layer)) for layer in self.others]
            if mask is None and self.hides and not self.explicit:
                refuse(
                    "patch", "attention_mask is None for a cache in which it has hidden tokens", "give it every time"
                )
        columns = self.seen + torch.arange(q_len, device=self.seen.device)
        valid = None if mask is None else at_columns(mask, columns)
        if eager and valid is not None:
            self._check_mask(cast(torch.Tensor, mask), valid)
        start = self.seq_lens.long()[:, None]
        if valid is None:
            index = start + torch.arange(q_len, device=self.seq_lens.device)
            slot_mapping = slots(self.block_table, index, self.page_size)
            lens = self.seq_lens + q_len
        else:
            # Padding looks up token 0, which every sequence has room for, and is then skipped.
            index = torch.where(valid, start + valid.cumsum(1) - 1, -1)
            slot_mapping = slots(self.block_table, index.clamp(min=0), self.page_size)
            slot_mapping = torch.where(valid, slot_mapping, -1)
            lens = self.seq_lens + valid.sum(1, dtype=torch.int32)
        if self.index_keys:
            self._index, self._selectable = index, self.max_len if self.has_prefix else q_len
        self._pending = (columns, valid, lens)
        positions = torch.arange(batch * q_len, device=self.seq_lens.device)
        step = Step(self.block_table, lens, slot_mapping.flatten(), positions)
        return Call(self, step, valid, q_len > 1 and self.has_prefix)

    def commit(self) -> None:
        """Make the tokens of the step that `begin` began part of the cache."""
        assert self._pending is not None
        columns, valid, lens = self._pending
        self._pending = None
        self.kept[:, columns.clamp(max=self.max_len)] = torch.ones_like(self.kept[:, :1]) if valid is None else valid
        self.seq_lens.copy_(lens)
        self.seen.add_(columns.shape[0])
        self.has_prefix = True
        if not torch.compiler.is_compiling():
            self._columns += columns.shape[0]
            self._saved = []

    def roll_back(self) -> None:
        """Forget the step that `begin` began: its forward ended in an error."""
        self._pending = None
        for layer, saved in zip(self.others, self._saved, strict=False):
            vars(layer).clear()
            vars(layer).update(saved)
        self._saved = []

    def update_indexer(self, key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write an indexer's keys [batch, q_len, head_dim] of the new tokens; return those of all that may be selected.

        Padding, and what is past max_len, goes to the spare last row, which is never returned. The keys are kept in
        fp32 from where on an indexer gives such, as in bf16 models of some folders and under autocast.
        """
        keys = self.index_keys[layer_idx]
        if torch.promote_types(keys.dtype, key_states.dtype) != keys.dtype:
            keys = self._widen(layer_idx)
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        keys[rows, self._index.clamp(max=self.max_len)] = key_states.to(keys.dtype)
        return keys[:, : self._selectable]

    def visible(self) -> torch.Tensor:
        """bool [batch, 1, q_len, keys]: which of the keys that `update_indexer` returns a new token may select."""
        positions = torch.arange(self._selectable, device=self.seq_lens.device)
        return (positions <= self._index[..., None])[:, None]

    def length(self) -> Any:
        """Columns seen: a number, or a tensor where compiled steps count on the device and nobody waits for them."""
        return self._columns if self.growable else self.seen

    def crop(self, columns: int) -> None:
        """Forget the newest columns of every sequence, as many as asked for or as there are."""
        number = torch.arange(self.kept.shape[1], device=self.kept.device)
        gone = self.kept & (number >= self.seen - columns)
        self.seq_lens.sub_(gone.sum(1, dtype=torch.int32))
        self.kept.logical_and_(~gone)
        self.seen.sub_(columns).clamp_(min=0)
        self._columns = max(self._columns - columns, 0)

    def reset(self) -> None:
        """Forget all tokens."""
        self.seq_lens.zero_()
        self.seen.zero_()
        self.kept.zero_()
        self._columns = 0
        self.has_prefix = self.hides = False

    @torch.inference_mode(False)
    def select_tokens(self, layer_idx: int, sequences: torch.Tensor) -> None:
        """Give row i of one layer the tokens of sequence `sequences[i]`."""
        pages = self.latents[layer_idx]
        own = pages.view(self.batch, -1, *pages.shape[1:]).index_select(0, sequences.to(pages.device))
        self.latents[layer_idx] = _placed(pages, own.flatten(0, 1))
        if layer_idx in self.index_keys:
            keys = self.index_keys[layer_idx]
            self.index_keys[layer_idx] = _placed(keys, keys.index_select(0, sequences.to(keys.device)))

    @torch.inference_mode(False)
    def select_counts(self, sequences: torch.Tensor) -> None:
        """Do for the counts of tokens what `select_tokens` has done for every layer's."""
        chosen = sequences.to(self.kept.device)
        self.seq_lens = _placed(self.seq_lens, self.seq_lens.index_select(0, chosen))
        self.kept = _placed(self.kept, self.kept.index_select(0, chosen))
        if self.seq_lens.shape[0] != self.batch:
            self._set_width(self.seq_lens.shape[0], self.block_table.shape[1])
        self._mark_static()

    def check_patched(self) -> None:
        """TypeError outside of a patched model's forward: another's attention would take new latents for all keys."""
        if self._pending is None:
            raise TypeError("LatentCache: this model's attention is not ours; call patch(model) before using the cache")

    def check_dtype(self, dtype: torch.dtype) -> None:
        """TypeError where the model that uses this store has another dtype than when the store was made."""
        if WIDE.get(dtype) != self.kv_format:
            raise TypeError(
                f"LatentCache: it holds latents in {self.kv_format} for a model in {WIDE.get(dtype, dtype)}; make the "
                "cache after model.to, model.bfloat16 and their like"
            )

    def _check_mask(self, mask: torch.Tensor, valid: torch.Tensor) -> None:
        """ValueError for a mask that shows or hides other columns than when their tokens came. Waits for the device."""
        if capturing(mask):
            return
        number = torch.arange(self.kept.shape[1], device=self.kept.device)
        differs = (at_columns(mask, number) != self.kept) & (number < self.seen)
        differ, all_valid = torch.stack((differs.any(), valid.all())).tolist()
        if differ:
            row, column = differs.nonzero()[0].tolist()
            seen = "cached" if self.kept[row, column] else "hidden, so it is not cached"
            refuse(
                "patch",
                f"attention_mask has {int(at_columns(mask, number)[row, column])} for column {column} of sequence "
                f"{row}, whose token was {seen}",
                "a token that is cached stays visible and a hidden one stays hidden: give the mask as it was, with "
                "columns for the new tokens behind",
            )
        self.hides |= not all_valid

    def _make_room(self, q_len: int) -> None:
        waits = not self.growable and not self.seen.is_cuda  # a fixed cache on a GPU never waits for the device
        needed = (int(self.seen) if waits else self._columns) + q_len
        if needed > self.max_len and not self.growable:
            raise RuntimeError(
                f"LatentCache: {needed} tokens per sequence for a cache of max_len {self.max_len}; make it longer"
            )
        if needed > self.max_len:
            self._grow(max(-(-needed // self.page_size), 2 * self.block_table.shape[1]))

    @torch.inference_mode(False)
    def _grow(self, width: int) -> None:
        """Hold `width` pages of every sequence."""
        more = width - self.block_table.shape[1]
        for layer_idx, pages in self.latents.items():
            own = pages.view(self.batch, -1, *pages.shape[1:])
            self.latents[layer_idx] = functional.pad(own, (0, 0, 0, 0, 0, more)).flatten(0, 1)
        self._set_width(self.batch, width)
        self.kept = functional.pad(self.kept, (0, self.max_len + 1 - self.kept.shape[1]))
        for layer_idx, keys in self.index_keys.items():
            self.index_keys[layer_idx] = functional.pad(keys, (0, 0, 0, self.max_len + 1 - keys.shape[1]))

    @torch.inference_mode(False)
    def _widen(self, layer_idx: int) -> torch.Tensor:
        """Keep the keys of a layer's indexer in fp32; returns them."""
        keys = self.index_keys[layer_idx]
        if torch.compiler.is_compiling() or capturing(keys):
            raise TypeError(
                "LatentCache: this model's indexer gives float32 keys, for which a compiled or captured call cannot "
                "widen the cache; make one eager call first, as of the prompt"
            )
        self.index_keys[layer_idx] = keys.float()
        self._mark_static()
        return self.index_keys[layer_idx]

    def _set_width(self, batch: int, width: int) -> None:
        numbers = torch.arange(batch * width, dtype=torch.int32, device=self.seq_lens.device)
        self.block_table = numbers.view(batch, width)

    def _mark_static(self) -> None:
        tensors = (*self.latents.values(), *self.index_keys.values(), self.block_table, self.seq_lens, self.seen)
        for tensor in (*tensors, self.kept):
            torch._dynamo.mark_static_address(tensor)


def at_columns(mask: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """bool [batch, n]: the mask at these columns [n]; false where it does not reach."""
    inside = columns < mask.shape[1]
    return mask.bool()[:, columns.clamp(max=mask.shape[1] - 1)] & inside


def latent_attentions(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name in it, layer) of every latent attention layer in the model, patched or not."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "kv_b_proj") and hasattr(child, "layer_idx")
    ]


def cached_widths(attention: nn.Module) -> tuple[int, int]:
    """Values of a layer's cached token that are key and value, and those that are key alone.

    They are the layer's own wherever the operators' kernels read such rows, as all do in powers of two; others are
    padded with zeros to the next ones, which changes no score and no value.
    """
    rank, rope = cast(int, attention.kv_lora_rank), cast(int, attention.qk_rope_head_dim)
    return _power_of_two(max(rank, LEAST_LATENT)), _power_of_two(max(rope, LEAST_ROPE)) if rope else 0


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def kv_format_of(dtype: torch.dtype) -> str:
    """The cache kv_format that stores latents in the model's own dtype."""
    if dtype not in WIDE:
        raise TypeError(
            f"patch: a model in {dtype}; possible are bfloat16, float16 and float32: convert it with model.to"
        )
    return WIDE[dtype]


def _placed(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The new contents, in the old tensor where they fit, since compiled steps know its address."""
    return old.copy_(new) if old.shape == new.shape else new


def _copy(value: Any) -> Any:
    """The attributes of one of transformers' cache layers, or a part of them, with tensors copied."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(each) for each in value)
    return {key: _copy(each) for key, each in value.items()} if isinstance(value, dict) else value


def _index_head_dims(model: nn.Module) -> dict[int, int]:
    """By layer: the width of its indexer's keys, for layers that have an indexer of their own."""
    layers = (cast(Any, attention) for _, _, attention in latent_attentions(model))
    return {layer.layer_idx: layer.indexer.head_dim for layer in layers if getattr(layer, "indexer", None) is not None}
