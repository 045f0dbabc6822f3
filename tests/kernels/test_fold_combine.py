"""csrc/sm_90/combine/fold_combine.hpp, executed on a CPU with warps of 32 lanes, against fp64.

Partials are NaN until a block has waited for decode. What nvcc makes of the source, visibility of memory and time are
not seen; that decode folds splits to the same bits is shown on a GPU (tests/gpu/test_fold_on_gpu.py).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from kernels_on_host import HOST, with_a_fault
from kernels_on_host import compiled as compiled_program
from plan_merges import PlanMerge
from planted import each_of

from mla_suite import archs
from mla_suite.archs.sm_90 import combine
from mla_suite.archs.sm_90.costs import NODE_SPLITS
from mla_suite.ops.combine import Problem
from mla_suite.testing import poison

KERNEL = "sm_90/combine/fold_combine.hpp"
ROWS = {"few": 1, "many": 100_000}
"""Rows for which each of the two instances is chosen."""


def config_of(rows):
    problem = Problem(1, ROWS[rows], 512, 0, torch.bfloat16, False, 2)
    return combine.config_for(problem, archs.get("sm_90"), fixed=True, planned=False, folds=True)


def compiled(folder: Path, rows: str, *first: Path) -> Path:
    config = config_of(rows)
    constants = {"HOST_BLOCK_THREADS": config.threads, "MLA_SUITE_KERNEL": "fold_combine"}
    constants |= {"COMBINE": '"sm_90/combine/fold_combine.cu"', **config.constants}
    return compiled_program("combine/combine.cpp", folder / f"combine-{rows}", constants, *first, HOST / "combine")


@pytest.fixture(scope="module", params=list(ROWS))
def instance(request, tmp_path_factory):
    return request.param, compiled(tmp_path_factory.mktemp("combine"), request.param)


def run_and_check(program, rows, merge, states=None):
    config = config_of(rows)
    launch = merge.prepared(config)
    if states is not None:
        launch = combine.of_states(launch, merge.heads * merge.q_len)
    merge.run_on_host(program, launch, config.grid(merge.batch * merge.heads * merge.q_len), states)
    merge.check()


CASES = {
    "one node": dict(lens=(1000, 100, 60, 400), heads=5, split_size=64, sink=True),
    "nodes that end early": dict(lens=(2200, 64, 65), heads=3, split_size=64),
    "more nodes than lanes": dict(lens=(36_000, 300), heads=2, split_size=64),
    "ragged tokens": dict(lens=(3000, 100, 2000, 3100), heads=3, q_len=3, cu_seqlens_q=(0, 3, 5, 6, 8), split_size=256),
    "an empty sequence": dict(lens=(300, 0, 70), heads=4, split_size=32, sink=True),
}


@pytest.mark.parametrize("name", CASES)
def test_splits_are_merged(instance, name):
    rows, program = instance
    run_and_check(program, rows, PlanMerge(**CASES[name]))


def states_of(merge, folded):
    """What a planned decode leaves that has folded `folded` splits, at most, of each node from its first on.

    Partials and sums of weights of the others of those are poison. So is all that belongs to a final sequence: its mark
    has the same bits.
    """
    states = poison(torch.empty(*merge.partial_lse.shape, 2))
    values = merge.partial_out.clone()
    states[..., 0] = merge.partial_lse
    states[..., 1] = 1
    for begin, end in pairwise(merge.bounds):
        for first in range(begin, end, NODE_SPLITS):
            run = slice(first, min(first + folded, end, first + NODE_SPLITS))
            weights = (merge.partial_lse[run] - merge.partial_lse[first]).exp()
            values[first] = (weights[..., None] * merge.partial_out[run]).sum(0)
            states[first, :, 1] = weights.sum(0)
            rest = slice(run.start + 1, run.stop)
            poison(values[rest]), poison(states[rest])
            states[rest, :, 0] = -torch.inf
    for b in merge.final:
        own = slice(merge.bounds[b], merge.bounds[b + 1])
        poison(values[own]), poison(states[own])
    return values, states


@pytest.mark.parametrize("folded", [1, 2, 9, 16])
def test_a_fold_that_decode_began_is_gone_on_with(instance, folded):
    rows, program = instance
    merge = PlanMerge((2200, 64, 900, 65), heads=3, split_size=64)
    merge.final = {2}
    run_and_check(program, rows, merge, states_of(merge, folded))


def test_a_later_split_may_weigh_more_or_all(instance):
    """Log-sum-exps that rise by little and by much, and splits without keys, the first ones included.

    Each sequence is one node: an lse of 200 is stored to 2^-17, which is what weights of several nodes are off by.
    """
    rows, program = instance
    merge = PlanMerge((1000, 900, 64, 500), heads=4, split_size=64)
    steps = torch.tensor([0.0, 2.9, 3.1, 40.0, -200.0, 200.0])
    merge.partial_lse += steps[torch.randint(len(steps), merge.partial_lse.shape)]
    empty = torch.rand(merge.partial_lse.shape) < 0.3
    empty[:3, 0] = True
    merge.partial_lse[empty] = -torch.inf
    run_and_check(program, rows, merge)


FAULTS = {
    "no wait": ("    Wave::wait_for_producer();\n", "", "one node"),
    "the first node alone": (
        "for (int i = 0; i < nodes; ++i) {",
        "for (int i = 0; i < 1; ++i) {",
        "nodes that end early",
    ),
    "not divided": ("    const float own = fold.scale();\n", "    const float own = 1.0f;\n", "one node"),
    "weights of one split": ("fold.sum = word_of(at, own, NODE_SPLITS);", "fold.sum = 1.0f;", "states"),
    "weights of one split among nodes": (
        "fold.sum = lse_at(p, at, node * NODE_SPLITS)[1];",
        "fold.sum = 1.0f;",
        "states",
    ),
    "a word of no split": (" && node * NODE_SPLITS < at.splits) fold.sum", ") fold.sum", "states"),
    "a final row": ("    if (is_final(p, at, own)) return;\n", "", "states"),
    "the first split's weight for all": ("word_of(at, own, split[i])", "word_of(at, own, 0)", "one node"),
    "the first node's weights for all": ("        word = next;\n", "", "nodes that end early"),
    "lanes' first nodes alone": (
        "    for (int node = at.member + team; node < nodes; node += team) sum +=",
        "    for (int node = nodes; node < nodes; node += team) sum +=",
        "more nodes than lanes",
    ),
}


@each_of(FAULTS, "not divided", place=lambda right, *_: (KERNEL, right))
def test_a_broken_kernel_is_found(tmp_path, name):
    right, broken, case = FAULTS[name]
    own = with_a_fault(tmp_path / "csrc", KERNEL, right, broken)
    program = compiled(tmp_path, "few", own)
    if case == "states":
        merge = PlanMerge((2200, 900, 700), heads=3, split_size=64)
        merge.final = {1}
        states = states_of(merge, 16)
    else:
        merge, states = PlanMerge(**CASES[case]), None
    with pytest.raises(AssertionError):
        run_and_check(program, "few", merge, states)
