"""sparse_decode's clusters of thread blocks on a real GPU: keys that two share, and splits that two or four add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_problems import moved
from sparse_calls import CUDA, check, native, skip_without_kernels
from sparse_problems import FP8_POOLS, POOLS, V41_POOLS, in_mode, problem

from mla_suite.archs.sm_90 import sparse_splits
from mla_suite.core import dispatch
from mla_suite.launch import current_arch

AS_STORED = ("bf16", "four pools")  # rows of bf16, of 576 and of 512 values


@pytest.fixture(autouse=True)
def gpu():
    skip_without_kernels()
    if current_arch(torch.empty(1, device=CUDA)).name != "sm_90":
        pytest.skip("only sm_90 has clusters of thread blocks")


@pytest.mark.parametrize("pools", ["v4", "both scales", "v4.1 of every kind"])
@pytest.mark.parametrize("splits", [1, 3])
def test_pairs_of_blocks_give_the_bits_of_blocks_alone(pools, splits):
    """400 tokens, many of few keys or none: each 64 of 128 or 256 heads by themselves are brought keys by one block."""
    args, kwargs = problem(
        [(name, pages, page, topk * 3) for name, pages, page, topk in (POOLS | V41_POOLS | FP8_POOLS)[pools]], 400, 256
    )
    draw = torch.Generator().manual_seed(splits)
    args[4] = [(torch.rand(400, generator=draw) * index.shape[1] * 1.5 - index.shape[1] / 2).clamp(0).int()
               for index in args[2]]  # fmt: skip
    there, kwargs = moved(args, CUDA), kwargs | {"num_splits": splits}
    for heads in (128, 256):
        there[0] = args[0][:, :heads].contiguous().to(CUDA)
        assert native(there, kwargs).endswith("clustermode-share_kv")
        out, lse = torch.ops.mla_suite.sparse_decode(*there, **kwargs)
        for first in range(0, heads, 64):
            there[0] = args[0][:, first : first + 64].contiguous().to(CUDA)
            assert native(there, kwargs).endswith("clustermode-none")
            alone, alone_lse = torch.ops.mla_suite.sparse_decode(*there, **kwargs)
            assert torch.equal(out[:, first : first + 64], alone)
            assert torch.equal(lse[:, first : first + 64], alone_lse)


@pytest.mark.parametrize("splits", [2, 4, 6])
@pytest.mark.parametrize("mode", ["one split", "lengths and sink"])
@pytest.mark.parametrize(
    ("pools", "heads", "cluster_mode"),
    [
        (pools, heads, mode)
        for pools in ("v4", "both scales", "v4.1 of every kind", "v32 without rope", *AS_STORED)
        for heads, mode in (
            *((40, "reduce_o"), (100, "reduce_o"), (40, "reduce_four"), (100, "reduce_four")),
            *([] if pools in AS_STORED else [(100, "share_and_reduce")]),
        )
    ],
)
def test_clusters_add_splits(monkeypatch, heads, cluster_mode, mode, splits, pools):
    """Right, and the same bits every time, of tokens with many keys, few or none, whether it would pay or not."""
    monkeypatch.setattr(sparse_splits, "fastest", lambda config, *sizes: replace(config, cluster_mode=cluster_mode))
    dispatch.clear_caches()
    longer = [(name, pages, page, topk * 3) for name, pages, page, topk in (POOLS | V41_POOLS)[pools]]
    if cluster_mode == "reduce_four":
        splits *= 2
    args, kwargs = problem(longer, 9 if -(-heads // 64) * splits * 9 <= 132 else 4, heads)  # one split a block
    in_mode(mode, args, kwargs, seed=splits)
    kwargs |= {"num_splits": splits}
    there = moved(args, CUDA)
    assert native(there, kwargs).endswith(f"clustermode-{cluster_mode}")
    check(args, kwargs)
    first = torch.ops.mla_suite.sparse_decode(*there, **kwargs)
    for _ in range(20):
        again = torch.ops.mla_suite.sparse_decode(*there, **kwargs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    dispatch.clear_caches()
