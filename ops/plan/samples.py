"""Named planning problems: equal, ragged and forced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mla_suite.core.library import Sample


def sample(
    lens: Sequence[int],
    *,
    rows: int,
    workers: int,
    max_seqlen_kv: int,
    num_splits: int = 0,
    split_size: int = 0,
    varlen: bool = False,
) -> Sample:
    def make(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        cu_seqlens_q = torch.arange(len(lens) + 1, dtype=torch.int32, device=device) if varlen else None
        split = {"num_splits": num_splits, "split_size": split_size}
        return (seq_lens, cu_seqlens_q), {"rows": rows, "workers": workers, "max_seqlen_kv": max_seqlen_kv, **split}

    mode = f"-n{num_splits}" if num_splits else f"-s{split_size}" if split_size else ""
    name = f"b{len(lens)}-kv{max(lens)}-r{rows}-w{workers}{mode}" + ("-varlen" if varlen else "")
    return Sample(name, make, 8 * len(lens) + 4 * workers, 0)


def samples() -> Sequence[Sample]:
    return (
        sample([4096, 0, 1, 700, 12000], rows=16, workers=12, max_seqlen_kv=16384),
        sample([512] * 8, rows=128, workers=20, max_seqlen_kv=1024, num_splits=3, varlen=True),
        sample([5000, 64, 900], rows=64, workers=4, max_seqlen_kv=8192, split_size=1024),
    )
