"""Random problems of dense and sparse decode as AMD machine code, in the emulator with every check on, against fp64.

The normal run takes a few from a drawn seed; a full one (`-m full`) takes seeds 0 to 999 of decode on each arch, 0 to
299 of decode with a window or a tree of drafts, and 0 to 499 of sparse_decode. A problem that fails is named by the
call that makes it again.
"""

from __future__ import annotations

import pytest
import random_problems
from built import require_built

import mla_suite

FEW = 5
PER_TEST = 50
ARCHS = ("gfx942", "gfx950")


@pytest.fixture
def emulated(arch):
    require_built(arch)
    with mla_suite.emulate(arch):
        yield arch


@pytest.mark.parametrize("arch", ARCHS)
def test_some_dense_problems(emulated, seeded):
    for seed in range(seeded, seeded + FEW):
        random_problems.check_dense(emulated, seed)


@pytest.mark.parametrize("arch", ARCHS)
def test_some_masked_problems(emulated, seeded):
    for seed in range(seeded, seeded + FEW):
        random_problems.check_masked(emulated, seed)


@pytest.mark.parametrize("arch", ARCHS)
def test_some_sparse_problems(emulated, seeded):
    for seed in range(seeded, seeded + FEW):
        random_problems.check_sparse(emulated, seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, random_problems.DENSE, PER_TEST))
@pytest.mark.parametrize("arch", ARCHS)
def test_dense_problems(emulated, first):
    for seed in range(first, first + PER_TEST):
        random_problems.check_dense(emulated, seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, random_problems.MASKED, PER_TEST))
@pytest.mark.parametrize("arch", ARCHS)
def test_masked_problems(emulated, first):
    for seed in range(first, first + PER_TEST):
        random_problems.check_masked(emulated, seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, random_problems.SPARSE, PER_TEST))
@pytest.mark.parametrize("arch", ARCHS)
def test_sparse_problems(emulated, first):
    for seed in range(first, first + PER_TEST):
        random_problems.check_sparse(emulated, seed)


def test_a_problem_is_a_function_of_its_seed():
    first, second = (random_problems.dense("gfx942", 7) for _ in range(2))
    assert first[0][0].equal(second[0][0])
    assert first[1] == second[1]
    assert random_problems.sparse("gfx942", 7)[0][0].equal(random_problems.sparse("gfx942", 7)[0][0])
