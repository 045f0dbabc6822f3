"""Rows of bench_flashmla.py that run sparse_decode: decode over fp8 records, and prefill over bf16 rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from definition import attended
from torch.nn import functional

import mla_suite
from mla_suite.bench.sets import OTHER_HEADS
from mla_suite.bench.timer import cold_turns
from mla_suite.integrations import flash_mla as drop_in
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

DEVICE = torch.device("cuda")
PEER_HEADS = (64, 128)
"""The heads that FlashMLA's sparse decode takes: engines lay out queries with the next of these."""


class Case(NamedTuple):
    """Calls of one row by column, over the same inputs, and what they must give."""

    columns: dict[str, Callable[[Any], Any]]
    turns: list[Any]
    exact: Callable[[Any], tuple[list[int], torch.Tensor]]  # of a turn: sequences, and their outputs in fp32
    bytes: int
    flops: int
    errors: Mapping[str, float] = {}  # relative, that columns may have beside the exact outputs


class Sparse(NamedTuple):
    """A row of the sparse grid: DeepSeek V3.2's record, or V4's two pools with a sink."""

    record: str
    batch: int
    heads: int
    q_len: int

    @property
    def name(self) -> str:
        return f"{self.record} B{self.batch} H{self.heads} q{self.q_len}"

    @property
    def pools(self) -> tuple[tuple[int, int, int], ...]:
        """(page size, tokens per request, selected) of each pool."""
        if self.record == "v32":
            return ((64, 32768, 2048),)
        return ((256, 16384, 128), (64, 16384, 1024 if self.heads == 128 else 512))


class Prefill(NamedTuple):
    """A row of sparse prefill: every query token selects `topk` of the same `kv` tokens, stored as bf16 rows."""

    tokens: int
    heads: int
    width: int
    topk: int
    kv: int

    @property
    def name(self) -> str:
        return f"T{self.tokens} H{self.heads} d{self.width} top-k {self.topk} of {self.kv}"


SPARSE = tuple(
    Sparse(record, batch, heads, q_len)
    for record in ("v32", "dsv4")
    for heads in (64, 128)
    for batch in (1, 8, 32, 128)
    for q_len in (1, 2)
) + tuple(Sparse(record, 32, heads, 1) for record in ("v32", "dsv4") for heads in (8, *OTHER_HEADS))
PREFILL = (
    Prefill(4096, 128, 576, 2048, 8192),
    Prefill(4096, 128, 576, 2048, 131072),
    Prefill(512, 128, 576, 2048, 8192),
    Prefill(4096, 128, 512, 1024, 8192),
    Prefill(4096, 64, 512, 512, 8192),
)


class SparseTurn(NamedTuple):
    q: torch.Tensor
    pools: list[torch.Tensor]
    indices: list[torch.Tensor]
    sink: torch.Tensor | None
    peer_q: torch.Tensor  # these two with as many heads as FlashMLA takes
    peer_sink: torch.Tensor | None


def sparse_case(row: Sparse, peer: Any) -> Case:
    """fp8 records; each request selects from tokens of its own, every query token anew."""
    kind = get_kv_format(row.record)
    width = kind.head_dim
    scale = width**-0.5
    pools = []
    for page, tokens, _ in row.pools:
        made = caches.pack(kind, torch.randn(64, page, width, device="cuda"))
        repeats, stride = -(-row.batch * tokens // (64 * page)), made.stride(0)
        blocks = made.as_strided((64, stride), (stride, 1)).repeat(repeats, 1)
        pools.append(blocks.as_strided((64 * repeats, page, made.shape[2]), (stride, made.shape[2], 1)))
    selected = sum(topk for *_, topk in row.pools)
    size = row.batch * row.q_len * (selected * (kind.token_bytes + 4) + row.heads * (width + 512) * 2)
    more = min(heads for heads in PEER_HEADS if heads >= row.heads) - row.heads
    turns = []
    for _ in range(min(cold_turns(size, DEVICE), 64)):
        indices = []
        for _, tokens, topk in row.pools:
            chosen = torch.rand(row.batch, row.q_len, tokens, device="cuda").topk(topk, dim=-1).indices
            first = torch.arange(row.batch, device="cuda")[:, None, None] * tokens
            indices.append((chosen + first).int())
        q = torch.randn(row.batch, row.q_len, row.heads, width, device="cuda").bfloat16()
        sink = torch.randn(row.heads, device="cuda") if row.record == "dsv4" else None
        peer_q = functional.pad(q, (0, 0, 0, more)) if more else q
        turns.append(
            SparseTurn(q, pools, indices, sink, peer_q, sink if sink is None else functional.pad(sink, (0, more)))
        )
    formats = [row.record] * len(pools)
    none: list[Any] = [None] * len(pools)
    held = {}

    def paged(module: Any, turn: SparseTurn, **extra: Any) -> torch.Tensor:
        if module not in held:
            held[module] = module.get_mla_metadata()[0]
        if len(turn.pools) > 1:
            extra |= {"extra_k_cache": turn.pools[1].unsqueeze(2), "extra_indices_in_kvcache": turn.indices[1]}
        arguments = (turn.q, turn.pools[0].unsqueeze(2), None, None, 512, held[module], None, scale, False, True)
        return module.flash_mla_with_kvcache(*arguments, turn.indices[0], attn_sink=turn.sink, **extra)[0]

    def op(turn: SparseTurn) -> torch.Tensor:
        arguments = (turn.q, turn.pools, turn.indices, none, none, turn.sink)
        return mla_suite.sparse_decode(*arguments, kv_formats=formats, softmax_scale=scale)[0]

    columns = {"op": op, "drop_in": lambda turn: paged(drop_in, turn)}
    columns["peer"] = lambda turn: paged(peer, turn._replace(q=turn.peer_q, sink=turn.peer_sink), use_legacy=True)[
        :, :, : row.heads
    ]

    def exact(turn: SparseTurn) -> tuple[list[int], torch.Tensor]:
        some = sorted({0, row.batch - 1})
        outputs = []
        for b in some:
            for i in range(row.q_len):
                rows = [
                    caches.gather(kind, pool, own[b, i].long()) for pool, own in zip(pools, turn.indices, strict=True)
                ]
                outputs.append(attended(turn.q[b, i : i + 1], torch.cat(rows), scale, turn.sink))
        return some, torch.cat(outputs).view(len(some), row.q_len, row.heads, 512)

    return Case(columns, turns, exact, size, 2 * row.batch * row.q_len * selected * row.heads * (width + 512))


class PrefillTurn(NamedTuple):
    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor


def prefill_case(row: Prefill, peer: Any) -> Case:
    """Indices are random. The drop-in returns max_logits too, as the peer does; the operator has none."""
    scale = row.width**-0.5
    size = row.tokens * (row.heads * (row.width + 512) * 2 + row.topk * 4) + row.kv * row.width * 2
    turns = []
    for _ in range(cold_turns(size, DEVICE)):
        q = torch.randn(row.tokens, row.heads, row.width, device="cuda").bfloat16()
        kv = torch.randn(row.kv, 1, row.width, device="cuda").bfloat16()
        indices = torch.randint(0, row.kv, (row.tokens, 1, row.topk), dtype=torch.int32, device="cuda")
        turns.append(PrefillTurn(q, kv, indices))

    def op(turn: PrefillTurn) -> torch.Tensor:
        arguments = (turn.q, [turn.kv], [turn.indices.squeeze(1)])
        return mla_suite.sparse_decode(*arguments, kv_formats=["bf16"], softmax_scale=scale)[0]

    def forward(module: Any, turn: PrefillTurn, **extra: Any) -> torch.Tensor:
        return module.flash_mla_sparse_fwd(turn.q, turn.kv, turn.indices, scale, **extra)[0]

    columns = {"op": op, "drop_in": lambda turn: forward(drop_in, turn)}
    columns["peer"] = lambda turn: forward(peer, turn, use_legacy=True)

    def exact(turn: PrefillTurn) -> tuple[list[int], torch.Tensor]:
        some = sorted({0, row.tokens // 2, row.tokens - 1})
        outputs = []
        for token in some:
            keys = turn.kv[turn.indices[token, 0].long(), 0]
            outputs.append(attended(turn.q[token : token + 1], keys, scale))
        return some, torch.cat(outputs)

    return Case(columns, turns, exact, size, 2 * row.tokens * row.topk * row.heads * (row.width + 512))
