"""Row tiles of a sequence that share keys on sm_90: each CTA of a cluster loads every other stage for both."""

from __future__ import annotations

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
    hostile,
    kernels,
)

import mla_suite
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

pytestmark = pytest.mark.usefixtures("sm_90_decode")


RAGGED = (700, 100, 0, 1063, 1, 33, 64) * 9
LONG = (4000, 17, 900, 2100, 64, 0, 7000, 333) * 3  # whose equal splits take too long for a plan to be left out
SHAPES = {
    "one split": dict(lens=RAGGED, heads=128, num_splits=1),
    "one row in the second tile": dict(lens=RAGGED, heads=65, num_splits=1),
    "four tokens, sink": dict(lens=RAGGED, heads=32, q_len=4, num_splits=1, sink=True),
    "four tiles": dict(lens=RAGGED, heads=64, q_len=4, num_splits=1),
    "three splits": dict(lens=RAGGED, heads=128, num_splits=3, sink=True),
    "by size": dict(lens=RAGGED, heads=128, split_size=64),
    "by size, planned": dict(lens=RAGGED, heads=100, split_size=256, planned=True),
    "balanced plan": dict(lens=LONG, heads=128, planned=True, sink=True),
    "balanced plan, one long sequence": dict(lens=(20_000, *[70] * 20), heads=100, planned=True),
    "balanced plan, queries of one tile and of two": dict(
        lens=LONG, heads=24, q_len=4, varlen=True, planned=True, **HALF
    ),
    "queries of one tile and of two": dict(lens=RAGGED, heads=24, q_len=4, varlen=True, num_splits=1, sink=True),
    "large pages, in a list": dict(lens=RAGGED, heads=128, page=256, ragged_pages=True, num_splits=1),
    "pages of 32": dict(lens=RAGGED, heads=96, page=32, num_splits=1, causal=False),
    "fp16": dict(lens=RAGGED, heads=128, num_splits=1, **HALF),
    "rows of 512": dict(lens=RAGGED, heads=128, rope=0, num_splits=2),
    "rows of 512, balanced plan": dict(lens=LONG, heads=100, rope=0, planned=True, **HALF),
    "a window": dict(lens=RAGGED, heads=32, q_len=4, num_splits=1, window_left=130, sink=True),
    "a window, balanced plan": dict(lens=LONG, heads=128, window_left=900, planned=True),
    "a window between pages, fp16": dict(lens=RAGGED, heads=96, num_splits=1, window_left=77, **HALF),
    "trees": dict(lens=RAGGED, heads=16, q_len=8, num_splits=1, tree=True),
    "trees, balanced plan": dict(lens=LONG, heads=32, q_len=4, tree=True, planned=True),
    "an extend": dict(lens=(130, 61, 97) * 3, heads=24, q_len=62, num_splits=1),
    "an extend, ragged": dict(lens=RAGGED, heads=16, q_len=90, varlen=True, num_splits=2, sink=True),
    "a window of an extend": dict(lens=RAGGED, heads=16, q_len=90, varlen=True, num_splits=1, window_left=70),
    "no keys": dict(lens=(0,) * 60, heads=128, num_splits=1),
}


def sample(name):
    """The problem without its plan."""
    return decode_sample(seed=len(name), **{key: value for key, value in SHAPES[name].items() if key != "planned"})


def made(name):
    """The problem, hostile where its data may be; a plan is of this GPU."""
    options = SHAPES[name]
    args, kwargs = hostile(sample(name))
    if "planned" in options:
        kwargs["max_seqlen_kv"] = longest = max(options["lens"])
        sizes = dict(num_heads=options["heads"], max_seqlen_q=options.get("q_len", 1), max_seqlen_kv=longest)
        sizes |= {name: options[name] for name in ("split_size", "window_left") if name in options}
        args[PLAN] = mla_suite.plan(args[LENS], args[CU_SEQLENS_Q], **sizes)
    return args, kwargs


@pytest.mark.parametrize("name", SHAPES)
def test_shared_keys_give_the_bits_of_keys_that_are_not(rules, name):
    """Sharing changes who loads a stage and nothing of what is computed."""
    args, kwargs = made(name)
    assert "clustermode-share_kv" in kernels(args, kwargs)[0]
    found = decode(args, kwargs)
    clean, options = sample(name).make(torch.device("cpu"))
    assert_right(*found, exact_decode(*clean, **options))
    rules(shared=False, pairs=False)
    assert "clustermode-none" in kernels(args, kwargs)[0]
    assert_same_bits([decode(args, kwargs)], [found])


def test_a_graph_with_shared_keys_repeats_its_bits():
    problems = [made(name) for name in SHAPES]
    assert_a_graph_repeats(problems, [decode(*problem) for problem in problems])


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"split_size": 128}])
def test_a_captured_call_is_right_at_any_length(splits):
    args, kwargs = decode_sample((2000, 1500, 1000, 64, 900) * 12, heads=128, **splits).make(torch.device("cuda"))
    assert "clustermode-share_kv" in kernels(args, kwargs)[0]
    lengths = ((2, 0, 999, 33, 0), (0, 0, 0, 0, 0), (64, 1490, 990, 64, 890), (2000, 1500, 1000, 64, 900))
    every_lengths = [of_five * 12 for of_five in lengths]
    assert_right_at_other_lengths(lambda: decode(args, kwargs), list(args), kwargs, every_lengths)


def test_nan_in_a_query_stays_in_its_row():
    args, kwargs = decode_sample((700, 300) * 30, heads=128, num_splits=1).make(torch.device("cuda"))
    right, right_lse = decode(args, kwargs)
    args[Q][0, 0, 70, 3] = torch.nan
    out, lse = decode(args, kwargs)
    others = [head for head in range(128) if head != 70]
    assert out[0, 0, 70].isnan().all()
    assert torch.equal(out[:, :, others], right[:, :, others])
    assert torch.equal(lse[:, :, others], right_lse[:, :, others])
