"""A call of convert_kv beside the reference: the rows that it wrote; and the pages whose values it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mla_suite.core.op import Compared
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.convert_kv import reference


def compare(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> Sequence[Compared]:
    """The values of written rows are equal. They do not depend on what the cache held, which is gone after the call."""
    fmt, (_, page, width) = get_kv_format(args.destination_format), args.destination.shape
    keep = reference.kept(args.source_slots, args.destination_slots)
    # The reference writes them side by side into a cache of its own.
    side_by_side = torch.arange(int(keep.sum()), device=keep.device)
    alone = args.destination.new_empty((-(-len(side_by_side) // page), page, width))
    slots = dict(source_slots=args.source_slots[keep], destination_slots=side_by_side)
    reference.run(None, (), replace(args, destination=alone, **slots))
    got = caches.gather(fmt, args.destination, args.destination_slots[keep].long())
    return (
        Compared("the rows written, in the order of their tokens,", got, caches.gather(fmt, alone, side_by_side), 0.0),
    )


def pages(args: Any) -> dict[str, Sequence[torch.Tensor]]:
    """The page ids of the tokens that are read, each once."""
    keep = reference.kept(args.source_slots, args.destination_slots)
    return {"source": [(args.source_slots[keep].long() // args.source.shape[1]).unique()]}
