"""Compiled code may select rows by data: sizes that no trace knows are checked when the call runs."""

import pytest
import torch

import mla_suite

KEPT = ([True, False, True], [False, True, False], [False, False, False])
CACHE = torch.randn(12, 16, 576, generator=torch.Generator().manual_seed(0))
Q = torch.randn(3, 2, 8, 576, generator=torch.Generator().manual_seed(1))
LENS = torch.tensor([20, 3, 0], dtype=torch.int32)
TABLE = torch.arange(6, dtype=torch.int32).view(3, 2)
SELECTED = torch.arange(-1, 23, dtype=torch.int32).view(3, 2, 4)


def planned(rows):
    plan = mla_suite.plan(LENS[rows], num_heads=16, num_sm_parts=4, max_seqlen_kv=0)
    return mla_suite.decode(
        Q[rows], CACHE, LENS[rows], TABLE[rows], plan=plan, softmax_scale=0.1, kv_format="fp32", max_seqlen_q=2
    )


def into_outputs(rows):
    q = Q[rows]
    out, lse = q.new_empty((*q.shape[:-1], 512)), q.new_empty(q.shape[:-1])
    arguments = q, CACHE, LENS[rows], TABLE[rows]
    torch.ops.mla_suite.decode.out(*arguments, softmax_scale=0.1, kv_format="fp32", out=out, lse=lse)
    return out, lse


def sparse(rows):
    return mla_suite.sparse_decode(Q[rows], [CACHE], [SELECTED[rows]], kv_formats=["fp32"], softmax_scale=0.1)


def append(rows):
    cache, slots = CACHE.clone(), torch.tensor([5, 40, 7])[rows]
    values = Q[:, 0, 0][rows]
    mla_suite.append_kv(values[:, :512].contiguous(), values[:, 512:].contiguous(), cache, slots, kv_format="fp32")
    return (cache,)


def merged(rows):
    out, lse = Q[rows][:, 0, :, :512], Q[rows][:, 0, :, 0].contiguous()
    return mla_suite.combine(out, lse, num_splits=1, out_dtype=torch.float32)


KNOWS_NO_SIZE = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="older torch (2.9 was tried) asks whether a written tensor of unknown size has one row",
)


@pytest.mark.parametrize("call", [planned, pytest.param(into_outputs, marks=KNOWS_NO_SIZE), sparse, append, merged])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_selected_by_data(call):
    torch._dynamo.reset()

    def selected(keep):
        return call(keep.nonzero().squeeze(1))

    compiled = torch.compile(selected, fullgraph=True, backend="aot_eager")
    for keep in map(torch.tensor, KEPT):
        for got, wanted in zip(compiled(keep), selected(keep), strict=True):
            assert torch.equal(got, wanted)
