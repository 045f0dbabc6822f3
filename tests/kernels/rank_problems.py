"""decode problems with keys dealt to the ranks of a context-parallel group, and the merge of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import mla_suite
from mla_suite import kv_formats
from mla_suite.distributed import KeyShard
from mla_suite.kv_formats import cache as caches

FP8 = {"kv_format": "fp8", "dtype": torch.float8_e4m3fn}
SHAPES: dict[str, dict[str, Any]] = {
    "one token": dict(lens=(700, 100, 1063), heads=128),
    "four tokens": dict(lens=(700, 4, 0, 1063), q_len=4, heads=32),
    "four tokens, shorter": dict(lens=(600, 5, 0, 1001), q_len=4, heads=32),
    "single keys over three ranks": dict(lens=(90, 4, 5, 333), q_len=4, heads=16, world=3),
    "pages over four ranks, some without keys": dict(lens=(70, 8, 300), q_len=8, heads=16, world=4, interleave=64),
    "runs of 7, pages of 1": dict(lens=(70, 3, 33), q_len=3, heads=8, world=3, interleave=7, page=1),
    "ragged queries": dict(lens=(700, 100, 1063, 3), q_len=4, heads=24, varlen=True, interleave=16),
    "split": dict(lens=(700, 100, 3), q_len=3, heads=40, num_splits=5, interleave=64),
    "two splits": dict(lens=(700, 100, 2000), q_len=2, heads=64, num_splits=2),
    "planned": dict(lens=(700, 100, 2063), q_len=2, heads=64, planned=True, interleave=64),
    "all keys": dict(lens=(90, 700), q_len=2, heads=64, causal=False),
    "e4m3": dict(lens=(700, 65, 2), q_len=2, heads=32, interleave=64, **FP8),
}


def rank_calls(name: str, device: torch.device) -> list[tuple[list[Any], dict[str, Any]]]:
    """(args, kwargs) of decode on every rank."""
    return _calls(device=device, **SHAPES[name])


def whole_call(name: str) -> tuple[list[Any], dict[str, Any]]:
    """The call of one process that has all keys, in fp64's hands on the CPU."""
    shape = {**SHAPES[name], "world": 1, "interleave": 1, "planned": False}
    return _calls(device=torch.device("cpu"), **shape)[0]


def merged(results: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks' results, merged by combine, on the CPU."""
    out, lse = (torch.stack([result[i].cpu() for result in results]) for i in (0, 1))
    ranks, shape = len(results), lse.shape[1:]
    merged_out, merged_lse = mla_suite.combine(
        out.float().view(ranks, -1, out.shape[-1]), lse.view(ranks, -1), num_splits=ranks, out_dtype=out.dtype
    )
    return merged_out.view(out.shape[1:]), merged_lse.view(shape)


def _calls(
    *,
    device: torch.device,
    lens: tuple[int, ...],
    heads: int,
    q_len: int = 1,
    world: int = 2,
    interleave: int = 1,
    page: int = 64,
    varlen: bool = False,
    planned: bool = False,
    causal: bool = True,
    kv_format: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    num_splits: int = 0,
) -> list[tuple[list[Any], dict[str, Any]]]:
    generator = torch.Generator().manual_seed(sum(lens) + q_len)
    kind, batch = kv_formats.get_kv_format(kv_format), len(lens)
    q_lens = [1 + b % q_len for b in range(batch)] if varlen else [q_len] * batch
    shape = (sum(q_lens), heads, 576) if varlen else (batch, q_len, heads, 576)
    q = torch.randn(shape, generator=generator).to(dtype)
    descale = torch.tensor(0.02) if kind.per_tensor_descale else None
    keys = caches.pack(kind, torch.randn(batch, max(lens), 576, generator=generator), descale=descale)
    totals = torch.tensor(lens, dtype=torch.int32)
    calls = []
    for rank in range(world):
        shard = KeyShard(world, rank, interleave)
        own = shard.local_lens(totals)
        width = max(1, -(-int(own.max()) // page))
        cache = torch.full((batch * width, page, keys.shape[-1]), torch.nan).to(keys.dtype)
        table = torch.randperm(batch * width, generator=generator).to(torch.int32).view(batch, width)
        for b, length in enumerate(lens):
            slots = local_slots(range(length), table[b].tolist(), page, shard)
            here = slots >= 0
            raw, rows = cache.view(torch.uint8).flatten(0, 1), keys[b, :length][here].view(torch.uint8)
            raw[slots[here]] = rows
        cu_seqlens_q = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32) if varlen else None
        kwargs: dict[str, Any] = dict(softmax_scale=0.05, kv_format=kv_format, causal=causal, num_splits=num_splits)
        if varlen:
            kwargs["max_seqlen_q"] = max(q_lens)
        tot = None
        if world > 1:
            kwargs |= dict(cp_world_size=world, cp_rank=rank, cp_interleave=interleave)
            tot = totals.clone()
        tensors = [q, cache, own, table, None, None, cu_seqlens_q, None, descale, None, None, None, tot]
        moved = [None if tensor is None else tensor.to(device) for tensor in tensors]
        if planned:
            moved[11] = mla_suite.plan(moved[2], num_heads=heads, max_seqlen_q=q_len, max_seqlen_kv=max(lens))
        calls.append((moved, kwargs))
    return calls


def local_slots(positions: Sequence[int], pages: Sequence[int], page_size: int, shard: KeyShard) -> torch.Tensor:
    """int64 [len(positions)]: where this rank stores the keys at these global positions, -1 for keys of other ranks."""
    where = torch.tensor(list(positions), dtype=torch.int64, device="cpu")
    own = shard.owns(where)
    local = torch.where(own, shard.local_positions(where), 0)
    table = torch.tensor(list(pages) or [0], dtype=torch.int64, device="cpu")
    return torch.where(own, table[local // page_size] * page_size + local % page_size, -1)
