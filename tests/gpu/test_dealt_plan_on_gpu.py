"""Decode with a plan that deals sequences out of order, on a real GPU, against fp64."""

from __future__ import annotations

import random

import pytest
import torch
from decode_calls import (
    HALF,
    LENS,
    PLAN,
    assert_a_graph_repeats,
    assert_right,
    assert_same_bits,
    decode,
    hostile,
    on_cpu,
    require_kernels,
)

import mla_suite
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.metadata import Plan
from mla_suite.testing import exact_decode


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    return tuple(random.Random(batch).choices(range(1, longest), k=batch))


PROBLEMS = {
    "two of each part": dict(lens=ragged(128, 500), heads=128),
    "chunks and remainders": dict(lens=ragged(40, 3000), heads=16, sink=True),
    "chunks side by side": dict(lens=(9000, *ragged(30, 400)), heads=100, sink=True),
    "few, long": dict(lens=ragged(8, 16384), heads=16),
    "512 wide, fp16": dict(lens=(4000, *ragged(70, 900)), heads=64, rope=0, **HALF),
}


@pytest.fixture(params=["alone", "in pairs", "shared keys"], autouse=True)
def every_plan_is_used(request, rules):
    """However little it saves. Clusters walk its SM parts in pairs or share keys where they can, or there are none."""
    require_kernels("sm_90")
    rules(every_plan=True, shared=request.param == "shared keys", pairs=request.param == "in pairs")


def problem(name: str):
    """The problem with a plan for this GPU, which must be out of order."""
    options = PROBLEMS[name]
    args, kwargs = hostile(decode_sample(seed=len(name), **options))
    args[PLAN] = mla_suite.plan(args[LENS], num_heads=options["heads"], max_seqlen_kv=max(options["lens"]))
    sequences = [tile[0] for tile in Plan.read(args[PLAN]).work_tiles]
    assert sequences != sorted(sequences)
    return args, kwargs


@pytest.mark.parametrize("name", PROBLEMS)
def test_it_is_right_and_has_the_same_bits_every_time(name):
    args, kwargs = problem(name)
    out, lse = decode(args, kwargs)
    assert_right(out, lse, exact_decode(*on_cpu(args), **kwargs))
    for _ in range(5):
        assert_same_bits([decode(args, kwargs)], [(out, lse)])


def test_a_graph_repeats_its_bits():
    problems = [problem(name) for name in PROBLEMS]
    assert_a_graph_repeats(problems, [decode(*each) for each in problems])


def test_it_is_right_at_other_lengths():
    """Plans are made once; then sequences shrink and vanish, or grow past their chunks."""
    args, kwargs = problem("chunks and remainders")
    longest = args[LENS].tolist()
    half = [1 + length // 2 for length in longest]
    of_half = mla_suite.plan(torch.tensor(half, dtype=torch.int32, device="cuda"), num_heads=16, max_seqlen_kv=3000)
    sequences = [tile[0] for tile in Plan.read(of_half).work_tiles]
    assert sequences != sorted(sequences)
    for plan in (args[PLAN], of_half):
        args[PLAN] = plan
        for lengths in ([0] * len(longest), [1] * len(longest), half, longest):
            args[LENS].copy_(torch.tensor(lengths, dtype=torch.int32))
            assert_right(*decode(args, kwargs), exact_decode(*on_cpu(args), **kwargs))
