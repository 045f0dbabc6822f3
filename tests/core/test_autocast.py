"""Under autocast the reference still computes in fp32."""

import pytest
import torch

import mla_suite
from mla_suite.integrations.flash_mla import flash_mla_sparse_fwd


def decode(q, rows, picks):
    seq_lens = torch.tensor([20, 1], dtype=torch.int32)
    block_table = torch.tensor([[5, 3], [2, 0]], dtype=torch.int32)
    return mla_suite.decode(q, rows, seq_lens, block_table, softmax_scale=0.1)


def sparse_decode(q, rows, picks):
    return mla_suite.sparse_decode(q, [rows], [picks], kv_formats=["bf16"], softmax_scale=0.1)


def sparse_prefill(q, rows, picks):
    return flash_mla_sparse_fwd(q[:, 0], rows.view(-1, 1, 576), picks, 0.1)


@pytest.mark.parametrize("call", [decode, sparse_decode, sparse_prefill])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_do_not_depend_on_autocast(call, dtype):
    q, rows = torch.randn(2, 1, 16, 576), torch.randn(8, 16, 576).bfloat16()
    picks = torch.randint(128, (2, 1, 40), dtype=torch.int32)
    expected = call(q, rows, picks)
    for _ in range(2):  # the second is of the fast path's metadata
        with torch.autocast("cpu", dtype=dtype):
            results = call(q, rows, picks)
        assert all(map(torch.equal, results, expected))
