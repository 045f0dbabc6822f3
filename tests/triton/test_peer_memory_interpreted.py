"""The kernels that exchange through peer memory, in Triton's interpreter: ranks are processes that share memory."""

from __future__ import annotations

import multiprocessing
import random

import pytest
import torch

import mla_suite
from mla_suite.distributed import peer_triton
from mla_suite.distributed.peer_memory import PeerMemory

CAPACITY = 1 << 16
CALLS = 5  # odd, and enough to use each half again
PROGRAMS = 2


def buffers(world: int) -> list[torch.Tensor]:
    size = peer_triton.HEADER_BYTES + 2 * world * CAPACITY
    return [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(world)]


def on_shared_ranks(world, function):
    """Calls function(memory) in a forked process per rank, which all see the same addresses; -> exit codes."""
    shared = buffers(world)
    peers = torch.tensor([buffer.data_ptr() for buffer in shared])
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_rank, args=(function, PeerMemory(peers, r, CAPACITY, 1 << 20, PROGRAMS)))
        for r in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    return [process.exitcode for process in ranks]


def _rank(function, memory):
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    function(memory)


def collectives(memory: PeerMemory) -> None:
    draw = random.Random(5)  # the same on every rank
    for call in range(CALLS):
        torch.manual_seed(call)
        dtype = draw.choice([torch.float32, torch.bfloat16])
        shape = draw.choice([(1, 40), (3, 700), (2, 1000)])
        everyone = torch.randn(memory.ranks, *shape).to(dtype)
        own = everyone[memory.rank].clone()
        assert torch.equal(memory.gather(own), everyone)
        expected = torch.zeros(shape)
        for x in everyone:  # in the order of the ranks
            expected += x.float()
        # The interpreter truncates to bf16 where a GPU rounds.
        bound = 0.0 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(memory.sum(own).float(), expected, rtol=bound, atol=0.0)


def merges(memory: PeerMemory) -> None:
    world = memory.ranks
    for call, (rows, heads, own, sink) in enumerate([(1, 4, 4, None), (3, 8, 8 // world, 1), (0, 4, 4, None)] * 2):
        torch.manual_seed(call)
        out, lse = torch.randn(world, rows, heads, 64), torch.randn(world, rows, heads) * 3
        lse[0, :, 1] = -torch.inf
        lse[:, :, 2] = -torch.inf
        out[0, :, 1] = torch.nan  # nothing was seen there
        attn_sink = torch.randn(heads) if sink else None
        exact, exact_lse = mla_suite.combine(
            out.flatten(1, 2), lse.flatten(1), attn_sink=attn_sink, num_splits=world, out_dtype=torch.float32
        )
        first = memory.rank * own if own != heads else 0
        merged, merged_lse = memory.merge(out[memory.rank], lse[memory.rank], attn_sink, own)
        wanted = exact.view(rows, heads, 64)[:, first : first + own]
        torch.testing.assert_close(merged, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(merged_lse, exact_lse.view(rows, heads)[:, first : first + own])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("function", [collectives, merges])
def test_every_rank_gets_what_one_process_computes(world, function):
    assert on_shared_ranks(world, function) == [0] * world
