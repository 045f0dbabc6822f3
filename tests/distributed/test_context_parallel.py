"""Context-parallel attention on gloo ranks gives what one process gives, for any share, length and exchange."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from rank_problems import local_slots
from ranks import on_ranks

import mla_suite
from mla_suite.core import dispatch
from mla_suite.distributed import KeyShard, Parallel, cp_decode, cp_sparse_decode

CASES = {2: 60, 4: 30, 8: 20}  # by the number of ranks
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # of values of about 1; bf16 rounds a partial and the result


def one_case(draw: random.Random, parallel: Parallel) -> None:
    page_size = draw.choice([1, 4, 16])
    shard = parallel.shard(draw.choice([1, page_size, 8]))
    q_len, heads = draw.choice([1, 1, 2, 4]), parallel.cp_size * draw.choice([1, 2, 3])
    lens = [draw.choice([0, 1, q_len, draw.randrange(1, 90)]) for _ in range(draw.randrange(1, 4))]
    lens = [0 if length < q_len else length for length in lens]
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
    kv_format = "fp32" if dtype == torch.float32 else "bf16"
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch = len(lens)
    pages = -(-90 // page_size) + 1
    q = normal(batch, q_len, heads, 576).to(dtype)
    whole = normal(batch, 90, 576).to(dtype)
    sink = normal(heads) if draw.random() < 0.5 else None
    cache = torch.full((batch * pages, page_size, 576), float("nan"), dtype=dtype)
    order = torch.randperm(batch * pages, generator=generator).to(torch.int32).view(batch, pages)
    for b, length in enumerate(lens):
        slots = local_slots(range(length), order[b].tolist(), page_size, shard)
        cache.view(-1, 576)[slots[slots >= 0]] = whole[b, :length][slots >= 0]
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    options = {"softmax_scale": 0.05, "kv_format": kv_format}
    everything = torch.arange(batch, dtype=torch.int32)[:, None]
    exact, exact_lse = mla_suite.decode(q, whole, seq_lens, everything, attn_sink=sink, max_seqlen_q=q_len, **options)
    exchange = draw.choice(["all_to_all", "all_gather"])
    spread = {"shard": shard, "group": parallel.cp_group, "exchange": exchange, "attn_sink": sink}
    longest = draw.choice([0, max(lens)])  # which a rank's own lengths are checked against, by a bound of its own
    out, lse = cp_decode(q, cache, seq_lens, order, max_seqlen_kv=longest, **spread, **options)
    own = heads // parallel.cp_size if exchange == "all_to_all" else heads
    first = parallel.cp_rank * own if exchange == "all_to_all" else 0
    where = f"lens {lens} q_len {q_len} heads {heads} {shard} page {page_size} {dtype} {exchange}"
    compare(out, exact[:, :, first : first + own], BOUND[dtype], where)
    compare(lse, exact_lse[:, :, first : first + own], 1e-5, where)

    topk = 12

    def chosen(length: int) -> torch.Tensor:
        return torch.randperm(length, generator=generator)[:topk] if length >= topk else torch.full((topk,), -1)

    positions = torch.stack([torch.stack([chosen(length) for _ in range(q_len)]) for length in lens]).to(torch.int32)
    base = torch.arange(batch, dtype=torch.int32)[:, None, None] * 90
    slots = torch.where(positions >= 0, positions + base, -1)
    exact, exact_lse = mla_suite.sparse_decode(
        q, [whole], [slots], attn_sink=sink, kv_formats=[kv_format], softmax_scale=0.05
    )
    out, lse = cp_sparse_decode(q, cache, positions, order, **spread, **options)
    compare(out, exact[:, :, first : first + own], BOUND[dtype], where)
    compare(lse, exact_lse[:, :, first : first + own], 1e-5, where)


def compare(found: torch.Tensor, exact: torch.Tensor, bound: float, where: str) -> None:
    assert torch.equal(found.isinf(), exact.isinf()), where
    difference = torch.where(exact.isinf(), 0.0, (found.float() - exact.float()).abs()).max()
    assert difference <= bound * max(1.0, exact.nan_to_num(0, 0, 0).abs().max()), f"{where}: {difference}"


def random_cases(rank: int, seed: int, world: int) -> None:
    warnings.simplefilter("error", FutureWarning)  # as of a collective's old name, once a process and to every user
    draw = random.Random(seed)  # the same on every rank
    parallel = Parallel.create(cp_size=world, device_type="cpu")
    for _ in range(CASES[world]):
        one_case(draw, parallel)
    if world == 2:  # here, since starting ranks takes longer
        no_sequences(parallel)
        errors(parallel)


@pytest.mark.parametrize("world", CASES)
def test_random_cases_equal_one_process(world):
    on_ranks(world, random_cases, 20 + world, world)


def of_rank(parallel: Parallel) -> dict[str, Any]:
    """What every call of a rank is given beside its tensors."""
    return {"shard": parallel.shard(), "group": parallel.cp_group, "softmax_scale": 1.0, "kv_format": "fp32"}


def no_sequences(parallel: Parallel) -> None:
    """A step of no sequences, as a rank without requests takes it, has empty results."""
    q, cache, table = torch.zeros(0, 1, 4, 576), torch.zeros(2, 4, 576), torch.zeros(0, 1, dtype=torch.int32)
    common = of_rank(parallel)
    for exchange, heads in (("all_to_all", 2), ("all_gather", 4)):
        out, lse = cp_decode(q, cache, table[:, 0], table, exchange=exchange, **common)
        assert (out.shape, lse.shape) == ((0, 1, heads, 512), (0, 1, heads))
        odd = {"exchange": exchange, "head_dim_v": 1, "kv_format": "bf16"}  # lse begins at an odd offset of 16 bits
        out, _ = cp_decode(q.bfloat16(), cache.bfloat16(), table[:, 0], table, **common | odd)
        assert out.shape == (0, 1, heads, 1)


def errors(parallel: Parallel) -> None:
    """What is refused on two ranks."""
    q, cache = torch.zeros(1, 1, 3, 576), torch.zeros(2, 4, 576)
    lens, table = torch.tensor([3], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    common = of_rank(parallel)
    with pytest.raises(ValueError, match=r"3 heads, which do not split over 2 ranks; use exchange='all_gather'"):
        cp_decode(q, cache, lens, table, **common)
    with pytest.raises(ValueError, match="rope_cos_sin is not taken: local positions are not the sequence's"):
        cp_decode(q, cache, lens, table, exchange="all_gather", rope_cos_sin=torch.zeros(4, 64), **common)


def wrong_shares(rank: int) -> None:
    """Shares of the keys that are not those of the ranks, and exchanges that differ, are no results of other keys."""
    parallel = Parallel.create(cp_size=2, device_type="cpu")
    q, cache = torch.zeros(1, 1, 4, 576), torch.zeros(2, 4, 576)
    lens, table = torch.tensor([3], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)

    def call(**changes):
        return cp_decode(q, cache, lens, table, **of_rank(parallel) | changes)

    place = f"this process is rank {rank} of the 2 of its group"
    with pytest.raises(ValueError, match=f"cp_decode: shard is that of rank {rank} of 4; {place}"):
        call(shard=KeyShard(4, rank))
    with pytest.raises(ValueError, match=f"cp_decode: shard is that of rank {1 - rank} of 2; {place}"):
        call(shard=KeyShard(2, 1 - rank))
    bounds = []
    with pytest.MonkeyPatch.context() as seen:
        decode = mla_suite.decode
        seen.setattr(mla_suite, "decode", lambda *a, **k: (bounds.append(k["max_seqlen_kv"]), decode(*a, **k))[1])
        for longest in (101, 3):
            call(max_seqlen_kv=longest)
    assert bounds == [52, 3]  # half of the keys and one that its half may be longer; never more than there are
    with pytest.raises(ValueError, match="the ranks disagree: interleave is 1 on rank 0, 2 on rank 1"):
        call(shard=parallel.shard(1 + rank))
    with pytest.raises(ValueError, match="the ranks disagree: exchange is all_to_all on rank 0, all_gather on rank 1"):
        call(exchange=("all_to_all", "all_gather")[rank])
    with pytest.raises(ValueError, match="the ranks disagree: softmax_scale is 1.0 on rank 0, 2.0 on rank 1; give all"):
        call(softmax_scale=1.0 + rank)
    with pytest.raises(ValueError, match="the ranks disagree: causal is True on rank 0, False on rank 1"):
        call(causal=not rank)
    with pytest.raises(ValueError, match="the ranks disagree: attn_sink is None on rank 0, given on rank 1"):
        call(attn_sink=torch.zeros(4) if rank else None)
    common = of_rank(parallel) | {"softmax_scale": 1.0 + rank}
    with pytest.raises(ValueError, match="the ranks disagree: softmax_scale is 1.0 on rank 0, 2.0 on rank 1"):
        cp_sparse_decode(q, cache, torch.zeros(1, 1, 2).int(), table, **common)


def test_shares_of_other_ranks_are_refused():
    on_ranks(2, wrong_shares, timeout_s=10.0)


OPTIONS = {"softmax_scale": 0.1, "kv_format": "fp32"}
ALONE = {"shard": KeyShard(), "group": ""}


def given() -> tuple[torch.Tensor, ...]:
    """Five keys of one sequence."""
    lens, table = torch.tensor([5], dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32)
    return torch.randn(1, 1, 2, 576), torch.randn(2, 4, 576), lens, table


def test_one_rank_needs_no_group():
    tensors = given()
    with dispatch.count_calls() as calls:
        found = cp_decode(*tensors, **ALONE, **OPTIONS)
    assert [op for op, *_ in calls] == ["decode"]  # nothing is merged
    assert all(map(torch.equal, found, mla_suite.decode(*tensors, **OPTIONS)))


def test_one_rank_adds_a_sink():
    tensors, sink = given(), torch.tensor([0.5, 2.0])
    found = cp_decode(*tensors, attn_sink=sink, **ALONE, **OPTIONS)
    expected = mla_suite.decode(*tensors, attn_sink=sink, **OPTIONS)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_longest_bound_is_one_for_a_rank_too():
    tensors = given()
    out, _ = cp_decode(*tensors, max_seqlen_kv=2**31 - 1, **ALONE, **OPTIONS)
    assert torch.equal(out, cp_decode(*tensors, **ALONE, **OPTIONS)[0])


def test_a_bound_that_a_trace_does_not_know():
    def layer(longest, *tensors):
        return cp_decode(*tensors, max_seqlen_kv=longest, **ALONE, **OPTIONS)[0]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for longest in (6, 8):
        tensors = longest, *given()
        assert torch.equal(compiled(*tensors), layer(*tensors))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all keys"])
def test_own_lengths_of_another_step_are_refused(causal):
    with pytest.raises(ValueError, match=r"decode: seq_lens\[0\] is 4; rank 0 of 1 has 5 of 5 keys"):
        cp_decode(*given(), local_seq_lens=torch.tensor([4]).int(), causal=causal, **ALONE, **OPTIONS)
