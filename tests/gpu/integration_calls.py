"""FlashMLA and AITER calls as the two projects document them, with values that change between replays.

A `Call` makes its tensors for a turn (same shapes, other lengths, tables, keys and queries), and runs on them. What it
needs beside them, such as a holder of metadata or the buffers of a plan, it makes on the device and keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_suite import kv_formats
from mla_suite.integrations import aiter, flash_mla
from mla_suite.kv_formats import cache as caches

Tensors = dict[str, torch.Tensor]
TURNS = 3


@dataclass
class Call:
    """One documented use. `make(turn)` gives CPU tensors; `run(tensors, kept)` the results, in our kv_format or theirs.

    kept  what survives between runs on one device: `run` fills it at its first call
    """

    name: str
    make: Callable[[int], Tensors]
    run: Callable[[Tensors, dict[str, Any]], tuple[torch.Tensor, ...]]
    kept: dict[str, Any] = field(default_factory=dict)


def _lengths(turn: int, longest: int, batch: int) -> torch.Tensor:
    """Lengths of a turn: with a sequence at its longest, an empty one, and one of one token, in other places."""
    given = torch.tensor([longest, 0, 1, longest // 2, longest - 1, 65])[:batch]
    return given.roll(turn).int()


def _paged(turn: int, longest: int, batch: int, page: int, dtype: torch.dtype) -> Tensors:
    """NaN past each sequence, absurd spare table entries, pages shuffled anew every turn."""
    torch.manual_seed(turn)
    lengths, width = _lengths(turn, longest, batch), -(-longest // page)
    cache = torch.full((batch * width + 2, page, 1, 576), torch.nan).to(dtype)
    order = torch.randperm(len(cache)).int()
    table = torch.full((batch, width), 2**31 - 1, dtype=torch.int32)
    for b, length in enumerate(lengths.tolist()):
        count, rows = -(-length // page), torch.arange(length)
        table[b, :count] = order[b * width : b * width + count]
        cache[table[b, rows // page].long(), rows % page, 0] = torch.randn(length, 576).to(dtype)
    return dict(k_cache=cache, block_table=table, cache_seqlens=lengths)


def dense(
    name: str, *, longest: int, batch: int = 4, heads: int = 16, q_len: int = 1, page: int = 64, form: str = "holder"
) -> Call:
    def make(turn: int) -> Tensors:
        made = _paged(turn, longest, batch, page, torch.bfloat16)
        return dict(made, q=torch.randn(batch, q_len, heads, 576).bfloat16())

    def run(given: Tensors, kept: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        if form == "holder":
            metadata = kept.setdefault("metadata", flash_mla.get_mla_metadata())
        else:  # the older arguments, at every step
            metadata = flash_mla.get_mla_metadata(given["cache_seqlens"], q_len * heads, 1, heads, False, None)
        if form == "copied":
            metadata = tuple(tensor.clone() for tensor in metadata)
        return flash_mla.flash_mla_with_kvcache(
            given["q"], given["k_cache"], given["block_table"], given["cache_seqlens"], 512, *metadata, causal=True
        )

    return Call(f"flash_mla {name}", make, run)


def sparse(
    name: str, kv_format: str, *, heads: int = 64, q_len: int = 1, pools: tuple[tuple[int, int, int], ...]
) -> Call:
    """pools of (pages, page, topk); the second is the extra one."""
    kind, batch = kv_formats.get_kv_format(kv_format), 3

    def make(turn: int) -> Tensors:
        torch.manual_seed(turn)
        made = dict(q=torch.randn(batch, q_len, heads, kind.head_dim).bfloat16(), sink=torch.randn(heads))
        for index, (pages, page, topk) in enumerate(pools):
            picks = torch.randint(pages * page, (batch, q_len, topk), dtype=torch.int32)
            picks[torch.rand(picks.shape) < 0.2] = -1
            picks[(turn + 1) % batch] = -1
            made[f"cache{index}"] = caches.pack(kind, torch.randn(pages, page, kind.head_dim)).unsqueeze(2)
            made[f"indices{index}"] = picks
            made[f"lengths{index}"] = torch.randint(topk + 1, (batch,), dtype=torch.int32)
        return made

    def run(given: Tensors, kept: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        metadata = kept.setdefault("metadata", flash_mla.get_mla_metadata())
        extra = {}
        if len(pools) > 1:
            extra = dict(extra_k_cache=given["cache1"], extra_indices_in_kvcache=given["indices1"])
            extra["extra_topk_length"] = given["lengths1"]
        return flash_mla.flash_mla_with_kvcache(
            given["q"], given["cache0"], None, None, 512, *metadata, is_fp8_kvcache=True, indices=given["indices0"],
            attn_sink=given["sink"], topk_length=given["lengths0"], **extra,
        )  # fmt: skip

    return Call(f"flash_mla {name}", make, run)


def sparse_prefill(tokens: int = 70, keys: int = 300, topk: int = 64, heads: int = 16) -> Call:
    def make(turn: int) -> Tensors:
        torch.manual_seed(turn)
        indices = torch.randint(-20, keys + 20, (tokens, 1, topk), dtype=torch.int32)
        indices[turn] = -1
        return dict(
            q=torch.randn(tokens, heads, 576).bfloat16(),
            kv=torch.randn(keys, 1, 576).bfloat16(),
            indices=indices,
            sink=torch.randn(heads),
            lengths=torch.randint(topk + 1, (tokens,), dtype=torch.int32),
        )

    def run(given: Tensors, kept: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        return flash_mla.flash_mla_sparse_fwd(
            given["q"], given["kv"], given["indices"], 0.05, 512, given["sink"], given["lengths"]
        )

    return Call("flash_mla_sparse_fwd", make, run)


def _buffers(
    kept: dict[str, Any], batch: int, q_len: int, heads: int, is_sparse: bool, place: torch.device
) -> list[torch.Tensor]:
    """The six buffers of a plan, made once, in the order in which get_mla_metadata_v1 takes them."""
    if not kept:
        sizes = aiter.get_mla_metadata_info_v1(batch, q_len, heads, torch.bfloat16, torch.bfloat16, is_sparse)
        names = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map")
        for key, (size, dtype) in zip((*names, "reduce_partial_map"), sizes, strict=True):
            kept[key] = torch.zeros(size, dtype=dtype, device=place)
    order = ("work_meta_data", "work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map")
    return [kept[key] for key in (*order, "reduce_partial_map")]


def decode(
    name: str, *, longest: int, batch: int = 4, heads: int = 16, q_len: int = 1, page: int = 1, mode: str = "plain"
) -> Call:
    """mode: plain, splits, or persistent: the metadata is made anew in every step, into the same buffers."""

    def make(turn: int) -> Tensors:
        made = _paged(turn, longest, batch, page, torch.bfloat16)
        lengths, width = made["cache_seqlens"], made["block_table"].shape[1]
        counts = -(-lengths // page)
        used = [made["block_table"][b, :count] for b, count in enumerate(counts.tolist())]
        spare = torch.zeros(batch * width - int(counts.sum()), dtype=torch.int32)
        return dict(
            q=torch.randn(batch * q_len, heads, 576).bfloat16(),
            kv_buffer=made["k_cache"],
            qo_indptr=torch.arange(batch + 1, dtype=torch.int32) * q_len,
            kv_indptr=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
            kv_indices=torch.cat((*used, spare)),
            kv_last_page_lens=torch.where(counts > 0, lengths - (counts - 1) * page, 0).int(),
        )

    def run(given: Tensors, kept: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        lens = [given[name] for name in ("qo_indptr", "kv_indptr", "kv_last_page_lens")]
        options: dict[str, Any] = dict(num_kv_splits=3) if mode == "splits" else {}
        if mode == "persistent":
            buffers = _buffers(kept, batch, q_len, heads, False, given["q"].device)
            aiter.get_mla_metadata_v1(*lens, heads, 1, True, *buffers, page_size=page, max_seqlen_qo=q_len)
            options = dict(kept)
        o = torch.empty(batch * q_len, heads, 512, dtype=torch.bfloat16, device=given["q"].device)
        arguments = (given["q"], given["kv_buffer"], o, lens[0], lens[1], given["kv_indices"], lens[2], q_len)
        _, lse = aiter.mla_decode_fwd(*arguments, page_size=page, return_lse=True, **options)
        assert lse is not None
        return o, lse

    return Call(f"aiter {name}", make, run)


def selected(topk: int = 256, batch: int = 3, q_len: int = 2, heads: int = 16) -> Call:
    """Metadata made with topk in every step; kv_indices has a row of topk for each query token."""

    def make(turn: int) -> Tensors:
        made = _paged(turn, 600, batch, 1, torch.bfloat16)
        lengths = made["cache_seqlens"]
        chosen = torch.full((batch * q_len, topk), 2**31 - 1, dtype=torch.int32)
        for token in range(batch * q_len):
            length = int(lengths[token // q_len])
            picks = torch.randperm(length)[:topk]
            chosen[token, : len(picks)] = made["block_table"][token // q_len, picks]
        return dict(
            q=torch.randn(batch * q_len, heads, 576).bfloat16(),
            kv_buffer=made["k_cache"],
            qo_indptr=torch.arange(batch + 1, dtype=torch.int32) * q_len,
            kv_indptr=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
            kv_indices=chosen.view(-1),
            kv_last_page_lens=torch.ones(batch, dtype=torch.int32),
        )

    def run(given: Tensors, kept: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        place, lens = given["q"].device, [given[name] for name in ("qo_indptr", "kv_indptr", "kv_last_page_lens")]
        buffers = _buffers(kept, batch, q_len, heads, True, place)
        aiter.get_mla_metadata_v1(*lens, heads, 1, True, *buffers, max_seqlen_qo=1, topk=topk)
        o = torch.empty(batch * q_len, heads, 512, dtype=torch.bfloat16, device=place)
        arguments = (given["q"], given["kv_buffer"], o, lens[0], lens[1], given["kv_indices"], lens[2], 1)
        _, lse = aiter.mla_decode_fwd(*arguments, return_lse=True, **kept)
        assert lse is not None
        return o, lse

    return Call("aiter mla_decode_fwd, metadata with topk", make, run)


def uniform_reduce(tokens: int = 5, splits: int = 7, heads: int = 16) -> Call:
    def make(turn: int) -> Tensors:
        torch.manual_seed(turn)
        outs, lses = torch.randn(tokens, splits, heads, 512), torch.randn(tokens, splits, heads, 1) * 3
        outs[turn, -1], lses[turn, -1] = torch.nan, -torch.inf
        return dict(outs=outs, lses=lses, kv_indptr=torch.arange(tokens + 1, dtype=torch.int32) * 100)

    def run(given: Tensors, kept: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        reduced = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device=given["outs"].device)
        aiter.mla_decode_reduce(given["outs"], given["lses"], reduced, given["kv_indptr"], tokens)
        return (reduced,)

    return Call("aiter mla_decode_reduce", make, run)


def general_reduce() -> Call:
    def make(turn: int) -> Tensors:
        torch.manual_seed(turn)
        maps = [[0, 3, 3, 4, 9], [0, 0, 4, 6, 9], [0, 2, 5, 9, 9]]
        return dict(
            outs=torch.randn(40, 8, 512),
            lses=torch.randn(40, 8) * 3,
            reduce_indptr=torch.tensor(maps[turn], dtype=torch.int32),
            reduce_partial_map=torch.randperm(38)[:11].int(),
            reduce_final_map=torch.tensor([[s, s + 2] for s in torch.randperm(4).mul(2).tolist()], dtype=torch.int32),
        )

    def run(given: Tensors, kept: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        place = given["outs"].device
        final, lse = torch.full((8, 8, 512), 5.0, device=place), torch.full((8, 8), 5.0, device=place)
        maps = (given["reduce_indptr"], given["reduce_final_map"], given["reduce_partial_map"])
        aiter.mla_reduce_v1(given["outs"], given["lses"], *maps, 2, 0, final, lse)
        return final, lse

    return Call("aiter mla_reduce_v1", make, run)


CALLS = (
    dense("dense", longest=700),
    dense("dense, older arguments", longest=700, form="arguments"),
    dense("dense, older arguments copied", longest=700, form="copied"),
    dense("dense, 4 query tokens, 32 heads", longest=1300, heads=32, q_len=4),
    dense("dense, 128 heads", longest=400, batch=6, heads=128),
    dense("dense, pages of 16", longest=300, page=16),
    sparse("sparse v32 with sink and topk_length", "v32", q_len=2, pools=((40, 64, 256),)),
    sparse("sparse dsv4 with sink, extra pool and topk_length", "dsv4", pools=((4, 256, 128), (60, 2, 64))),
    sparse_prefill(),
    decode("mla_decode_fwd", longest=700),
    decode("mla_decode_fwd, splits", longest=700, mode="splits"),
    decode("mla_decode_fwd, metadata", longest=700, mode="persistent"),
    decode("mla_decode_fwd, metadata, 4 query tokens, pages of 64", longest=1300, q_len=4, page=64, mode="persistent"),
    selected(),
    uniform_reduce(),
    general_reduce(),
)
