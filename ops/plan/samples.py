"""Named planning problems: equal, ragged and forced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mla_suite.core.op import Sample


def sample(
    lens: Sequence[int],
    *,
    num_heads: int,
    num_sm_parts: int,
    max_seqlen_kv: int,
    max_seqlen_q: int = 1,
    num_splits: int = 0,
    split_size: int = 0,
    varlen: bool = False,
    window_left: int = -1,
) -> Sample:
    def make(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        q_lens = [1 + b % max_seqlen_q for b in range(len(lens))]
        cu_seqlens_q = torch.tensor([0, *q_lens], device=device).cumsum(0).to(torch.int32) if varlen else None
        sizes = dict(
            num_heads=num_heads, max_seqlen_q=max_seqlen_q, num_sm_parts=num_sm_parts, max_seqlen_kv=max_seqlen_kv
        )
        options = sizes | {"num_splits": num_splits, "split_size": split_size}
        return (seq_lens, cu_seqlens_q), options | ({"window_left": window_left} if window_left >= 0 else {})

    mode = f"-n{num_splits}" if num_splits else f"-s{split_size}" if split_size else ""
    name = f"b{len(lens)}-kv{max(lens)}-r{num_heads * max_seqlen_q}-p{num_sm_parts}{mode}" + (
        ("-varlen" if varlen else "") + (f"-w{window_left}" if window_left >= 0 else "")
    )
    return Sample(name, make, 8 * len(lens) + 4 * num_sm_parts, 0)


def samples() -> Sequence[Sample]:
    return (
        sample([4096, 0, 1, 700, 12000], num_heads=16, num_sm_parts=12, max_seqlen_kv=16384),
        sample([512] * 8, num_heads=128, num_sm_parts=20, max_seqlen_kv=1024, num_splits=3, varlen=True),
        sample([5000, 64, 900], num_heads=64, num_sm_parts=4, max_seqlen_kv=8192, split_size=1024),
        sample([5000, 0, 900], num_heads=16, num_sm_parts=4, max_seqlen_kv=8192, max_seqlen_q=2, window_left=512),
    )
