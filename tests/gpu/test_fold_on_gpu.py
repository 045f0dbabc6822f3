"""Batch-invariant decode on sm_90 whose work tiles are nodes of splits, beside the same whose work tiles are splits."""

from __future__ import annotations

import random

import pytest
import torch
from decode_calls import (
    CU_SEQLENS_Q,
    HALF,
    LENS,
    PLAN,
    Q,
    assert_a_graph_repeats,
    assert_right,
    assert_right_at_other_lengths,
    assert_same_bits,
    decode,
    decode_grid,
    hostile,
    kernels,
    on_cpu,
)

import mla_suite
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

pytestmark = pytest.mark.usefixtures("sm_90_decode")


LONG = (4000, 17, 900, 2100, 64, 0, 1500, 333)
SHAPES = {
    "one node": dict(lens=LONG, heads=64, split_size=256),
    "several nodes": dict(lens=LONG, heads=16, split_size=64),
    "two tiles": dict(lens=LONG, heads=128, split_size=128, sink=True),
    "shared keys": dict(lens=(700, 100, 0, 1063, 1, 33, 64) * 9, heads=100, split_size=32),
    "four tiles": dict(lens=(700, 100, 0, 1063, 1, 33, 64) * 9, heads=64, q_len=4, split_size=64),
    "sinks": dict(lens=LONG, heads=40, q_len=2, split_size=256, sink=True),
    "ragged queries": dict(lens=LONG, heads=24, q_len=4, varlen=True, split_size=96),
    "pages of 96, in a list": dict(lens=LONG, heads=12, page=96, ragged_pages=True, split_size=128),
    "all keys": dict(lens=LONG, heads=32, q_len=4, causal=False, split_size=512),
    "a size that is no multiple of 32": dict(lens=LONG, heads=16, split_size=100),
    "fp16": dict(lens=LONG, heads=128, split_size=256, **HALF),
    "one long sequence": dict(lens=(20_000,), heads=64, split_size=512),
    "no keys": dict(lens=(0, 0, 0), heads=128, split_size=64),
}


def made(name):
    return hostile(decode_sample(seed=len(name), **SHAPES[name]))


@pytest.mark.parametrize("name", SHAPES)
def test_folded_splits_have_the_bits_of_splits(rules, name):
    args, kwargs = made(name)
    kwargs["max_seqlen_kv"] = max(*SHAPES[name]["lens"], 1)
    rules(folds=False)
    apart = decode(args, kwargs)
    if kwargs["max_seqlen_kv"] > kwargs["split_size"]:
        assert kernels(args, kwargs)[1].startswith("fold_combine")
    rules(folds=True)
    assert kernels(args, kwargs)[0].startswith("fold_decode")
    found = decode(args, kwargs)
    assert_right(*found, exact_decode(*on_cpu(args), **kwargs))
    assert_same_bits([found], [apart])


def test_random_problems(rules):
    """Scores of all sizes, whose later splits outweigh the earlier: folded or not, the same bits, and right."""
    draw = random.Random(5)
    for seed in range(60):
        rows = draw.choice(((16, 1), (128, 1), (20, 1), (32, 4), (96, 2), (8, 3)))
        lens = [draw.randint(0, draw.choice((100, 1000, 3000))) for _ in range(draw.choice((1, 3, 40)))]
        sizes = dict(
            heads=rows[0], q_len=rows[1], page=draw.choice((32, 64, 128)), split_size=draw.choice((32, 64, 256))
        )
        sample = decode_sample(lens, seed=seed, sink=draw.random() < 0.3, **sizes, **draw.choice(({}, HALF)))
        args, kwargs = hostile(sample)
        kwargs["softmax_scale"] = draw.choice((0.02, 0.3, 3.0)) / 24
        rules(folds=False)
        apart = decode(args, kwargs)
        rules(folds=True)
        found = decode(args, kwargs)
        assert_same_bits([found], [apart])
        if seed % 6 == 0:
            assert_right(*found, exact_decode(*on_cpu(args), **kwargs))


def with_plan(args, kwargs):
    sizes = dict(num_heads=args[Q].shape[-2], max_seqlen_q=kwargs.get("max_seqlen_q") or args[Q].shape[1])
    sizes |= {name: kwargs[name] for name in ("max_seqlen_kv", "split_size")}
    planned = list(args)
    planned[PLAN] = mla_suite.plan(args[LENS], args[CU_SEQLENS_Q], **sizes)
    return planned


@pytest.mark.parametrize("name", SHAPES)
def test_a_plan_changes_no_bit(rules, name):
    """SM parts end anywhere in a node, whose splits are then partly folded and partly apart."""
    args, kwargs = made(name)
    kwargs["max_seqlen_kv"] = max(*SHAPES[name]["lens"], 1)
    planned = with_plan(args, kwargs)
    rules(folds=False)
    alone = decode(args, kwargs)
    assert kernels(planned, kwargs)[0].startswith("decode")
    apart = decode(planned, kwargs)
    rules(folds=True)
    whole = kwargs["split_size"] % 32 == 0
    assert kernels(planned, kwargs)[0].startswith("fold_decode" if whole else "decode")
    found = decode(planned, kwargs)
    assert_right(*found, exact_decode(*on_cpu(planned), **kwargs))
    assert_same_bits([found], [apart])
    if whole and not SHAPES[name].get("sink"):
        assert_same_bits([found], [alone])


@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("heads", [64, 128])
def test_a_sequence_that_outgrew_its_plan_is_right(rules, heads, sink):
    """Its only work tile is then several splits long, and its sink counts once."""
    args, kwargs = hostile(decode_sample(LONG, heads=heads, split_size=128, sink=sink))
    kwargs["max_seqlen_kv"] = max(LONG)
    before = list(args)
    before[LENS] = args[LENS].clamp(max=100)
    args[PLAN] = with_plan(before, kwargs)[PLAN]
    for folds in (False, True):
        rules(folds=folds)
        assert kernels(args, kwargs)[0].startswith("fold_decode") == folds
        assert_right(*decode(args, kwargs), exact_decode(*on_cpu(args), **kwargs))


def test_a_sequence_has_its_bits_in_any_batch():
    """As calls choose: alone its splits are the work tiles, in a large batch its nodes are."""
    args, kwargs = decode_sample(LONG * 40, heads=64, split_size=128).make(torch.device("cuda"))
    kwargs["max_seqlen_kv"] = max(LONG)
    assert kernels(args, kwargs)[0].startswith("fold_decode")
    together = decode(args, kwargs)
    for own in ([0], [3]):
        alone = decode_grid.sequences(args, own)
        assert kernels(alone, kwargs)[0].startswith("decode")
        assert_same_bits([decode(alone, kwargs)], [[result[own] for result in together]])


@pytest.mark.parametrize("plan", [False, True], ids=["no plan", "plan"])
def test_a_graph_repeats_its_bits(rules, plan):
    rules(folds=True)
    problems = [made(name) for name in SHAPES]
    if plan:
        for args, kwargs in problems:
            kwargs["max_seqlen_kv"] = max(int(args[LENS].max()), 1)
        problems = [(with_plan(*problem), problem[1]) for problem in problems]
    assert_a_graph_repeats(problems, [decode(*problem) for problem in problems])


def test_a_captured_call_is_right_at_any_length(rules):
    rules(folds=True)
    args, kwargs = decode_sample((2000, 1500, 1000, 64, 900), heads=128, split_size=128).make(torch.device("cuda"))
    lengths = ((2, 0, 999, 33, 0), (0, 0, 0, 0, 0), (64, 1490, 990, 64, 890), (2000, 1500, 1000, 64, 900))
    assert_right_at_other_lengths(lambda: decode(args, kwargs), list(args), kwargs, lengths)
    kwargs["max_seqlen_kv"] = 2000
    planned = with_plan(args, kwargs)
    assert_right_at_other_lengths(lambda: decode(planned, kwargs), list(args), kwargs, lengths)
