"""plan's machine code for gfx942 and gfx950 in the emulator, every check on: the reference's words exactly."""

from __future__ import annotations

import itertools

import pytest
import torch
from backend_calls import BackendCalls
from built import require_built
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import plan as kernels
from mla_suite.archs.cdna import PLAN_WAVES
from mla_suite.archs.plan import PlanConfig
from mla_suite.core import dispatch
from mla_suite.ops.plan import PLAN, reference, samples, scheduler
from mla_suite.testing import poison

NATIVE = BackendCalls(PLAN, "native")

ARCHS = ("gfx942", "gfx950")


def record(name):
    found = archs.get(name)
    for step in ("search", "balanced", "uniform"):
        needed = PlanConfig(found, PLAN_WAVES).instance(step, batch=1)
        require_built(name, needed)
    return found


def words(args, kwargs, arch, definition=False):
    """The words of a plan for an arch in poisoned memory: those of its kernels, or the reference's."""
    made = [poison(torch.empty(o.shape, dtype=o.dtype)) for o in PLAN.specify(*args, **kwargs)]
    if definition:
        with mla_suite.emulate(arch.name):
            reference.run(None, tuple(made), PLAN.Args(*args, **kwargs))
        return made[0]
    answer = NATIVE.supports(PLAN.problem(*args, **kwargs), arch)
    assert isinstance(answer, dispatch.Supported), answer
    with mla_suite.emulate(arch.name):
        NATIVE.run(answer.config, tuple(made), *args, **kwargs)
    return made[0]


def check(args, kwargs, names=ARCHS):
    for name in names:
        expected, made = (words(args, kwargs, record(name), definition) for definition in (True, False))
        different = (made != expected).nonzero().flatten().tolist()
        assert not different, f"{name}: words {different[:8]} of {made.numel()} differ"


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def arguments(**given):
    return dict(num_heads=16, max_seqlen_q=1, num_sm_parts=132, max_seqlen_kv=0, num_splits=0, split_size=0) | given


@pytest.mark.parametrize("sample", samples.samples(), ids=lambda sample: sample.name)
def test_samples(sample):
    args, kwargs = sample.make(torch.device("cpu"))
    check(args, kwargs)
    problem = PLAN.problem(*args, **kwargs)
    choice = dispatch.choose("plan", PLAN.backends, problem, record("gfx942"), "cpu")
    assert choice.backend.name == "native", str(choice)


@pytest.mark.parametrize("split", [{}, {"num_splits": 3}, {"split_size": 128}], ids=str)
def test_windows_behind_query_tokens_of_each_sequence(split):
    """The window of 898 keys begins at a multiple of 64 for its own two query tokens, that of 5058 right before one."""
    sizes = arguments(max_seqlen_q=3, num_sm_parts=4, max_seqlen_kv=8192, window_left=512)
    check((lens(0, 898, 5058, 2), lens(0, 1, 3, 6, 7)), sizes | split)


@pytest.mark.parametrize("num_sm_parts", [1, 2, 7, 132, 304])
@pytest.mark.parametrize("batch", [1, 3, 128])
def test_balanced(batch, num_sm_parts):
    for longest, rows in ((4096, 16), (200_000, 128)):
        check(
            (torch.randint(0, longest, (batch,), dtype=torch.int32),),
            arguments(num_sm_parts=num_sm_parts, num_heads=rows),
        )


def test_the_most_sm_parts():
    check((torch.randint(0, 200_000, (3,), dtype=torch.int32),), arguments(num_sm_parts=1024, num_heads=128))


@pytest.mark.parametrize(
    "seq_lens",
    [
        lens(0),
        lens(0, 0, 0),
        lens(1),
        lens(63, 64, 65, 0, 128),
        lens(2**31 - 1),
        lens(2**31 - 1, 2**31 - 1, 5),
        lens(*[512] * 128),
        lens(*[6144] * 128),
        lens(100_000, *[64] * 300),
    ],
    ids=lambda given: f"{len(given)}x{int(given.max())}",
)
def test_balanced_edges(seq_lens):
    for rows in (1, 128, 300):
        check((seq_lens,), arguments(num_heads=rows))


@pytest.mark.parametrize("rows", [1, 128])
def test_lines_that_32_bits_just_hold_or_do_not(rows):
    """Places on a line are reckoned in 32 bits as long as (work tile + 1) times the line is no more than they hold."""
    tile = scheduler.tile_cost(rows)
    most = (2**31 - 1) // (tile + 1) - tile  # keys of one sequence
    whole = most // scheduler.SPLIT_ALIGNMENT * scheduler.SPLIT_ALIGNMENT
    for keys in (whole, whole + scheduler.SPLIT_ALIGNMENT):
        for others in ((), (1,), (70_000, 64, 0)):
            check(
                (lens(keys - sum(scheduler.round_up(other) + tile for other in others), *others),),
                arguments(num_heads=rows),
            )


@pytest.mark.parametrize("name", ARCHS)
def test_the_figures_of_sm_90(monkeypatch, name):
    """Its kernels are of the same source, and cannot run here: the emulated ones are given its figures."""

    def figures(arch, rows):
        return scheduler.scheduler_costs(archs.get("sm_90"), rows)._replace(max_dealt=0)  # test_plan_sm90_on_host.py

    for module in (kernels, reference):
        monkeypatch.setattr(module, "scheduler_costs", figures)
    monkeypatch.setattr(kernels, "numbers_and_groups", kernels.numbers_and_groups.__wrapped__)
    for seq_lens in (lens(8192), lens(*[3200] * 32), lens(*[512] * 128), torch.randint(0, 30_000, (50,)).int()):
        for rows, num_sm_parts in ((16, 132), (128, 66), (300, 33)):
            check((seq_lens,), arguments(num_heads=rows, num_sm_parts=num_sm_parts), names=(name,))
    check((lens(8192, 70, 3000),), arguments(num_splits=3), names=(name,))


@pytest.mark.parametrize("batch", [1, 3, 65, 2048])
def test_uniform(batch):
    seq_lens = torch.randint(0, 9000 if batch < 100 else 500, (batch,), dtype=torch.int32)
    seq_lens[0] = 0
    for num_splits, split_size in ((1, 0), (2, 0), (33, 0), (0, 64), (0, 100), (0, 4096)):
        for num_sm_parts in (1, 304):
            given = arguments(
                num_sm_parts=num_sm_parts,
                max_seqlen_kv=9000 if batch < 100 else 500,
                num_splits=num_splits,
                split_size=split_size,
            )
            check((seq_lens,), given, names=("gfx942",) if batch > 100 else ARCHS)


def test_lengths_beyond_the_promise_still_make_the_same_words():
    """seq_lens above max_seqlen_kv: the last split of each is open."""
    check((lens(5000, 300, 90_000),), arguments(max_seqlen_kv=1024, split_size=256, num_sm_parts=7))


def test_sequences_without_a_query_token_cost_nothing():
    cu_seqlens_q = lens(0, 1, 1, 3, 3)
    for split in (dict(), dict(num_splits=3)):
        check((lens(4000, 9000, 70, 5000), cu_seqlens_q), arguments(num_sm_parts=20, **split))


@given(
    st.lists(st.integers(0, 70_000), min_size=1, max_size=40),
    st.integers(1, 320),
    st.integers(1, 300),
    st.sampled_from(ARCHS),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_lengths(values, num_sm_parts, rows, name):
    check((lens(*values),), arguments(num_sm_parts=num_sm_parts, num_heads=rows), names=(name,))


def test_the_same_words_in_any_order_of_workgroups():
    args, kwargs = (torch.randint(0, 30_000, (33,), dtype=torch.int32),), arguments(num_sm_parts=60)
    found = []
    for order, threads in itertools.product(("forward", "reverse"), (1, 2)):
        with emulator.configured(order=order, threads=threads):
            found.append(words(args, kwargs, record("gfx950")))
    assert all(torch.equal(found[0], other) for other in found)
