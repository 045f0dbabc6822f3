"""Collectives through peer memory on all GPUs here: equal to NCCL and one GPU, repeated, captured, with a rank away."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import mla_suite
from mla_suite.distributed import Parallel, cp_decode, peer_memory
from mla_suite.distributed.parallel import gather

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
GPU, WORLD = "cuda", torch.cuda.device_count()
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # of values of about 1; bf16 rounds P, a partial and the result


def collectives(rank: int, second_exchange_bytes: int) -> None:
    peer_memory.SECOND_EXCHANGE_BYTES = second_exchange_bytes
    parallel = Parallel.create(cp_size=WORLD, device_type="cuda")
    assert peer_memory.serves(parallel.all_group, 1)
    draw = random.Random(1)
    for _ in range(300):  # one behind the other, of many sizes
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        x = torch.randn(draw.choice([1, 7, 128, 500]), draw.choice([1, 64, 7168]), device=GPU).to(dtype)
        everyone = torch.empty(WORLD * x.shape[0], x.shape[1], device=GPU, dtype=dtype)
        dist.all_gather_into_tensor(everyone, x)
        everyone = everyone.view(WORLD, *x.shape)
        total = torch.zeros(x.shape, device=GPU)
        for summand in everyone:
            total += summand
        assert torch.equal(parallel.sum_over_all(x), total.to(dtype))
        assert torch.equal(gather(x, parallel.cp_group, WORLD), everyone)


def one_sequence(rank: int, q_len: int, kv_len: int) -> None:
    """A captured graph with an odd number of calls, replayed: both halves of the memory come first in turn."""
    page, heads = 64, 128
    parallel = Parallel.create(cp_size=WORLD, device_type="cuda")
    shard = parallel.shard(page)
    generator = torch.Generator(GPU).manual_seed(0)
    cache = torch.randn(kv_len // page + 1, page, 576, device=GPU, generator=generator).bfloat16()
    q = torch.randn(2, q_len, heads, 576, device=GPU, generator=generator).bfloat16()
    lens = torch.tensor([kv_len, 3], dtype=torch.int32, device=GPU)
    table = torch.arange(cache.shape[0], dtype=torch.int32, device=GPU).repeat(2, 1)
    own = cache[shard.rank :: WORLD].contiguous()
    own_table = torch.arange(own.shape[0], dtype=torch.int32, device=GPU).repeat(2, 1)
    own_heads = heads // WORLD
    sink = torch.randn(heads, device=GPU, generator=generator)
    exact, exact_lse = mla_suite.decode(q, cache, lens, table, attn_sink=sink, softmax_scale=0.05, max_seqlen_q=q_len)
    for exchange, mine in (
        ("all_to_all", slice(rank * own_heads, rank * own_heads + own_heads)),
        ("all_gather", slice(0, heads)),
    ):
        options = dict(shard=shard, group=parallel.cp_group, exchange=exchange, softmax_scale=0.05)

        @torch.compile(fullgraph=True)
        def spread(
            q: torch.Tensor, cache: torch.Tensor, sink: torch.Tensor, options: dict[str, Any] = options
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return cp_decode(q, cache, lens, own_table, attn_sink=sink, **options)

        for _ in range(3):
            spread(q, own, sink)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [spread(q, own, sink) for _ in range(3)]
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
        for out, lse in results:
            difference = (out.float() - exact[:, :, mine].float()).abs().max()
            assert difference <= BOUND[torch.bfloat16] * exact.float().abs().max(), difference
            torch.testing.assert_close(lse, exact_lse[:, :, mine], rtol=1e-4, atol=1e-4)


def one_stays_away(rank: int) -> None:
    parallel = Parallel.create(tp_size=WORLD, device_type="cuda", timeout_s=2.0)
    store = dist.distributed_c10d._get_default_store()
    if rank < WORLD - 1:
        with pytest.raises(RuntimeError, match="device-side assert"):
            parallel.sum_over_all(torch.ones(8, device=GPU)).cpu()
    store.set(f"rank {rank} is done", "")
    store.wait([f"rank {other} is done" for other in range(WORLD)])
    store.set(f"rank {rank} has heard", "")
    store.wait([f"rank {other} has heard" for other in range(WORLD)] if rank == 0 else ["rank 0 has heard"])
    os._exit(0)  # an assertion ends a process's use of its GPU, so the group cannot be left in order


@pytest.mark.parametrize("second_exchange_bytes", [-1, peer_memory.SECOND_EXCHANGE_BYTES, 2**62])
def test_sums_and_gathers_equal_nccl(second_exchange_bytes):
    """Sums in two exchanges, in what is chosen, and in one where they fit."""
    on_ranks(WORLD, collectives, second_exchange_bytes, on_gpus=True)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 5000), (4, 5000), (4, 66)])
def test_a_captured_graph_repeats_one_gpus_result(q_len, kv_len):
    on_ranks(WORLD, one_sequence, q_len, kv_len, on_gpus=True)


def test_a_rank_that_stays_away_is_an_error_of_the_others():
    on_ranks(WORLD, one_stays_away, on_gpus=True)
