"""decode's reference on the CPU beside the plain batched formulation in torch; it may take 1.5 times as long.

pytest benchmarks/bench_decode_cpu.py --benchmark-enable --benchmark-group-by=param:dtype

Read it on an idle machine: in fp32 decode then takes half as long as the plain formulation, on one thread (23 and 59 ms
of an EPYC core) and on two (18 and 36 ms). Where other processes hold the cores, each of torch's parallel regions waits
for the slower thread; decode has more of them, so its median grows up to ten times and only the least time compares.
"""

from __future__ import annotations

import pytest
import torch

import mla_suite
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import assert_close, exact_decode

BATCH, HEADS, KV_LEN = 8, 16, 4096


def plain(q, kv_cache, seq_lens, block_table, *_, softmax_scale, head_dim_v, **options):
    """Gather, matmul, softmax, matmul in fp32, for equal lengths and one query token."""
    rows = kv_cache[block_table.long()].flatten(1, 2).float()
    scores = q.flatten(1, 2).float() @ rows.transpose(1, 2) * softmax_scale
    return torch.softmax(scores, dim=-1) @ rows[..., :head_dim_v], scores.logsumexp(dim=-1)


@pytest.mark.parametrize("formulation", ["decode", "plain"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decode_beside_plain_torch(benchmark, dtype, formulation):
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    sample = decode_sample([KV_LEN] * BATCH, heads=HEADS, kv_format=dtype, dtype=torch_dtype)
    args, kwargs = sample.make(torch.device("cpu"))
    run = {"decode": mla_suite.decode, "plain": plain}[formulation]
    out, lse = benchmark(run, *args, **kwargs)
    benchmark.extra_info |= {"shape": sample.name, "bytes": sample.bytes, "threads": torch.get_num_threads()}
    expected = exact_decode(*args, **kwargs)
    assert_close(out.view(expected.out.shape).to(torch_dtype), lse.view(expected.lse.shape), expected)
