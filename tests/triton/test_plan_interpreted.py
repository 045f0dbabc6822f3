"""plan in Triton makes the reference's plan word for word, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
from backend import CPU, run

import mla_suite
from mla_suite import archs as arch
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.core.op import Sample
from mla_suite.ops.plan import PLAN, reference
from mla_suite.ops.plan import triton as plan
from mla_suite.ops.plan.samples import sample, samples


def assert_same_words(case: Sample) -> None:
    args, kwargs = case.make(CPU)
    expected = mla_suite.plan(*args, **kwargs)
    kwargs["max_seqlen_kv"] = PLAN.seen(PLAN.Args(*args, **kwargs)).max_seqlen_kv  # rounded up, as backends get it
    (got,) = run(plan, "plan", args, kwargs)
    assert torch.equal(got, expected), case.name


@pytest.mark.parametrize("case", samples(), ids=lambda s: s.name)
def test_samples(case: Sample) -> None:
    assert_same_words(case)


@pytest.mark.parametrize("split", [{}, {"num_splits": 3}, {"split_size": 128}], ids=str)
def test_windows_behind_query_tokens_of_each_sequence(split: dict[str, int]) -> None:
    """The window of 898 keys begins at a multiple of 64 for its own two query tokens, that of 5058 right before one."""
    sizes = dict(num_heads=16, num_sm_parts=4, max_seqlen_kv=8192, max_seqlen_q=3, window_left=512, varlen=True)
    assert_same_words(sample([0, 898, 5058, 2], **sizes, **split))


def lengths(kind: str, batch: int, random: random.Random) -> list[int]:
    if kind == "equal":
        return [random.choice([0, 1, 64, 512, 4096])] * batch
    if kind == "one long":
        return [random.randrange(200)] * (batch - 1) + [100_000]
    return [random.choice([0, 1, 63, 64, 65, random.randrange(20_000)]) for _ in range(batch)]


@pytest.mark.parametrize("kind", ["equal", "one long", "ragged"])
@pytest.mark.parametrize("mode", ["balanced", "counted", "sized"])
def test_random_lengths(kind: str, mode: str) -> None:
    chance = random.Random(f"{kind} {mode}")
    for _ in range(2):
        batch, rows = chance.choice([1, 2, 3, 8, 33]), chance.choice([1, 16, 64, 128, 512])
        num_sm_parts = chance.choice([1, 2, 7, 64])
        lens = lengths(kind, batch, chance)
        split = {"balanced": {}, "counted": {"num_splits": chance.choice([1, 2, 5])}}.get(mode, {"split_size": 700})
        sizes = dict(num_heads=rows, num_sm_parts=num_sm_parts, max_seqlen_kv=max(*lens, 1))
        assert_same_words(sample(lens, varlen=chance.random() < 0.3, **sizes, **split))


@pytest.mark.parametrize("name", ["gfx942", "sm_90"])
def test_the_figures_of_an_arch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (plan, reference):
        monkeypatch.setattr(module, "current_arch", lambda tensor: arch.get(name))
    chance = random.Random(0)
    for rows, num_sm_parts, lens in ((16, 64, [8192]), (128, 15, lengths("ragged", 33, chance)), (512, 9, [9000] * 5)):
        assert_same_words(sample(lens, num_heads=rows, num_sm_parts=num_sm_parts, max_seqlen_kv=max(lens)))


def test_sequences_that_may_be_dealt_are_refused() -> None:
    """Triton keeps them in order; the definition, which does not, makes such a plan."""
    problem = PLAN.problem(
        torch.ones(33, dtype=torch.int32), num_heads=128, max_seqlen_q=1, num_sm_parts=40, max_seqlen_kv=9
    )
    answer = plan.supports(problem, arch.get("sm_90"))
    assert isinstance(answer, Unsupported)
    assert answer.reason == "33 sequences may be dealt out of order; it keeps them in order"
    assert isinstance(plan.supports(problem, arch.get("gfx942")), Supported)


def test_more_sequences_than_a_block() -> None:
    chance = random.Random(0)
    lens = [chance.randrange(300) for _ in range(2 * plan.BLOCK + 5)]
    assert_same_words(sample(lens, num_heads=16, num_sm_parts=20, max_seqlen_kv=300))
    assert_same_words(sample(lens, num_heads=16, num_sm_parts=30, max_seqlen_kv=300, num_splits=2))


def test_lengths_near_the_end_of_int32() -> None:
    assert_same_words(sample([2**31 - 1] * 9 + [2**31 - 64], num_heads=128, num_sm_parts=20, max_seqlen_kv=2**31 - 1))
    assert_same_words(sample([2**31 - 1, 5], num_heads=128, num_sm_parts=20, max_seqlen_kv=2**31 - 1, num_splits=3))


def test_lengths_that_outgrow_their_bound_have_no_more_splits_than_there_is_room_for() -> None:
    kwargs = dict(num_heads=16, max_seqlen_q=1, num_sm_parts=5, max_seqlen_kv=1024, num_splits=0, split_size=256)
    args = torch.tensor([5000, 70], dtype=torch.int32), None
    (got,) = run(plan, "plan", args, kwargs)
    expected = torch.empty_like(got)
    reference.run(None, (expected,), PLAN.Args(*args, **kwargs))
    assert torch.equal(got, expected)


def test_sequences_without_query_tokens_and_no_sequences() -> None:
    lens, cu = torch.tensor([500, 8192, 64], dtype=torch.int32), torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    sizes = dict(num_heads=16, max_seqlen_q=1, num_sm_parts=5, max_seqlen_kv=8192, split_size=0)
    for splits in (0, 2):
        for chosen, bounds in ((lens, cu), (lens[:0], None), (lens[:0], cu[:1])):
            kwargs = sizes | dict(num_splits=splits)
            expected = torch.ops.mla_suite.plan(chosen, bounds, **kwargs)
            assert torch.equal(run(plan, "plan", (chosen, bounds), kwargs)[0], expected)
