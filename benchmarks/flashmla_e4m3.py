"""Rows of bench_flashmla.py over e4m3 caches, beside FlashMLA's kernel for them, whose weights are e4m3 as well."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from definition import attended
from flashmla_sparse import DEVICE, Case, Paged

import mla_suite
from mla_suite.bench.timer import cold_turns
from mla_suite.integrations import flash_mla as drop_in

PAGE, SCALE = 64, 192**-0.5
PEER_ERROR = 3e-2  # relative: what the peer's weights of three bits lose


class E4m3(NamedTuple):
    """A row of the grid; all lengths are `kv`."""

    batch: int
    heads: int
    q_len: int
    kv: int

    @property
    def name(self) -> str:
        return f"e4m3 B{self.batch} H{self.heads} q{self.q_len} kv{self.kv}"


E4M3 = (
    *(E4m3(128, 128, 1, kv) for kv in (512, 4096)),
    *(E4m3(batch, 128, 1, 4096) for batch in (8, 32)),
    E4m3(1, 128, 1, 8192),
    *(E4m3(32, 32, 4, kv) for kv in (512, 3200)),
    *(E4m3(128, heads, 1, 4096) for heads in (64, 16)),
    E4m3(32, 64, 1, 8192),
    E4m3(8, 64, 1, 4096),
    E4m3(1, 16, 1, 8192),
)


class Turn(NamedTuple):
    q: torch.Tensor  # e4m3
    wide: torch.Tensor  # the same in bf16
    cache: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    plan: torch.Tensor


def exact_of(turn: Any, lens: Sequence[int], scale: float) -> tuple[list[int], torch.Tensor]:
    """The first and the last sequence of a turn of decode, and what they must give."""
    some = sorted({0, len(lens) - 1})
    keys = (turn.cache[turn.table[b].long()].flatten(0, 1)[: lens[b]] for b in some)
    return some, torch.stack([attended(turn.q[b], own, scale) for b, own in zip(some, keys, strict=True)])


def e4m3_case(row: E4m3, peer: Any) -> Case:
    """Queries and cache in e4m3, in pages of 64, in random order.

    Columns: `bf16_q` has bf16 queries, `fp8` and `fp8_plan` precision 'fp8'; the drop-in functions have it, too, as the
    peer multiplies e4m3. All but `op` and `fp8` have a plan.
    """
    width = -(-row.kv // PAGE)
    size = row.batch * (row.kv * 576 + row.q_len * row.heads * (576 + 512 * 2))
    one = torch.ones(1, device="cuda")
    turns = []
    for _ in range(cold_turns(size, DEVICE)):
        table = torch.randperm(row.batch * width, device="cuda").int().view(row.batch, width)
        lens = torch.full((row.batch,), row.kv, dtype=torch.int32, device="cuda")
        q = torch.randn(row.batch, row.q_len, row.heads, 576, device="cuda").to(torch.float8_e4m3fn)
        cache = torch.randn(row.batch * width, PAGE, 576, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        plan = mla_suite.plan(lens, num_heads=row.heads, max_seqlen_q=row.q_len, max_seqlen_kv=row.kv)
        turns.append(Turn(q, q.bfloat16(), cache, table, lens, plan))
    options: dict[str, Any] = {"softmax_scale": SCALE, "max_seqlen_q": row.q_len, "max_seqlen_kv": row.kv}
    options |= {"kv_format": "fp8", "kv_descale": one}
    own = Paged(drop_in, SCALE, causal=True, fp8=True, descale_q=one, descale_k=one, precision="fp8")
    others = Paged(peer, SCALE, causal=True, fp8=True, descale_q=one, descale_k=one, use_legacy=True)
    rows = row.q_len * row.heads
    others.metadata.tile_scheduler_metadata, others.metadata.num_splits = peer.get_mla_decoding_metadata(
        turns[0].lens, rows, 1, row.heads, is_fp8_kvcache=True, use_legacy=True
    )

    def ours(turn: Turn, q: torch.Tensor, **extra: Any) -> torch.Tensor:
        return mla_suite.decode(q, turn.cache, turn.lens, turn.table, **options, **extra)[0]

    columns = {
        "bf16_q": lambda turn: ours(turn, turn.wide, plan=turn.plan),
        "op": lambda turn: ours(turn, turn.q, q_descale=one),
        "plan": lambda turn: ours(turn, turn.q, q_descale=one, plan=turn.plan),
        "fp8": lambda turn: ours(turn, turn.q, q_descale=one, precision="fp8"),
        "fp8_plan": lambda turn: ours(turn, turn.q, q_descale=one, plan=turn.plan, precision="fp8"),
        "drop_in": lambda turn: own(turn.q, turn.cache, turn.table, turn.lens),
        "peer": lambda turn: others(turn.q, turn.cache, turn.table, turn.lens),
    }

    exact = partial(exact_of, lens=[row.kv] * row.batch, scale=SCALE)
    flops = 2 * row.batch * row.kv * rows * (576 + 512)
    return Case(columns, turns, exact, size, flops, {"peer": PEER_ERROR})
