"""Random problems of dense and sparse decode as AMD machine code, in the emulator with every check on, against fp64.

The normal run takes a few from a drawn seed; a full one (`-m full`) takes seeds 0 to 999 of decode on each arch, 0 to
299 of decode with a window or a tree of drafts, 0 to 299 of extends, and 0 to 499 of sparse_decode. A problem that
fails is named by the call that makes it again.
"""

from __future__ import annotations

import pytest
import random_problems
from built import emulated

FEW = 5
PER_TEST = 50
KINDS = {
    "dense": (random_problems.check_dense, random_problems.DENSE),
    "masked": (random_problems.check_masked, random_problems.MASKED),
    "extend": (random_problems.check_extend, random_problems.EXTENDS),
    "sparse": (random_problems.check_sparse, random_problems.SPARSE),
}
"""Their checks, and how many a full run takes."""


arch = emulated()


@pytest.mark.parametrize("kind", KINDS)
def test_some_problems(arch, seeded, kind):
    check, _ = KINDS[kind]
    for seed in range(seeded, seeded + FEW):
        check(arch, seed)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "first"), [(kind, first) for kind, (_, count) in KINDS.items() for first in range(0, count, PER_TEST)]
)
def test_all_problems(arch, kind, first):
    check, _ = KINDS[kind]
    for seed in range(first, first + PER_TEST):
        check(arch, seed)


def test_a_problem_is_a_function_of_its_seed():
    first, second = (random_problems.dense("gfx942", 7) for _ in range(2))
    assert first[0][0].equal(second[0][0])
    assert first[1] == second[1]
    assert random_problems.sparse("gfx942", 7)[0][0].equal(random_problems.sparse("gfx942", 7)[0][0])
