"""Rows of bench_flashmla.py that run sparse_decode: decode over fp8 records, and prefill over bf16 rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from definition import attended
from served_rows import pool
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


class Paged:
    """FlashMLA's call over pages, of FlashMLA or of the drop-in, with its metadata made beforehand.

    always  arguments of every call
    """

    def __init__(self, module: Any, scale: float, *, causal: bool, fp8: bool, **always: Any) -> None:
        self.metadata, self._always = module.get_mla_metadata()[0], always
        self._call, self._numbers = module.flash_mla_with_kvcache, (scale, causal, fp8)

    def __call__(
        self, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor | None, lens: torch.Tensor | None, **more: Any
    ) -> torch.Tensor:
        arguments = (q, cache.unsqueeze(2), table, lens, 512, self.metadata, None, *self._numbers)
        return self._call(*arguments, **self._always, **more)[0]


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
    pools = [pool(row.record, page, row.batch * tokens // page) for page, tokens, _ in row.pools]
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
    own = Paged(drop_in, scale, causal=False, fp8=True)
    others = Paged(peer, scale, causal=False, fp8=True, use_legacy=True)

    def paged(call: Paged, turn: SparseTurn) -> torch.Tensor:
        more: dict[str, Any] = {"indices": turn.indices[0], "attn_sink": turn.sink}
        if len(turn.pools) > 1:
            more |= {"extra_k_cache": turn.pools[1].unsqueeze(2), "extra_indices_in_kvcache": turn.indices[1]}
        return call(turn.q, turn.pools[0], None, None, **more)

    def op(turn: SparseTurn) -> torch.Tensor:
        arguments = (turn.q, turn.pools, turn.indices, none, none, turn.sink)
        return mla_suite.sparse_decode(*arguments, kv_formats=formats, softmax_scale=scale)[0]

    def of_peer(turn: SparseTurn) -> torch.Tensor:
        return paged(others, turn._replace(q=turn.peer_q, sink=turn.peer_sink))[:, :, : row.heads]

    columns = {"op": op, "drop_in": lambda turn: paged(own, turn), "peer": of_peer}

    def exact(turn: SparseTurn) -> tuple[list[int], torch.Tensor]:
        some = sorted({0, row.batch - 1})
        outputs = []
        for b in some:
            for i in range(row.q_len):
                rows = [
                    caches.gather(kind, each, own[b, i].long()) for each, own in zip(pools, turn.indices, strict=True)
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

    columns = {
        "op": op,
        "drop_in": lambda turn: drop_in.flash_mla_sparse_fwd(*turn, scale)[0],
        "peer": lambda turn: peer.flash_mla_sparse_fwd(*turn, scale, use_legacy=True)[0],
    }

    def exact(turn: PrefillTurn) -> tuple[list[int], torch.Tensor]:
        some = sorted({0, row.tokens // 2, row.tokens - 1})
        outputs = []
        for token in some:
            keys = turn.kv[turn.indices[token, 0].long(), 0]
            outputs.append(attended(turn.q[token : token + 1], keys, scale))
        return some, torch.cat(outputs)

    return Case(columns, turns, exact, size, 2 * row.tokens * row.topk * row.heads * (row.width + 512))
