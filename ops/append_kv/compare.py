"""A call of append_kv beside the reference: the rows that it wrote, and no other byte of the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mla_suite.core.op import Compared
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.append_kv import reference


def compare(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> Sequence[Compared]:
    tokens = reference.written(args.slot_mapping).sort().values
    values = {name: getattr(args, name) for name in ("kv_c", "k_pe", "positions")}
    taken = {name: value if value is None else value[tokens] for name, value in values.items()}

    def write(cache: torch.Tensor, slots: torch.Tensor) -> None:
        reference.run(None, (), replace(args, kv_cache=cache, slot_mapping=slots, **taken))

    return written_rows(args.kv_format, args.kv_cache, args.slot_mapping[tokens], write)


def written_rows(
    kv_format: str, cache: torch.Tensor, slots: torch.Tensor, write: Callable[[torch.Tensor, torch.Tensor], None]
) -> Sequence[Compared]:
    """The values of written rows are equal. They do not depend on what the cache held, which is gone after the call.

    write  has the reference write the same rows to given slots of a cache of its own, where they lie side by side
    """
    fmt, (_, page, width) = get_kv_format(kv_format), cache.shape
    side_by_side = torch.arange(len(slots), device=slots.device)
    alone = cache.new_empty((-(-len(slots) // page), page, width))
    write(alone, side_by_side)
    got, expected = caches.gather(fmt, cache, slots.long()), caches.gather(fmt, alone, side_by_side)
    return (Compared("the rows written, in the order of their tokens,", got, expected, 0.0),)
