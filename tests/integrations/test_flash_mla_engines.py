"""FlashMLA's functions as vLLM's and SGLang's code of DeepSeek V4 calls them, against its documented formulas."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flash_mla_calls import check
from test_flash_mla_sparse import selection, sparse_expected, two_pools

from mla_suite.core import eager
from mla_suite.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

SCALE = 512**-0.5


@dataclass
class TheirSchedMeta:
    """Another library's holder, which compares by value and so has no hash."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Any = None
    num_splits: Any = None


def a_call(holder):
    """Arguments of a decode over two pools, and what it must give."""
    arguments, pools = two_pools(holder)
    return arguments, sparse_expected(arguments["q"], pools, arguments["softmax_scale"], arguments["attn_sink"])


@pytest.mark.parametrize("heads_apart", [8, 12], ids=["whole", "a slice of heads"])
@pytest.mark.parametrize("own", [True, False], ids=["our holder", "theirs"])
def test_out_is_written_in_every_call(own, heads_apart, monkeypatch):
    holder = get_mla_metadata()[0] if own else TheirSchedMeta()
    arguments, expected = a_call(holder)
    prepared = []
    lookup = eager.lookup
    monkeypatch.setattr(eager, "lookup", lambda *given: prepared.append(lookup(*given)) or prepared[-1])
    for _ in range(3):
        out = torch.full((3, 1, heads_apart, 512), 7.0, dtype=torch.bfloat16)
        written, lse = flash_mla_with_kvcache(**arguments, out=out[:, :, :8])
        assert written.data_ptr() == out.data_ptr()
        check(written.contiguous(), lse, expected)
        assert (out[:, :, 8:] == 7).all()
    assert len(prepared) == 2, "a holder's first call has nothing to recognise"
    assert all(prepared)
    check(*flash_mla_with_kvcache(**arguments), expected)
    if not own:
        assert holder == TheirSchedMeta(), "their own kernels may still take it"


def test_queries_that_are_a_slice_of_heads():
    arguments, expected = a_call(TheirSchedMeta())
    q = torch.full((3, 1, 64, 512), torch.nan, dtype=torch.bfloat16)
    q[:, :, :8] = arguments["q"]
    check(*flash_mla_with_kvcache(**arguments | dict(q=q[:, :, :8])), expected)


def test_out_that_cannot_be_written_is_refused():
    arguments, _ = a_call(get_mla_metadata()[0])
    q = arguments["q"]
    for out, message in (
        (torch.empty(3, 1, 9, 512, dtype=torch.bfloat16), r"out is torch.bfloat16 \(3, 1, 9, 512\)"),
        (torch.empty(3, 1, 8, 512), r"out is torch.float32"),
        (q, r"shares memory with q"),
    ):
        for _ in range(2):
            with pytest.raises((ValueError, TypeError), match=message):
                flash_mla_with_kvcache(**arguments, out=out)
        flash_mla_with_kvcache(**arguments, out=torch.empty_like(q))
    cache = torch.randn(2, 64, 2, 576).bfloat16()
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    dense = torch.randn(1, 1, 4, 576).bfloat16(), cache, table, lengths, 512, get_mla_metadata()[0]
    with pytest.raises(ValueError, match="out is given with 2 KV heads"):
        flash_mla_with_kvcache(*dense, out=torch.empty(1, 1, 4, 512, dtype=torch.bfloat16))


@pytest.mark.parametrize("statistics", [None, False], ids=["statistics", "none"])
def test_sparse_prefill_writes_out(statistics):
    q, kv = torch.randn(5, 16, 512).bfloat16(), torch.randn(90, 1, 512).bfloat16()
    indices = selection(1, 5, 40, 90).view(5, 1, 40)
    expected = flash_mla_sparse_fwd(q, kv, indices, SCALE)
    out = torch.full((5, 24, 512), 7.0, dtype=torch.bfloat16)
    written, *more = flash_mla_sparse_fwd(q, kv, indices, SCALE, return_log2_lse=statistics, out=out[:, :16])
    assert written.data_ptr() == out.data_ptr()
    torch.testing.assert_close(written, expected[0], rtol=2**-7, atol=2e-5)
    assert (out[:, 16:] == 7).all()
    if statistics is None:
        torch.testing.assert_close(more, list(expected[1:]))
    with pytest.raises(ValueError, match=r"out is torch.bfloat16 \(5, 24, 512\)"):
        flash_mla_sparse_fwd(q, kv, indices, SCALE, out=out)
    with pytest.raises(TypeError, match=r"use_legacy is a tensor \(5, 16, 512\)"):  # in vLLM's copy out has its place
        flash_mla_sparse_fwd(q, kv, indices, SCALE, 512, None, None, out[:, :16])
    with pytest.raises(TypeError, match="return_log2_lse is 'no'"):
        flash_mla_sparse_fwd(q, kv, indices, SCALE, return_log2_lse="no")
