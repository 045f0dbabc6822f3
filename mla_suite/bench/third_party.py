"""Other people's kernels, where they are installed, on the cases they can take: FlashMLA, FlashInfer, AITER.

They read the same caches and tables. What they plan, they plan before they are timed, as for our own kernels.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from mla_suite.bench.environment import version
from mla_suite.bench.inputs import Call
from mla_suite.bench.runners import Runner, Tensors
from mla_suite.bench.sets import Case


@dataclass(frozen=True)
class ThirdParty:
    """A package by the name of its module.

    `prepare` plans for a call and returns (run, answer), or says in a sentence why the package cannot take it.
    """

    name: str
    prepare: Callable[[Any, Call], tuple[Callable[[Call], object], Callable[[Call], Tensors]] | str]

    def runner(self, case: Case, call: Call) -> Runner:
        if case.op != "decode":
            return Runner(self.name, unsupported=f"{self.name} is compared on decode only")
        try:
            prepared = self.prepare(importlib.import_module(self.name), call)
        except Exception as error:  # whatever a foreign package raises says why it is no column
            return Runner(self.name, unsupported=f"{type(error).__name__}: {' '.join(str(error).split())}")
        if isinstance(prepared, str):
            return Runner(self.name, unsupported=prepared)
        run, answer = prepared
        fp8 = call.args[0].element_size() == 1  # what it does with softmax weights is its own affair
        found = version(self.name) or "version unknown"
        return Runner(self.name, found, "installed package", None, run, answer, run, fp8)


def installed() -> list[ThirdParty]:
    return [package for package in THIRD_PARTIES if find_spec(package.name) is not None]


def _flash_mla(module: Any, call: Call) -> Any:
    q, cache, seq_lens, table, *_ = call.args
    causal, scale = call.kwargs["causal"], call.kwargs["softmax_scale"]
    if q.dtype not in (torch.bfloat16, torch.float16) or cache.dtype != q.dtype or table is None:
        return "flash_mla takes bf16 or fp16 queries and caches with a block table"
    if cache.shape[1] != 64:
        return f"flash_mla takes pages of 64, not {cache.shape[1]}"
    rows = q.shape[1] * q.shape[2]
    schedule, splits = module.get_mla_metadata(seq_lens, rows, 1)

    def run(turn: Call) -> Tensors:
        queries, keys, lens, pages = turn.args[:4]
        out, lse = module.flash_mla_with_kvcache(
            queries, keys.unsqueeze(2), pages, lens, 512, schedule, splits, softmax_scale=scale, causal=causal
        )
        return out, lse

    def answer(turn: Call) -> Tensors:
        out, lse = run(turn)
        return out, lse.transpose(1, 2)

    return run, answer


def _flashinfer(module: Any, call: Call) -> Any:
    q, cache, seq_lens, table, *_ = call.args
    if q.dtype not in (torch.bfloat16, torch.float16) or cache.dtype != q.dtype or table is None:
        return "flashinfer is compared on bf16 and fp16 queries and caches with a block table"
    batch, q_len, heads, _ = q.shape
    page, counts = cache.shape[1], (seq_lens + cache.shape[1] - 1) // cache.shape[1]
    ends = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    pages = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    queries = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q_len
    workspace = torch.empty(128 << 20, dtype=torch.int8, device=q.device)
    wrapper = module.mla.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    causal, scale = call.kwargs["causal"], call.kwargs["softmax_scale"]
    wrapper.plan(queries, ends, pages, seq_lens, heads, 512, 64, page, causal, scale, q.dtype, cache.dtype)

    def run(turn: Call) -> Tensors:
        flat, keys = turn.args[0].flatten(0, 1), turn.args[1]
        out, lse = wrapper.run(flat[..., :512], flat[..., 512:], keys[..., :512], keys[..., 512:], return_lse=True)
        return out, lse

    def answer(turn: Call) -> Tensors:
        out, lse = run(turn)
        # its lse is in base 2
        return out.view(batch, q_len, heads, 512), lse.view(batch, q_len, heads) * math.log(2)

    return run, answer


def _aiter(module: Any, call: Call) -> Any:
    q, cache, seq_lens, table, indptr, indices, *_ = call.args
    if cache.shape[1] != 1:
        return f"aiter's decode is compared with pages of 1, not {cache.shape[1]}"
    batch, q_len, heads, _ = q.shape
    if indices is None:
        indptr = torch.cat((seq_lens.new_zeros(1), seq_lens.cumsum(0))).int()
        indices = torch.cat([row[:count] for row, count in zip(table, seq_lens.tolist(), strict=True)])
    queries = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q_len
    last = torch.ones_like(seq_lens)
    one = torch.ones(1, device=q.device)
    descale = call.args[8].view(1) if call.args[8] is not None else one
    scales = dict(q_scale=one, kv_scale=descale) if cache.element_size() == 1 else {}
    decode = importlib.import_module("aiter.mla").mla_decode_fwd

    def run(turn: Call) -> Tensors:
        flat = turn.args[0].flatten(0, 1)
        keys = turn.args[1] if cache.dtype != torch.uint8 else turn.args[1].view(flat.dtype)
        out = torch.empty(*flat.shape[:2], 512, dtype=torch.bfloat16, device=q.device)
        decode(flat, keys.unsqueeze(2), out, queries, indptr, indices, last, q_len,
               sm_scale=call.kwargs["softmax_scale"], **scales)  # fmt: skip
        return (out,)

    def answer(turn: Call) -> Tensors:
        (out,) = run(turn)
        return (out.view(batch, q_len, heads, 512),)

    return run, answer


THIRD_PARTIES = (
    ThirdParty("flash_mla", _flash_mla),
    ThirdParty("flashinfer", _flashinfer),
    ThirdParty("aiter", _aiter),
)
