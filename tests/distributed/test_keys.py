"""Keys are dealt to ranks without gaps and without overlap, and a rank's cache stores just its own."""

import doctest
import importlib
import random

import pytest
import torch

from mla_suite.distributed import ContextParallelCache, KeyShard, cp_decode, cp_sparse_decode


@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_key_has_one_owner_and_local_positions_have_no_gaps(world, interleave):
    positions = torch.arange(201)
    owners = torch.stack([KeyShard(world, rank, interleave).owns(positions) for rank in range(world)])
    assert (owners.sum(0) == 1).all()
    for rank in range(world):
        shard = KeyShard(world, rank, interleave)
        own = positions[shard.owns(positions)]
        assert shard.local_positions(own).tolist() == list(range(len(own)))
        counted = torch.tensor([int((own < length).sum()) for length in positions])
        assert torch.equal(shard.local_lens(positions), counted)


EXIST, INT = "ranks are 0 to world - 1", "KeyShard: (world|rank|interleave) is .*; it takes an int"


@pytest.mark.parametrize("wrong", [(2, 2), (0, 0), (2, -1), (2, 0, 0), (2.0, 0), (2, None), (2, 0, "1")], ids=str)
def test_a_share_that_cannot_exist_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match=EXIST if set(map(type, wrong)) == {int} else INT):
        KeyShard(*wrong).check()


@pytest.mark.parametrize("interleave", [1, 8])
def test_the_ranks_caches_hold_every_token_once(interleave):
    caches = [
        ContextParallelCache(1, num_pages=12, page_size=8, shard=KeyShard(3, rank, interleave)) for rank in range(3)
    ]
    for cache in caches:
        first, second = cache.allocate(40), cache.allocate()
        cache.append([first, second], [30, 0])
        cache.truncate(first, 17)
        step = cache.append([first, second], [5, 7])
        assert step.seq_lens.tolist() == [22, 7]
        assert step.positions.tolist() == [*range(17, 22), *range(7)]
    steps = [cache.append([0, 1], [2, 1]) for cache in caches]
    assert (torch.stack([step.slot_mapping >= 0 for step in steps]).sum(0) == 1).all()
    assert sum(cache._own.length(0) for cache in caches) == 24
    with pytest.raises(ValueError, match="length 25 of a sequence of 24"):
        caches[0].truncate(0, 25)


def test_the_caches_example_holds():
    assert doctest.testmod(importlib.import_module(ContextParallelCache.__module__)) == (0, 3)


def test_a_count_that_is_no_int_changes_nothing():
    cache = ContextParallelCache(1, num_pages=4, page_size=4, shard=KeyShard(2, 1))
    sequence = cache.allocate()
    with pytest.raises(TypeError, match=r"append: counts\[0\] is 1.5; it takes an int"):
        cache.append([sequence], [1.5])
    with pytest.raises(TypeError, match="truncate: length is None; it takes an int"):
        cache.truncate(sequence, None)
    with pytest.raises(ValueError, match="allocate: -1 tokens; reserve 0 or more"):
        cache.allocate(-1)
    assert (cache.length(sequence), cache.free_pages) == (0, 4)


def called(call, **changes):
    """A call of one rank for one query token of four heads, with some arguments changed."""
    given = dict(q=torch.ones(1, 1, 4, 576), kv_cache=torch.ones(2, 4, 576), block_table=torch.zeros(1, 2).int())
    given |= dict(seq_lens=torch.ones(1).int()) if call is cp_decode else dict(positions=torch.zeros(1, 1, 3).int())
    return call(**{**given, "shard": KeyShard(), **changes}, group="none", kv_format="fp32", softmax_scale=1.0)


def test_a_selected_position_past_the_table_selects_nothing():
    table, selected = torch.tensor([[1, 0]]).int(), torch.tensor([[[3, 8, -1]]]).int()
    out, lse = called(cp_sparse_decode, positions=selected, block_table=table)
    assert torch.equal(out, torch.ones(1, 1, 4, 512))
    assert torch.equal(lse, torch.full((1, 1, 4), 576.0))


def test_a_rank_without_pages_selects_nothing():
    out, lse = called(cp_sparse_decode, block_table=torch.zeros(1, 0).int())
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_running_out_of_pages_changes_nothing():
    cache = ContextParallelCache(1, num_pages=1, page_size=4, shard=KeyShard(2, 0))
    sequence = cache.allocate()
    with pytest.raises(RuntimeError, match="needs 2 pages of 4 tokens"):
        cache.append([sequence], [10])
    assert cache.length(sequence) == 0
    assert cache.append([sequence], [8]).slot_mapping.tolist() == [0, -1, 1, -1, 2, -1, 3, -1]


@pytest.mark.parametrize("interleave", [1, 4, 6])
def test_all_ranks_run_out_of_pages_at_once(interleave):
    caches = [ContextParallelCache(1, 6, page_size=4, shard=KeyShard(3, rank, interleave)) for rank in range(3)]
    draw = random.Random(interleave)
    sequences, refusals = [], 0
    for _ in range(200):
        change = draw.choice(["allocate", "append", "append", "append", "truncate", "free"])
        if change == "allocate" or not sequences:
            call = "allocate", (draw.choice([0, 9]),)
        elif change == "append":
            call = change, ([draw.choice(sequences)], [draw.randrange(9)])
        else:
            chosen = draw.choice(sequences)
            call = (change, (chosen, caches[0].length(chosen) // 2)) if change == "truncate" else (change, (chosen,))
        name, given = call
        results = []
        for cache in caches:
            try:
                results.append(getattr(cache, name)(*given))
            except RuntimeError as error:
                results.append(str(error))
        said = [result if isinstance(result, (str, int)) else None for result in results]
        assert said[1:] == said[:1] * 2, said
        refusals += isinstance(said[0], str)
        if name == "allocate" and isinstance(said[0], int):
            sequences.append(said[0])
        elif name == "free":
            sequences.remove(given[0])
        assert len({cache.free_pages for cache in caches}) == 1
        assert all(cache.free_pages <= cache._own.free_pages for cache in caches)
    assert refusals >= 5


@pytest.mark.parametrize(
    ("call", "wrong", "sentence"),
    [
        (cp_sparse_decode, {"q": None}, "q is None; it takes a tensor"),
        (cp_sparse_decode, {"positions": [1]}, "positions is a list of int; it takes a tensor"),
        (cp_sparse_decode, {"positions": torch.zeros(2)}, r"positions has .* it takes \[batch, q_len, topk\]"),
        (cp_sparse_decode, {"positions": torch.zeros(1, 2, 3).int()}, r"positions has .* it takes .* = \(1, 1, 3\)"),
        (cp_sparse_decode, {"block_table": torch.zeros(3, 2).int()}, r"block_table has .* takes .* = \(1, 2\)"),
        (cp_sparse_decode, {"block_table": torch.zeros(2)}, r"block_table has .* takes \[batch, width\]"),
        (cp_sparse_decode, {"kv_cache": None}, "kv_cache is None; it takes a tensor"),
        (cp_sparse_decode, {"kv_cache": torch.ones(8, 576)}, r"kv_cache has .*; it takes \[num_pages, page_size,"),
        (cp_sparse_decode, {"shard": (2, 1)}, "shard is a tuple; it takes a KeyShard"),
        (cp_decode, {"seq_lens": [3]}, "seq_lens is a list of int; it takes a tensor"),
        (cp_decode, {"max_seqlen_kv": "3"}, "max_seqlen_kv is '3'; it takes an int"),
        (cp_decode, {"shard": None}, "shard is a NoneType; it takes a KeyShard"),
    ],
)
def test_keys_of_other_kinds_are_refused(call, wrong, sentence):
    with pytest.raises(ValueError if " has " in sentence else TypeError, match=f"{call.__name__}: {sentence}"):
        called(call, **wrong)


@pytest.mark.parametrize("call", [cp_decode, cp_sparse_decode])
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"exchange": "ring"}, "{name}: exchange is 'ring'; it takes all_to_all or all_gather"),
        ({"shard": KeyShard(1, 0, 0)}, "KeyShard: rank 0 of 1 with interleave 0; ranks are 0 to world - 1"),
        ({"q": torch.zeros(1, 2, 576)}, r"{name}: q has shape .*; it takes \[batch, q_len, heads, head_dim\]"),
        # as `combine` takes for all heads
        ({"attn_sink": torch.zeros(1)}, r"{name}: attn_sink has shape \(1,\); it takes \[heads\] = \(4,\)"),
        ({"attn_sink": torch.zeros(8)}, r"{name}: attn_sink has shape \(8,\); it takes \[heads\] = \(4,\)"),
        ({"attn_sink": torch.zeros(4).bfloat16()}, "{name}: attn_sink is bfloat16; it takes float32"),
        ({"attn_sink": [0.0] * 4}, "{name}: attn_sink is a list of float; it takes a tensor"),
    ],
)
def test_what_both_calls_refuse(call, wrong, sentence):
    with pytest.raises((TypeError, ValueError), match="^" + sentence.format(name=call.__name__)):
        called(call, **wrong)
