"""Plans that deal sequences out of order, which sm_90 alone makes: their source for gfx950, in the emulator.

Every word is the definition's.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_kernels import assembly

from mla_suite import archs, emulator
from mla_suite.archs import plan as native
from mla_suite.archs.plan import PlanConfig
from mla_suite.build.params import load
from mla_suite.emulator import Emulator, Memory
from mla_suite.ops.plan import PLAN, reference
from mla_suite.ops.plan.metadata import Plan
from mla_suite.testing import poison

ARCH, WAVES = "gfx950", (("search", (4, 4)), ("balanced", (8, 8)), ("uniform", (4, 4)))
SM_90 = archs.get("sm_90")
TAKEN = {"dealt": 0}  # plans that these tests found out of order


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return assembly("plan_dealing", ARCH, tmp_path_factory.mktemp("dealt"))


@pytest.fixture(autouse=True)
def figures_of_sm_90(monkeypatch):
    kept = native.scheduler_costs
    for module in (native, reference):
        monkeypatch.setattr(module, "scheduler_costs", lambda arch, rows: kept(SM_90, rows))
    monkeypatch.setattr(native, "numbers_and_groups", native.numbers_and_groups.__wrapped__)


def words(lens, rows, num_sm_parts):
    """The definition's."""
    sizes = dict(num_heads=rows, max_seqlen_q=1, num_sm_parts=num_sm_parts, max_seqlen_kv=0, num_splits=0, split_size=0)
    made = [poison(torch.empty(o.shape, dtype=o.dtype)) for o in PLAN.specify(lens, None, **sizes)]
    reference.run(None, tuple(made), PLAN.Args(lens, None, **sizes))
    return made[0]


def kernels(text, lens, rows, num_sm_parts, like):
    """Those of the two kernels, one after the other."""
    config = PlanConfig(archs.get(ARCH), WAVES)
    args = PLAN.Args(lens, None, num_heads=rows, max_seqlen_q=1, num_sm_parts=num_sm_parts, max_seqlen_kv=0)
    made = poison(torch.empty_like(like))
    places = dict(seq_lens=lens.data_ptr(), cu_seqlens_q=0, plan=made.data_ptr())
    memories = [Memory.of("seq_lens", lens, "r"), Memory.of("plan", made, "rw")]
    machine = Emulator(ARCH)
    for launch in config.spec((made,), args).launches:
        program = machine.load_text(text, launch.kernel.split("_")[1].removeprefix("step-"))
        params = load("plan").pack(**launch.numbers, **places)
        report = machine.launch(program, launch.grid, launch.threads, 0, params, memories)
        assert not report.findings, "\n".join(map(str, report.findings))
    return made


def check(text, values, rows, num_sm_parts):
    lens = torch.tensor(values, dtype=torch.int32)
    expected = words(lens, rows, num_sm_parts)
    made = kernels(text, lens, rows, num_sm_parts, expected)
    different = (made != expected).nonzero().flatten().tolist()
    assert not different, f"words {different[:8]} of {made.numel()} differ"
    sequences = [tile[0] for tile in Plan.read(made).work_tiles]
    TAKEN["dealt"] += sequences != sorted(sequences)


@pytest.mark.parametrize("num_sm_parts", [15, 16, 66, 132, 255, 256, 257])
def test_ragged(text, num_sm_parts):
    """Few and many; two to each SM part; longer than a chunk; at the sizes from which on none are dealt."""
    draw, before = random.Random(num_sm_parts), TAKEN["dealt"]
    for batch, longest, rows in ((1, 9000, 16), (8, 16384, 16), (32, 6400, 128), (128, 8192, 128), (200, 700, 300)):
        check(text, [draw.randrange(longest) for _ in range(batch)], rows, num_sm_parts)
    for batch in (256, 257):
        check(text, [draw.choice((0, 64, 900)) for _ in range(batch)], 128, num_sm_parts)
    assert (TAKEN["dealt"] > before) == (16 <= num_sm_parts <= 256)


@pytest.mark.parametrize(
    "values",
    [
        [0],
        [0] * 100,
        [512] * 128,
        [64] * 199 + [100_000],
        [2**31 - 1] * 5 + [3] * 40,
        [2**31 - 64] * 256,
        [2**30] * 100 + [2**31 - 1],
    ],
    ids=lambda values: f"{len(values)}x{max(values)}",
)
def test_edges(text, values):
    for rows, num_sm_parts in ((1, 16), (128, 66), (300, 256)):
        check(text, values, rows, num_sm_parts)


@given(
    st.lists(st.one_of(st.integers(0, 70_000), st.integers(0, 900)), min_size=1, max_size=90),
    st.integers(16, 140),
    st.integers(1, 300),
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_lengths(text, values, num_sm_parts, rows):
    check(text, values, rows, num_sm_parts)


def test_the_same_words_in_any_order_of_workgroups(text):
    lens = torch.tensor([97 * i % 3001 for i in range(150)], dtype=torch.int32)
    expected = words(lens, 128, 66)
    sequences = [tile[0] for tile in Plan.read(expected).work_tiles]
    assert sequences != sorted(sequences)
    for order, threads in itertools.product(("forward", "reverse"), (1, 2)):
        with emulator.configured(order=order, threads=threads):
            assert torch.equal(kernels(text, lens, 128, 66, expected), expected)
