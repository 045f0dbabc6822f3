"""How sm_90 combines decode's splits beside combine: each two in a cluster; few rows while decode still runs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from decode_calls import (
    CACHE,
    CU_SEQLENS_Q,
    HALF,
    LENS,
    PLAN,
    TABLE,
    Q,
    assert_a_graph_repeats,
    assert_right,
    assert_right_at_other_lengths,
    assert_same_bits,
    check,
    check_arguments,
    decode,
    decode_grid,
    hostile,
    on_cpu,
)

import mla_suite
from mla_suite.archs.sm_90.costs import Estimate
from mla_suite.core import dispatch
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

pytestmark = pytest.mark.usefixtures("sm_90_decode")


EXCHANGES = ("reduce_o", "exchange_p")


PAIRS = {
    "two": dict(lens=(800, 33, 2100), heads=128, num_splits=2),
    "two, five tokens, sink": dict(lens=(800, 33, 2100), heads=16, q_len=5, num_splits=2, sink=True),
    "two, 512 wide, fp16": dict(lens=(800, 33, 2100), heads=64, rope=0, num_splits=2, **HALF),
    "four": dict(lens=(700, 100, 1, 64, 32, 0), heads=128, num_splits=4),
    "six, four tokens, sink": dict(lens=(700, 1, 2, 34, 1063), heads=32, q_len=4, num_splits=6, sink=True),
    "four, ragged queries": dict(lens=(700, 100, 3, 0), heads=24, q_len=3, varlen=True, num_splits=4, sink=True),
    "twenty, few rows": dict(lens=(3000, 33), heads=5, num_splits=20),
    "many, 512 wide, fp16": dict(lens=(9000,), heads=100, rope=0, num_splits=62, **HALF),
    "eight, all keys": dict(lens=(90, 7), heads=64, q_len=2, causal=False, num_splits=8),
    "forty-four": dict(lens=(8001,), heads=128, num_splits=44),
    "sixteen, most empty": dict(lens=(5,), heads=128, num_splits=16),
}


def assert_a_rounding_apart(results, expected):
    """Results are a rounding from what combine computes of partials that were rounded to fp32 on their way."""
    (out, lse), (right, right_lse) = results, expected
    step = 2.0**-7 if out.dtype == torch.bfloat16 else 2.0**-10
    torch.testing.assert_close(out.float(), right.float(), rtol=step, atol=2.0**-14)
    torch.testing.assert_close(lse, right_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("shape", PAIRS)
def test_pairs_within_the_rounding_bound(rules, shape, exchange):
    rules(cluster_mode=exchange)
    check(decode_sample(seed=len(shape), **PAIRS[shape]))


@pytest.mark.parametrize("kind", ["equal", "dominating", "rising", "falling", "large"])
def test_hard_scores_of_exchanged_probabilities(rules, kind):
    """Each split has a running max of its own, which the other block's results know nothing of."""
    args, kwargs = decode_sample((700,), heads=40, q_len=2, num_splits=4).make(torch.device("cpu"))
    decode_grid.hard_scores(kind, args)
    rules(cluster_mode="exchange_p")
    check_arguments(args, kwargs)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("shape", PAIRS)
def test_cuts_merged_in_pairs_are_those_merged_by_combine(rules, shape, exchange):
    """A row that one split does not see is the other's."""
    args, kwargs = decode_sample(seed=len(shape), **PAIRS[shape]).make(torch.device("cuda"))
    rules(cluster_mode=exchange)
    found = decode(args, kwargs)
    rules(cluster_mode="none")
    assert_a_rounding_apart(found, decode(args, kwargs))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("splits", [2, 4, 20])
def test_a_graph_of_pairs_repeats_its_bits(rules, splits, exchange):
    rules(cluster_mode=exchange)
    samples = [decode_sample((500 + 97 * i, 64), heads=100, num_splits=splits, seed=i) for i in range(6)]
    problems = [sample.make(torch.device("cuda")) for sample in samples]
    assert_a_graph_repeats(problems, [decode(*problem) for problem in problems])


@pytest.mark.parametrize("exchange", ["none", "exchange_p"])
@pytest.mark.parametrize("bits", [0x7FC0, 0xFFFF, 0x7FFF, 0xFF81])
def test_nan_of_any_kind_comes_through_a_streaming_combine(rules, bits, exchange):
    """Which waits as long as it sees one certain NaN: results must never be that one."""
    rules(cluster_mode=exchange)
    args, kwargs = decode_sample((700,), heads=16, num_splits=20).make(torch.device("cuda"))
    right, right_lse = decode(args, kwargs)
    nan = torch.tensor(bits - 0x10000 if bits >> 15 else bits, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    args[Q][0, 0, 3] = nan
    out, lse = decode(args, kwargs)
    assert out[0, 0, 3].isnan().all()
    assert lse[0, 0, 3].isnan()
    others = [head for head in range(16) if head != 3]
    assert torch.equal(out[0, 0, others], right[0, 0, others])
    assert torch.equal(lse[0, 0, others], right_lse[0, 0, others])
    args[CACHE][args[TABLE][0, 2], 5, 40] = nan
    assert decode(args, kwargs)[0][0, 0, others, 40].isnan().all()


@pytest.mark.parametrize("exchange", ["none", "exchange_p"])
@pytest.mark.parametrize(("heads", "least"), [(16, 5), (64, 2), (128, 3), (128, 32)])
def test_a_streaming_combine_takes_no_old_partial(monkeypatch, rules, heads, least, exchange):
    """Calls that follow each other closely, with other inputs in the same scratch, eagerly and as a graph."""
    samples = [decode_sample((1500 + 97 * i,), heads=heads, num_splits=least + i, seed=i) for i in range(12)]
    rules(cluster_mode=exchange)
    problems = [sample.make(torch.device("cuda")) for sample in samples]
    with monkeypatch.context() as changed:
        changed.setattr(Estimate, "streams", lambda self, splits, cluster_mode="none": False)
        dispatch.clear_caches()
        expected = [decode(*problem) for problem in problems]
    dispatch.clear_caches()

    results = []
    for problem in problems:
        results.append(decode(*problem))
        torch.cuda.synchronize()
    for pair in zip(results, expected, strict=True):
        assert_a_rounding_apart(*pair)
    for _ in range(20):
        assert_same_bits([decode(*problem) for problem in problems], results)
    assert_a_graph_repeats(problems, results)


IN_PAIRS = dict(every_plan=True, shared=False, pairs=True)


PLANS = {
    "two splits each": dict(lens=(3000,) * 33, heads=128),
    "four splits each": dict(lens=(2000,) * 33, heads=16),
    "ragged": dict(lens=(4000, 17, 900, 2100, 64, 0, 7000, 333) * 3, heads=100, sink=True),
    "ragged, 512 wide, fp16": dict(lens=(4000, 17, 900, 2100, 64, 0, 7000, 333) * 3, heads=40, rope=0, **HALF),
    "one long": dict(lens=(20000, *[70] * 20), heads=128, sink=True),
    "ragged queries": dict(lens=(700, 3, 1900, 0, 2600), heads=40, q_len=3, varlen=True, sink=True),
    "un-rotated, ragged": dict(lens=(4000, 17, 900, 2100, 64, 0, 7000, 333) * 3, heads=100, sink=True, rotate=True),
    "un-rotated, two splits each, fp16": dict(lens=(3000,) * 33, heads=128, rotate=True, **HALF),
    "e4m3 cache, two splits each": dict(lens=(3000,) * 33, heads=128, kv_format="fp8"),
    "e4m3 cache, ragged": dict(lens=(4000, 17, 900, 2100, 64, 0, 7000, 333) * 3, heads=100, sink=True, kv_format="fp8"),
    "e4m3 cache, ragged queries": dict(
        lens=(700, 3, 1900, 0, 2600), heads=40, q_len=3, varlen=True, page=1, kv_format="fp8", dtype=torch.float16
    ),
    "a split of every sequence": dict(lens=(700, 100, 1, 64, 0), heads=128, num_splits=4),
    "two splits of many": dict(lens=(700, 100, 1, 64, 0, 300) * 11, heads=24, num_splits=2, sink=True),
    "batch-invariant": dict(lens=(2000, 5, 170, 333), heads=64, split_size=256),
}


def planned(name):
    """The problem with a plan for this GPU, hostile where its data may be."""
    options = dict(PLANS[name])
    splits = {key: options.pop(key) for key in ("num_splits", "split_size") if key in options}
    args, kwargs = hostile(decode_sample(seed=len(name), **options))
    sizes = dict(num_heads=args[Q].shape[-2], max_seqlen_q=options.get("q_len", 1), max_seqlen_kv=max(options["lens"]))
    args[PLAN] = mla_suite.plan(args[LENS], args[CU_SEQLENS_Q], **sizes, **splits)
    return args, kwargs


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_walked_in_pairs_is_right(rules, name):
    """To the bound; to a rounding of what it is without clusters; and the same bits every time."""
    args, kwargs = planned(name)
    rules(**IN_PAIRS)
    found = decode(args, kwargs)
    assert_right(*found, exact_decode(*on_cpu(args), **kwargs))
    for _ in range(10):
        assert_same_bits([decode(args, kwargs)], [found])
    rules(pairs=False)
    assert_a_rounding_apart(found, decode(args, kwargs))


def test_a_graph_with_plans_walked_in_pairs_repeats_its_bits(rules):
    rules(**IN_PAIRS)
    problems = [planned(name) for name in PLANS]
    assert_a_graph_repeats(problems, [decode(*problem) for problem in problems])


@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_plan_walked_in_pairs_is_right_at_any_length(rules, heads):
    """The plan is made once and captured; then sequences grow, shrink and vanish. Or it is made anew in each replay."""
    rules(**IN_PAIRS)
    first = (2000, 1500, 1000, 64, 900)
    made, kwargs = decode_sample(first, heads=heads).make(torch.device("cuda"))
    args = list(made)
    lens = args[LENS]
    longest = dict(num_heads=heads, max_seqlen_kv=max(first))
    for anew in (False, True):
        lens.copy_(torch.tensor(first, dtype=torch.int32))
        args[PLAN] = mla_suite.plan(lens, **longest)
        decode(args, kwargs)

        def step(anew=anew):
            plan = mla_suite.plan(lens, **longest) if anew else args[PLAN]
            return torch.ops.mla_suite.decode(*args[:PLAN], plan, **kwargs)

        every_lengths = (first, (2, 0, 999, 33, 0), (1999, 1, 32, 2, 1), (64, 1990, 990, 64, 890), first)
        assert_right_at_other_lengths(step, args, kwargs, every_lengths, warm=False)


def test_more_parts_than_the_device_holds_are_not_merged_in_pairs(rules):
    """Each block then walks several parts, so no tile is a block's last."""
    args, kwargs = hostile(decode_sample((3000, 900, 2000, 64), heads=64))
    args[PLAN] = mla_suite.plan(args[LENS], num_heads=64, num_sm_parts=500, max_seqlen_kv=3000)
    rules(**IN_PAIRS)
    assert_right(*decode(args, kwargs), exact_decode(*on_cpu(args), **kwargs))


@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_plan_that_is_not_needed_is_right_at_any_length(heads):
    """Short sequences are split equally, whatever their plan says: also when they become longer or vanish."""
    first = (300, 200, 256, 64, 90)
    made, kwargs = decode_sample(first, heads=heads).make(torch.device("cuda"))
    args = list(made)
    lens = args[LENS]
    args[PLAN] = mla_suite.plan(lens, num_heads=heads, max_seqlen_kv=300)
    decode(args, kwargs)
    step = partial(torch.ops.mla_suite.decode, *args, **kwargs)
    every_lengths = (first, (2, 0, 256, 33, 0), (1, 199, 0, 64, 64))
    assert_right_at_other_lengths(step, args, kwargs, every_lengths, warm=False)
