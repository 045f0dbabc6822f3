"""plan's own kernels on a real GPU: the definition's words, on the same device, exactly."""

from __future__ import annotations

import pytest
import torch
from backend_calls import BackendCalls

import mla_suite
from mla_suite.archs.plan import FEW, MAX_SEQUENCES
from mla_suite.core import dispatch
from mla_suite.ops.plan import PLAN, scheduler
from mla_suite.testing import poison

NATIVE = BackendCalls(PLAN, "native")
REFERENCE = BackendCalls(PLAN, "reference")

DEVICE = torch.device("cuda")
NUM_SM_PARTS = (1, 2, 7, 31, 62, 66, 132, 160, 161, 321, 1024)  # of a round of warps, and one more
BATCHES = (1, 2, 31, 32, 33, 128, FEW, FEW + 1, 600, MAX_SEQUENCES)


def into(made: torch.Tensor, lens: torch.Tensor, ends: torch.Tensor | None, kwargs: dict[str, int]) -> None:
    """The native kernels' words, or a skip that names what is missing."""
    answer = NATIVE.supports(PLAN.problem(lens, ends, **kwargs), dispatch.arch_of(lens))
    if not isinstance(answer, dispatch.Supported):
        pytest.skip(str(answer))
    NATIVE.run(answer.config, (made,), lens, ends, **kwargs)


def definition(lens: torch.Tensor, ends: torch.Tensor | None, kwargs: dict[str, int]) -> torch.Tensor:
    words = poison(torch.empty(PLAN.specify(lens, ends, **kwargs)[0].shape, dtype=torch.int32, device=DEVICE))
    REFERENCE.run(None, (words,), lens, ends, **kwargs)
    return words


def check(seq_lens: list[int], *, cu_seqlens_q: list[int] | None = None, **given: int) -> None:
    """The words are those of the definition, whatever was in memory before."""
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    ends = None if cu_seqlens_q is None else torch.tensor(cu_seqlens_q, dtype=torch.int32, device=DEVICE)
    kwargs = dict(num_heads=16, max_seqlen_q=1, num_sm_parts=132, max_seqlen_kv=0, num_splits=0, split_size=0) | given
    right = definition(lens, ends, kwargs)
    for _ in range(2):
        made = poison(torch.empty_like(right))
        into(made, lens, ends, kwargs)
        different = (made != right).nonzero().flatten().tolist()
        assert not different, f"words {different[:8]} of {made.numel()} differ, {len(seq_lens)} sequences, {kwargs}"


@pytest.mark.parametrize("num_sm_parts", NUM_SM_PARTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_random_lengths(batch: int, num_sm_parts: int) -> None:
    for longest in (1, 5000, 200_000):
        check(
            torch.randint(0, longest + 1, (batch,)).tolist(),
            num_heads=(16, 128, 300)[longest % 3],
            num_sm_parts=num_sm_parts,
        )


@pytest.mark.parametrize("rows", [1, 16, 128, 4096, 10**9])
def test_lines_of_any_length(rows: int) -> None:
    """Empty, equal, one long among short ones; around what 32 bits hold, and beyond."""
    for lens in ([0], [1], [0] * 40, [63, 64, 65, 0, 128], [512] * 128, [6144] * 128, [100_000] + [64] * 300):
        check(lens, num_heads=rows)
    most = (2**31 - 1) // (scheduler.TILE_COST + 1) - scheduler.TILE_COST
    whole = most // scheduler.SPLIT_ALIGNMENT * scheduler.SPLIT_ALIGNMENT
    for keys in (whole, whole + scheduler.SPLIT_ALIGNMENT, 2 * most, 100 * most, 2**31 - 1):
        check([keys], num_heads=rows)
        check([keys - 70_000, 64, 69_000, 0], num_heads=rows, num_sm_parts=66)
    check([2**31 - 1] * 2048, num_heads=rows, num_sm_parts=1024)


def test_sequences_without_a_query_token() -> None:
    check([500, 600, 700, 800], cu_seqlens_q=[0, 2, 2, 5, 5])
    check([3000] * 300, cu_seqlens_q=torch.arange(301).div(2, rounding_mode="floor").tolist())


@pytest.mark.parametrize("batch", [1, 33, FEW + 1, MAX_SEQUENCES])
def test_equal_splits(batch: int) -> None:
    lens = torch.randint(0, 9000 if batch < 100 else 500, (batch,)).tolist()
    for splits in (dict(num_splits=1), dict(num_splits=33), dict(split_size=64), dict(split_size=4096)):
        for num_sm_parts in (1, 132, 304):
            check(lens, num_sm_parts=num_sm_parts, max_seqlen_kv=9000 if batch < 100 else 500, **splits)


def test_many_plans_behind_each_other() -> None:
    """Each begins while the one before it runs, in the same memory; the last lengths are what counts."""
    lens = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    kwargs = dict(num_heads=16, max_seqlen_q=1, num_sm_parts=132, max_seqlen_kv=0, num_splits=0, split_size=0)
    made = torch.empty_like(definition(lens, None, kwargs))
    steps = [torch.randint(0, 9000, (40,), dtype=torch.int32, device=DEVICE) for _ in range(200)]
    kept = []
    for step in steps:
        lens.copy_(step)
        into(made, lens, None, kwargs)
        kept.append(made.clone())
    for step, words in zip(steps, kept, strict=True):
        assert torch.equal(words, definition(step, None, kwargs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_plans_made_on_another_stream(dtype: torch.dtype) -> None:
    """A server's next step is planned while the one before runs, and its layers wait for the plan: the same bits."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    kv_format = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}[dtype]
    batch, width = 8, 64
    cache = torch.randn(batch * width, 64, 576, device=DEVICE).to(dtype)
    table = torch.randperm(batch * width, device=DEVICE).int().view(batch, width)
    q = torch.randn(batch, 1, 128, 576, device=DEVICE).bfloat16().to(dtype)
    options = dict(softmax_scale=0.05, kv_format=kv_format)

    def attend(lens: torch.Tensor, plan: torch.Tensor) -> list[torch.Tensor]:
        return [mla_suite.decode(q, cache, lens, table, plan=plan, **options)[0] for _ in range(3)]

    steps = [torch.randint(1, width * 64 + 1, (batch,), dtype=torch.int32, device=DEVICE) for _ in range(20)]
    right = [attend(lens, mla_suite.plan(lens, num_heads=128))[0] for lens in steps]
    torch.cuda.synchronize()
    found = []
    for lens in steps:
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)  # half a millisecond: layers that did not wait would come first
            plan = mla_suite.plan(lens, num_heads=128)
        main.wait_stream(side)
        plan.record_stream(main)
        found.append(attend(lens, plan))
    for layers, expected in zip(found, right, strict=True):
        assert all(torch.equal(out, expected) for out in layers)
