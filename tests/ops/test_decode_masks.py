"""Sliding windows and trees of drafts: what decode and plan promise of them beside the numbers of test_decode.py."""

import pytest
import torch

import mla_suite
from mla_suite import archs
from mla_suite.core import register
from mla_suite.core.dispatch import Supported
from mla_suite.ops.decode.samples import decode_sample, random_tree
from mla_suite.ops.plan.metadata import Plan
from mla_suite.ops.plan.window import first_key, most_keys, origin
from mla_suite.testing import assert_close, exact_decode

CPU = torch.device("cpu")
SMALL = dict(heads=2, latent=64, rope=16, page=16)


def test_a_window_is_the_attention_of_a_sequence_without_its_first_keys():
    args, kwargs = decode_sample([200], **SMALL).make(CPU)
    windowed = mla_suite.decode(*args, **kwargs, window_left=79)
    q, cache, lens, table, *rest = args
    pages = cache[table[0].long()].flatten(0, 1)[120:200]
    one_page = mla_suite.decode(q, pages[None], lens - 120, torch.zeros_like(table[:, :1]), *rest, **kwargs)
    torch.testing.assert_close(windowed, one_page, atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize("window", [0, 63, 500])
@pytest.mark.parametrize("made_with", [-1, 10, 63])
def test_a_plan_made_with_another_window_is_right(window, made_with):
    lens = [700, 0, 64, 65, 130]
    args, kwargs = decode_sample(lens, q_len=2, window_left=window, **SMALL).make(CPU)
    plan = mla_suite.plan(args[2], num_heads=2, max_seqlen_q=2, num_sm_parts=7, window_left=made_with)
    assert_close(*mla_suite.decode(*args[:11], plan, **kwargs), exact_decode(*args, **kwargs))


def test_a_plan_counts_the_keys_of_the_window_alone():
    lens = torch.tensor([30_000, 600, 40], dtype=torch.int32)
    windowed = mla_suite.plan(lens, num_heads=16, num_sm_parts=8, max_seqlen_q=4, window_left=508)
    # 30,000 - 4 - 508 is 0 modulo 64 and a window of 512 keys; 600 - 512 is 88, which begins to be counted at 64.
    whole = mla_suite.plan(
        torch.tensor([560, 536, 40], dtype=torch.int32), num_heads=16, num_sm_parts=8, max_seqlen_q=4
    )
    assert [Plan.read(windowed).splits(), windowed.shape] == [Plan.read(whole).splits(), whole.shape]


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("window", [0, 63, 200])
def test_the_most_keys_of_a_window_are_those_of_some_length(q_len, window):
    """Splits of a size are counted by it: with fewer the last one would hold more keys than its size."""
    lens = torch.arange(700)
    present = lens - origin(first_key(lens, q_len, window))
    assert int(present.max()) == most_keys(700, q_len, window) - 1  # origins are rounded down by 63 keys at most
    assert most_keys(40, q_len, 500) == 40


@pytest.mark.parametrize("q_len", [1, 5, 64])
def test_the_mask_of_a_chain_gives_the_causal_bits(q_len):
    args, kwargs = decode_sample([200, 3, 64], q_len=q_len, **SMALL).make(CPU)
    words = [-1 if i == 63 else (2 << i) - 1 for i in range(q_len)]
    tree = torch.tensor([words] * 3)
    for mine, right in zip(
        mla_suite.decode(*args[:13], tree, **kwargs), mla_suite.decode(*args, **kwargs), strict=True
    ):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("seed", range(10))
def test_random_trees_against_fp64(seed):
    q_len = 1 + seed * 7 % 64
    sample = decode_sample(
        [200, 0, q_len, max(q_len - 3, 0)], q_len=q_len, tree=True, varlen=seed % 2 > 0, seed=seed, **SMALL
    )
    args, kwargs = sample.make(CPU)
    assert_close(*mla_suite.decode(*args, **kwargs), exact_decode(*args, **kwargs))


def test_siblings_do_not_see_each_other():
    args, kwargs = decode_sample([50], q_len=3, **SMALL).make(CPU)
    tree = torch.tensor([[0b001, 0b011, 0b101]])
    before = mla_suite.decode(*args[:13], tree, **kwargs)[0]
    sibling = args[1].clone()
    sibling[args[3][0, 48 // 16], 0] += 1  # the key of query token 1
    after = mla_suite.decode(args[0], sibling, *args[2:13], tree, **kwargs)[0]
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1], after[:, 1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window_left": -2}, r"window_left is -2; it takes 0\.\.\d+ keys left of a query token, or -1 for all"),
        ({"window_left": 0, "cp_world_size": 2, "causal": False}, "window_left is 0 with cp_world_size 2"),
        ({"tree": random_tree([2], False, 0)}, r"tree_mask has shape \(1, 2\)"),
        ({"tree": random_tree([2, 2], False, 0).int()}, "tree_mask is int32"),
        ({"tree": random_tree([2, 2], False, 0), "causal": False}, "tree_mask is given with causal=False"),
        ({"tree": random_tree([2, 2], False, 0), "window_left": 0}, "tree_mask is given with window_left 0"),
    ],
)
def test_refusals(change, words):
    args, kwargs = decode_sample([70, 30], q_len=2, **SMALL).make(CPU)
    tree, change = change.get("tree"), {name: value for name, value in change.items() if name != "tree"}
    with pytest.raises((ValueError, TypeError), match=words):
        mla_suite.decode(*args[:13], tree, **(kwargs | change))


def test_a_tree_of_more_tokens_than_a_word_has_bits():
    args, kwargs = decode_sample([70], q_len=65, **SMALL).make(CPU)
    with pytest.raises(
        ValueError, match="tree_mask is given for 65 query tokens of a sequence; a word has bits for 64"
    ):
        mla_suite.decode(*args[:13], torch.zeros(1, 65, dtype=torch.int64), **kwargs)


def test_a_plan_refuses_what_is_no_window():
    with pytest.raises(ValueError, match="plan: window_left is -3"):
        mla_suite.plan(torch.tensor([3], dtype=torch.int32), num_heads=1, num_sm_parts=1, window_left=-3)


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize("mask", [{"window_left": 128}, {"tree": True}], ids=str)
def test_every_arch_has_kernels_for_them(name, mask):
    args, kwargs = decode_sample([4096] * 4, q_len=2, **mask).make(CPU)
    problem = register.get("decode").problem(*args, **kwargs)
    assert isinstance(archs.kernels(archs.get(name)).decode(problem), Supported)
