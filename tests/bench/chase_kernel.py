"""Chains of loads of which each waits for the one before, in Triton: what a read costs that no other hides."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORDS = 32  # a line of 128 bytes, the unit of NVIDIA's and AMD's second-level caches
HOPS = 32


@triton.jit
def chase_kernel(lines, found, HOPS: tl.constexpr, WORDS: tl.constexpr):
    line = tl.program_id(0)
    for _ in range(HOPS):
        line = tl.max(tl.load(lines + line * WORDS + tl.arange(0, WORDS)), 0)  # every word names the next line
    tl.store(found + tl.program_id(0), line)


def chains(count: int, device: torch.device) -> torch.Tensor:
    """[count x HOPS, WORDS] int32: the first `count` lines begin the chains, which share no line and end at -1 - chain.

    Where a chain goes on is drawn, so that no prefetcher follows it.
    """
    order = torch.randperm((HOPS - 1) * count, device=device).view(HOPS - 1, count) + count
    begins = torch.arange(count, device=device)
    path = torch.cat((begins[None], order))
    following = torch.empty(count * HOPS, dtype=torch.int32, device=device)
    following[path[:-1]] = path[1:].int()
    following[path[-1]] = (-1 - begins).int()
    return following[:, None].expand(-1, WORDS).contiguous()


def chase(lines: torch.Tensor, found: torch.Tensor) -> None:
    """Follow every chain of `lines` to its end, and write the end's name to `found`."""
    chase_kernel[(found.shape[0],)](lines, found, HOPS=HOPS, WORDS=WORDS, num_warps=1)
