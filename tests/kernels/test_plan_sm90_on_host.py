"""csrc/sm_90/plan/plan.cu, executed on a CPU with warps of 32 lanes: the definition's words exactly.

Threads are fibers in an order that a seed varies. An exchange without all lanes of a warp, two barriers at once, a word
that nobody has written, a missing barrier or griddep_wait, an address of nothing and overflows are errors
(cuda_on_host/plan). What nvcc makes of the source, and time, are not seen.
"""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from bench_flashmla import DENSE
from kernels_on_host import without
from plan_on_host import SM_90, SM_PARTS, Problem, compiled, definition, drawn, words_of_kernels
from planted import each_of, plant

from mla_suite.archs import CSRC
from mla_suite.ops.plan import reference, scheduler
from mla_suite.ops.plan.metadata import Plan


@pytest.fixture(autouse=True)
def on_sm_90(monkeypatch):
    monkeypatch.setattr(reference, "current_arch", lambda tensor: SM_90)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return compiled(tmp_path_factory.mktemp("plan"))


def check(program, problems, seed=1):
    """Returns how many plans deal sequences out of order."""
    expected = [definition(problem) for problem in problems]
    found = words_of_kernels(program, problems, [len(words) for words in expected], seed)
    assert not found.error, f"{found.error} in one of {problems}"
    dealt = 0
    for problem, words, made in zip(problems, expected, found.plans, strict=True):
        different = (words != made).nonzero()[0].tolist()
        assert not different, f"words {different[:8]} of {words.size} differ in {problem}"
        sequences = [tile[0] for tile in Plan.read(torch.from_numpy(words)).work_tiles]
        dealt += sequences != sorted(sequences)
    return dealt


def test_random_problems(program):
    draw = random.Random(0)
    assert check(program, [drawn(draw, 200) for _ in range(60)]) > 10


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_random_problems(program, seed):
    draw = random.Random(seed)
    dealt = check(program, [drawn(draw, 512) for _ in range(300)], seed)
    print(f"300 problems, {dealt} dealt out of order")


def test_ragged_rows_of_the_benchmark(program):
    problems = []
    for row in (row for row in DENSE if row.ragged):
        rows = row.heads * row.q_len
        parts = SM_90.compute_units // -(-rows // scheduler.tile_rows(SM_90))
        problems.append(Problem(row.lens, rows, parts, max_seqlen_kv=max(row.lens)))
    assert len(problems) == 4
    for seed in range(3):
        assert check(program, problems, seed) > 0


EDGES = (
    [0],
    [0] * 300,
    [6144] * 132,
    [70_000] + [100] * 180,
    [2**31 - 1, 5, 2**31 - 1] * 30,
    [2**31 - 64] * 256,
    [900] * 257,
    [64 * (i % 7) for i in range(512)],
    [5] * 2048,
)


@pytest.mark.parametrize("lens", EDGES, ids=lambda lens: f"{len(lens)}x{max(lens)}")
def test_edges(program, lens):
    check(program, [Problem(tuple(lens), rows, parts) for rows, parts in ((1, 15), (128, 66), (300, 256))])


@pytest.mark.parametrize("parts", [15, 16, 255, 256, 257])
def test_where_dealing_begins_and_ends(program, parts):
    draw = random.Random(parts)
    sizes = (128, 8192), (255, 900), (256, 900), (257, 900)
    problems = [Problem(tuple(draw.randrange(most) for _ in range(batch)), 128, parts) for batch, most in sizes]
    assert (check(program, problems) > 0) == (16 <= parts <= 256)


def test_sequences_without_a_query_token(program):
    lens, queries = (4000, 9000, 70, 5000, 800) * 20, (0, *(1 + i // 2 for i in range(100)))
    for split in ({}, {"num_splits": 3}, {"split_size": 256, "max_seqlen_kv": 9000}):
        check(program, [Problem(lens, 16, parts, queries, **split) for parts in SM_PARTS])


def test_windows(program):
    """Work tiles count keys from the origin of each sequence's window."""
    lens, queries = (4000, 9000, 70, 0, 5000, 3), (0, 1, 1, 8, 9, 12, 30)
    for split in ({}, {"num_splits": 3}, {"split_size": 256, "max_seqlen_kv": 9000}):
        for window in (0, 61, 1000, 2**31 - 1):
            check(program, [Problem(lens, 128, 33, **split, max_seqlen_q=q, window_left=window) for q in (1, 4)])
            check(program, [Problem(lens, 128, 33, queries, **split, window_left=window)])


PLAN, DEALING = "common/plan.hpp", "common/plan_dealing.hpp"
DIFFER, UNWRITTEN, NOTHING = "words differ", "has not written", "an address of nothing"
NO_BARRIER = "nobody has written|no barrier"
RACE = "nobody has written|words differ|two threads|no barrier"
FAULTS = {
    "keys counted from the window's first": (
        *("common/plan_prefix_sum.hpp", "window_origin(first_key(", "(first_key(", DIFFER),
    ),
    "a window without its query tokens": (
        *("common/visibility.hpp", "const int earlier = kv_len - q_len;", "const int earlier = kv_len;", DIFFER),
    ),
    "no barrier after prices": (
        *without(PLAN, "\n    block_sync();", before="if (lane == 0) prices[wave] = own;"),
        NO_BARRIER,
    ),
    "no barrier before turns": (
        *without(DEALING, "\n    block_sync();", before="d.longest_first[place] = left;"),
        NO_BARRIER,
    ),
    "no barrier before bins' work tiles are read": (
        *without(DEALING, "\n    block_sync();", before="d.first_tile[own] = own * whole + more;"),
        NO_BARRIER,
    ),
    "a barrier of some threads": (
        *(DEALING, "keys[own] = key;\n      block_sync();", "keys[own] = key;\n      if (own < count) block_sync();"),
        "another barrier|missing from|nobody has written",
    ),
    "an exchange of one lane": (
        PLAN,
        "if (wave > 0) return;\n    const bool exists",
        "if (thread_id() > 0) return;\n    const bool exists",
        "missing from",
    ),
    "the next lane but one": (
        *(PLAN, "from_lane_of(point, lane + 1)", "from_lane_of(point, lane + 2)", "words differ|undefined"),
    ),
    "this lane for the one before": (
        *(PLAN, "from_lane_of(point, lane - 1)", "from_lane_of(point, lane)"),
        "words differ|written|address|undefined",
    ),
    "a work tile too many": (DEALING, "i < p.work_tile_capacity", "i <= p.work_tile_capacity", NOTHING),
    "a group too few": (DEALING, "from < count && own < most", "from + group < count && own < most", RACE),
    "a thread without a bin before one with": (
        *without(DEALING, "bin.blocks += d.longest_first[first];"),
        RACE,
    ),
    "a chunk that is given up too early": (
        *(DEALING, "of_bins * p.num_sm_parts >", "2 * of_bins * p.num_sm_parts >", DIFFER),
    ),
    "a part too few": (DEALING, "part <= p.num_sm_parts", "part < p.num_sm_parts", UNWRITTEN),
    "no last row": (*without(DEALING, "p.plan[p.split_indptr + p.batch] = sizes.partial_rows;"), UNWRITTEN),
    "no wait for prices": (
        *without(PLAN, "\n    Wave::wait_for_producer();", before="p.dealt > 0, p, s.costs);"),
        "before griddep_wait",
    ),
    "equal bins at one place": (
        DEALING,
        "from + group <= own ? first + group :",
        "from + group <= own ? first :",
        RACE,
    ),
}
"""A source, what is broken there and what then stands in its place, and what a run may end with."""


@each_of(FAULTS, "no barrier before turns", place=lambda file, right, *_: (file, right))
def test_a_planted_fault_is_found(tmp_path, program, name):
    file, right, broken, expected = FAULTS[name]
    sources = tmp_path / "csrc"
    for folder in ("common", "sm_90/plan"):
        shutil.copytree(CSRC / folder, sources / folder)
    shutil.copy(CSRC / "sm_90" / "wave.hpp", sources / "sm_90")
    plant(sources / file, right, broken)
    draw = random.Random(5)
    problems = [drawn(draw, 100) for _ in range(20)]
    plans = [definition(problem) for problem in problems]
    found = words_of_kernels(compiled(tmp_path, sources), problems, [len(words) for words in plans], seconds=60)
    differ = not found.error and any((a != b).any() for a, b in zip(plans, found.plans, strict=True))
    outcome = "words differ" if differ else found.error
    print(outcome)
    assert any(what in outcome for what in expected.split("|")), outcome or "not found"
