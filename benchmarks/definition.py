"""What benchmarks compare results with: attention as it is defined, in fp32, and how far off a result is."""

from __future__ import annotations

import torch


def attended(q: torch.Tensor, keys: torch.Tensor, scale: float, sink: torch.Tensor | None = None) -> torch.Tensor:
    """What the newest query tokens [q_len, heads, width] of a sequence make of its keys [length, width].

    sink  float [heads]: a score of each head beside those of the keys, without a value
    """
    scores = torch.einsum("qhd,kd->qhk", q.float(), keys.float()) * scale
    last = len(keys) - len(q) + torch.arange(len(q), device=q.device)
    hidden = torch.arange(len(keys), device=q.device) > last[:, None]
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.float()[None, :, None].expand(len(q), -1, 1)), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("qhk,kd->qhd", weights, keys[:, :512].float())


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far a result is from what it should be, relative to that one's norm."""
    expected = expected.float()
    return float((found.float() - expected).norm() / expected.norm())
