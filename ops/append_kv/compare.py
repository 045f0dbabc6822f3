"""A call of append_kv beside the reference: the rows that it wrote, and no other byte of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mla_suite.core.op import Compared
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.append_kv import reference


def compare(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> Sequence[Compared]:
    """The values of written rows are equal. They do not depend on what the cache held, which is gone after the call."""
    fmt, (_, page, width) = get_kv_format(args.kv_format), args.kv_cache.shape
    tokens = reference.written(args.slot_mapping).sort().values
    # The reference writes them side by side into a cache of its own.
    side_by_side = torch.arange(len(tokens), device=tokens.device)
    alone = dict(kv_cache=args.kv_cache.new_empty((-(-len(tokens) // page), page, width)), slot_mapping=side_by_side)
    for name in ("kv_c", "k_pe", "positions"):
        value = getattr(args, name)
        alone[name] = value if value is None else value[tokens]
    reference.run(None, (), replace(args, **alone))
    got = caches.gather(fmt, args.kv_cache, args.slot_mapping[tokens].long())
    return (
        Compared(
            "the rows written, in the order of their tokens,",
            got,
            caches.gather(fmt, alone["kv_cache"], side_by_side),
            0.0,
        ),
    )
