"""The paged latent cache: one tensor per layer, and the index tensors that the operators read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mla_suite import kv_formats
from mla_suite.core import checks
from mla_suite.models.config import LATENT, ROPE
from mla_suite.models.pages import PagePool

NO_SLOT = 2**62


class Step(NamedTuple):
    """Where the tokens of one forward pass go and what they may see; every tensor is on the cache's device.

    block_table   int32 [batch, width]   page of every `page_size` tokens; unused entries are 0
    seq_lens      int32 [batch]          kv_len of each sequence, the new tokens included
    slot_mapping  int64 [tokens]         page x page_size + offset of each new token; negative: not cached
    positions     int64 [tokens]         rope position of each new token
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor


def check_sequences(x: torch.Tensor, step: Step) -> None:
    """ValueError for hidden states that are not those of a decode step's sequences."""
    if x.dim() != 3 or x.shape[0] != step.seq_lens.shape[0]:
        raise ValueError(
            f"MLA.decode: x has shape {tuple(x.shape)} for a step of {step.seq_lens.shape[0]} sequences; it takes "
            "[batch, q_len, hidden_size]"
        )


def slots(block_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 slots [batch, n] of the tokens at `positions` [batch, n] of each sequence.

    Traceable, so a compiled decode step finds its slots without the host. A position outside of the table gets a slot
    that no cache has, which `append_kv` refuses on the CPU and in debug mode and skips elsewhere; an index error here
    would end the process, since it would be thrown by one of the threads that Inductor's code runs on.
    """
    columns = positions // page_size
    inside = (columns >= 0) & (columns < block_table.shape[1])
    pages = block_table.gather(1, torch.where(inside, columns, 0)).long()
    return torch.where(inside, pages * page_size + positions % page_size, NO_SLOT)


class PagedLatentCache(PagePool):
    """Latents of all layers in pages shared by any number of sequences: a `PagePool` with the tensors of its pages.

    `layers[i]` is the cache tensor of layer i, [num_pages, page_size, elements per token]: one tensor per layer, each
    its own input of a compiled graph (a stacked [layers, ...] tensor sliced inside a graph is unsafe under Inductor).
    `head_dim` is the values of a token, `MLAConfig.cached_dim` of a layer that has other widths than 512 + 64.
    Bookkeeping is on the host; `append` hands out the index tensors of one step. Running out of pages raises
    RuntimeError before a page or a byte changes.

    >>> cache = PagedLatentCache(num_layers=2, num_pages=8, page_size=16)
    >>> first = cache.allocate()
    >>> step = cache.append([first], [20])      # 20 tokens: two pages
    >>> step.block_table.shape, step.seq_lens.tolist()
    (torch.Size([1, 2]), [20])
    >>> second = cache.fork(first)              # shares both pages until one of them is written
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        *,
        kv_format: str = "bf16",
        head_dim: int = LATENT + ROPE,
        device: torch.device | str | None = None,
    ) -> None:
        num_layers = checks.as_int("PagedLatentCache", "num_layers", num_layers)
        if num_layers < 1:
            raise ValueError(f"PagedLatentCache: num_layers {num_layers}; it must be 1 or more")
        super().__init__(num_pages, page_size)
        self.kv_format = kv_format
        sizes = head_dim, self.num_pages, self.page_size
        self.layers = tuple(_storage(kv_format, *sizes, device) for _ in range(num_layers))

    @classmethod
    def contiguous(
        cls,
        num_layers: int,
        batch: int,
        max_len: int,
        *,
        kv_format: str = "bf16",
        head_dim: int = LATENT + ROPE,
        device: torch.device | str | None = None,
    ) -> tuple[PagedLatentCache, list[int]]:
        """A cache of one page per sequence, so `layers[i]` reads as [batch, max_len, ...]; sequence b is page b."""
        cache = cls(num_layers, batch, max_len, kv_format=kv_format, head_dim=head_dim, device=device)
        return cache, [cache.allocate(max_len) for _ in range(batch)]

    @property
    def device(self) -> torch.device:
        """The device of the cache tensors, and of every index tensor that this cache returns."""
        return self.layers[0].device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence occupies over all layers."""
        return sum(layer.nbytes for layer in self.layers) // (self.num_pages * self.page_size)

    def grow(self, num_pages: int) -> None:
        """Add pages. `layers` are new tensors with the old contents: graphs of the old ones must be captured again."""
        num_pages = checks.as_int("grow", "num_pages", num_pages)
        if num_pages < 0:
            raise ValueError(f"grow: {num_pages} pages; a cache grows by 0 or more")
        with torch.inference_mode(False):
            added = (layer.new_zeros(num_pages, *layer.shape[1:]) for layer in self.layers)
            self.layers = tuple(torch.cat(pair) for pair in zip(self.layers, added, strict=True))
        self._add_pages(num_pages)

    def append(self, sequences: Sequence[int], counts: Sequence[int], *, width: int | None = None) -> Step:
        """Make room for `counts[b]` new tokens of `sequences[b]`; tokens of one sequence are neighbours in the step.

        `width` fixes the block table's width (0 entries beyond a sequence's pages); None takes the longest sequence.
        """
        counts = [checks.as_int("append", f"counts[{at}]", count) for at, count in enumerate(counts)]
        self._check_width(sequences, counts, width)
        starts = [self.length(sequence) for sequence in sequences]
        copies = self._extend(sequences, counts)
        for layer in self.layers:
            for copy in copies:
                layer[copy.target] = layer[copy.source]
        block_table, seq_lens = self.view(sequences, width=width)
        spans = zip(starts, counts, strict=True)
        positions = [torch.arange(start, start + count, device="cpu") for start, count in spans]
        targets = [self._slots(sequence, own) for sequence, own in zip(sequences, positions, strict=True)]
        return Step(block_table, seq_lens, _joined(targets).to(self.device), _joined(positions).to(self.device))

    def view(self, sequences: Sequence[int], *, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """block_table int32 [batch, width] and seq_lens int32 [batch] of these sequences, without new tokens."""
        self._check_width(sequences, [0] * len(sequences), width)
        lengths = [self.length(sequence) for sequence in sequences]
        used = [self.pages(s)[: -(-n // self.page_size)] for s, n in zip(sequences, lengths, strict=True)]
        columns = max([len(pages) for pages in used] + [1]) if width is None else width
        rows = [list(pages) + [0] * (columns - len(pages)) for pages in used]
        table = self._index(rows).reshape(len(rows), columns)
        return table, self._index(lengths)

    def _check_width(self, sequences: Sequence[int], counts: Sequence[int], width: int | None) -> None:
        if width is None or len(sequences) != len(counts):  # the pool refuses the latter
            return
        checks.as_int("block table", "width", width)
        for sequence, count in zip(sequences, counts, strict=True):
            needed = -(-(self.length(sequence) + count) // self.page_size)
            if needed > width:
                raise ValueError(
                    f"block table width {width}: sequence {sequence} needs {needed} pages; give that width or more"
                )

    def _slots(self, sequence: int, positions: torch.Tensor) -> torch.Tensor:
        pages = torch.tensor(self.pages(sequence), dtype=torch.int64, device="cpu")
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size

    def _index(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cpu").to(self.device)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def _storage(
    kv_format: str, head_dim: int, num_pages: int, page_size: int, device: torch.device | str | None
) -> torch.Tensor:
    """Zeros [num_pages, page_size, width]; zeros, because a page is read whole by some kernels before it is full.

    A tensor made in inference mode could not be written to outside of it, as `append` does to copy a page.
    """
    declared = kv_formats.get_kv_format(kv_format)
    if declared.dense:
        declared = declared.sized(head_dim, 0)
    elif declared.head_dim != head_dim:
        raise ValueError(
            f"PagedLatentCache: kv_format {kv_format!r} holds rows of {declared.head_dim} values, this cache rows of "
            f"{head_dim}: use bf16, fp16, fp32, fp8 or fp8_fnuz, or v32 for rows of 576"
        )
    with torch.inference_mode(False):
        dtype = getattr(torch, declared.dtypes[0])
        return torch.zeros(num_pages, page_size, declared.width, dtype=dtype, device=device)
