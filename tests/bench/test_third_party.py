"""Calls of other packages: our drop-in functions stand for FlashMLA and AITER, a class of this file for FlashInfer."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mla_suite
from mla_suite.bench import inputs, sets, third_party
from mla_suite.bench.inputs import Call
from mla_suite.bench.sets import Case
from mla_suite.integrations import aiter, flash_mla

CPU = torch.device("cpu")


class Wrapper:
    """flashinfer.mla.BatchMLAPagedAttentionWrapper"""

    def __init__(self, workspace: torch.Tensor, backend: str = "auto") -> None:
        self.planned: tuple[Any, ...] = ()

    def plan(self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int,
             head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_type: Any,
             kv_type: Any) -> None:  # fmt: skip
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        self.planned = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size, causal, sm_scale)

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, return_lse: bool
    ) -> Any:
        cu, indptr, indices, lens, page, causal, scale = self.planned
        assert ckv.shape[1] == page
        out, lse = mla_suite.decode(
            torch.cat((q_nope, q_pe), -1), torch.cat((ckv, kpe), -1), lens, kv_indptr=indptr, kv_indices=indices,
            cu_seqlens_q=cu, max_seqlen_q=int(cu.diff().max()), softmax_scale=scale, causal=causal,
        )  # fmt: skip
        return out, lse / math.log(2)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer = ModuleType("flashinfer")
    flashinfer.__dict__["mla"] = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper)
    for name, module in (("flash_mla", flash_mla), ("flashinfer", flashinfer), ("aiter", aiter), ("aiter.mla", aiter)):
        monkeypatch.setitem(sys.modules, name, module)


FP8: dict[str, Any] = dict(kv_format="fp8", dtype=torch.float8_e4m3fn)
TAKEN = [
    ("flash_mla", sets.decode(3, 4, 100, 2)),
    ("flashinfer", sets.decode(3, 4, 100, 2)),
    ("flashinfer", sets.decode(3, 4, 90, page=16)),
    ("aiter", sets.decode(3, 4, 50, 2, page=1)),
    ("aiter", sets.decode(3, 4, 50, page=1, ragged_pages=True)),
    ("aiter", sets.decode(3, 4, 50, 4, page=1, **FP8)),
]


def package(name: str) -> third_party.ThirdParty:
    return next(entry for entry in third_party.THIRD_PARTIES if entry.name == name)


@pytest.mark.parametrize(("name", "case"), TAKEN, ids=[f"{name}-{case.shape}" for name, case in TAKEN])
def test_another_package_reads_the_same_tensors_and_gives_the_same_numbers(name: str, case: Case) -> None:
    call = inputs.make(case, CPU)
    runner = package(name).runner(case, call)
    assert runner.unsupported is None
    assert runner.answer is not None
    assert runner.run is not None
    assert runner.error(call, inputs.expected(case, call)) < 5e-3
    # A plan made once serves every copy of the inputs.
    other = inputs.copy(call)
    other.args[1].view(torch.uint8).zero_()
    assert runner.error(Call(other.args, other.kwargs), inputs.expected(case, other)) == 0


REFUSED = [
    ("flash_mla", sets.decode(2, 4, 50, page=1), "flash_mla takes pages of 64, not 1"),
    ("flash_mla", sets.decode(2, 4, 50, **FP8), "takes bf16 or fp16 queries and caches"),
    ("flashinfer", sets.decode(2, 4, 50, page=1, ragged_pages=True), "with a block table"),
    ("aiter", sets.decode(2, 4, 50), "pages of 1, not 64"),
    ("aiter", sets.combine(2, 4, 3), "compared on decode only"),
]


@pytest.mark.parametrize(("name", "case", "sentence"), REFUSED, ids=[f"{n}-{c.id}" for n, c, _ in REFUSED])
def test_what_a_peer_cannot_take_is_refused(name: str, case: Case, sentence: str) -> None:
    reason = package(name).runner(case, inputs.make(case, CPU)).unsupported
    assert reason is not None
    assert sentence in reason
