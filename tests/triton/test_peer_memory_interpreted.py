"""The kernels that exchange through peer memory, in Triton's interpreter: ranks are processes that share memory."""

from __future__ import annotations

import dataclasses
import multiprocessing
import random

import pytest
import torch
from triton.runtime import interpreter

import mla_suite
from mla_suite.distributed import peer_memory, peer_triton
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
        fork.Process(target=_rank, args=(function, PeerMemory(peers, r, CAPACITY, 1 << 20, PROGRAMS, peer_triton)))
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
        shape = draw.choice([(1, 17), (3, 700), (2, 1001)])
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


def larger_than_a_slice(memory: PeerMemory) -> None:
    """Sums that no slice holds, between sums in one exchange, so that both halves come first in turn."""
    for call, values in enumerate([20_003, 40, CAPACITY // 4 * memory.ranks, 20_003, 40]):
        everyone = torch.randn(memory.ranks, values, generator=torch.Generator().manual_seed(call))
        expected = torch.zeros(values)
        for x in everyone:
            expected += x
        assert torch.equal(memory.sum(everyone[memory.rank].clone()), expected)


@pytest.mark.parametrize(
    ("world", "function"),
    [(2, collectives), (4, collectives), (4, merges), (8, merges), (2, larger_than_a_slice), (4, larger_than_a_slice)],
)
def test_every_rank_gets_what_one_process_computes(world, function):
    assert on_shared_ranks(world, function) == [0] * world


def test_sums_in_two_exchanges_have_the_bits_of_one(monkeypatch):
    """Shares of every size, one of them empty: the last rank has nothing of 17 values."""
    monkeypatch.setattr(peer_memory, "SECOND_EXCHANGE_BYTES", 0)
    assert on_shared_ranks(4, collectives) == [0] * 4


def a_rank_leaves(memory: PeerMemory) -> None:
    """Rank 0 does not join the second sum; the others end by an assertion."""
    impatient = dataclasses.replace(memory, polls=3000)
    for _ in range(2 if memory.rank else 1):
        impatient.sum(torch.ones(20_003))


def test_a_rank_that_leaves_ends_the_others_and_not_itself(monkeypatch):
    options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)  # assertions are off otherwise
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    first, *others = on_shared_ranks(4, a_rank_leaves)
    assert first == 0
    assert all(code != 0 for code in others)


def test_two_exchanges_are_taken_where_they_send_enough_less():
    token = 7168 * 2
    chosen = {
        ranks: [n for n in (1, 4, 16, 32, 128) if peer_memory.sums_in_two(n * token, ranks, 18 << 20)]
        for ranks in (2, 4, 8)
    }
    assert chosen == {2: [], 4: [32, 128], 8: [16, 32, 128]}
