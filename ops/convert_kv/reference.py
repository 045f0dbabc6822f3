"""The definition of convert_kv: the stored fields of equal records, the fp32 rows of others."""

from __future__ import annotations

from typing import Any

import torch

from mla_suite.kv_formats import KVFormat, get_kv_format
from mla_suite.kv_formats import cache as caches


def run(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    read, written = get_kv_format(args.source_format), get_kv_format(args.destination_format)
    keep = kept(args.source_slots, args.destination_slots)
    old, new = args.source_slots[keep].long(), args.destination_slots[keep].long()
    if copied(written, read, args.source_descale, args.destination_descale):
        caches.put_fields(written, args.destination, new, caches.fields_at(read, args.source, old))
        return
    rows = caches.gather(read, args.source, old, descale=args.source_descale)
    caches.scatter(written, args.destination, new, rows, descale=args.destination_descale)


def copied(
    written: KVFormat, read: KVFormat, source_descale: torch.Tensor | None, destination_descale: torch.Tensor | None
) -> bool:
    """Whether stored bytes are what is written."""
    return source_descale is None and destination_descale is None and caches.same_records(written, read)


def kept(source_slots: torch.Tensor, destination_slots: torch.Tensor) -> torch.Tensor:
    """Which tokens have a slot on both sides."""
    return (source_slots >= 0) & (destination_slots >= 0)
