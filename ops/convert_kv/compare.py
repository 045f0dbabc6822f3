"""A call of convert_kv beside the reference: the rows that it wrote; and the pages whose values it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mla_suite.core.op import Compared
from mla_suite.ops.append_kv.compare import written_rows
from mla_suite.ops.convert_kv import reference


def compare(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> Sequence[Compared]:
    keep = reference.kept(args.source_slots, args.destination_slots)

    def write(cache: torch.Tensor, slots: torch.Tensor) -> None:
        read = args.source_slots[keep]
        reference.run(None, (), replace(args, destination=cache, source_slots=read, destination_slots=slots))

    return written_rows(args.destination_format, args.destination, args.destination_slots[keep], write)


def pages(args: Any) -> dict[str, Sequence[torch.Tensor]]:
    """The page ids of the tokens that are read, each once."""
    keep = reference.kept(args.source_slots, args.destination_slots)
    return {"source": [(args.source_slots[keep].long() // args.source.shape[1]).unique()]}
