"""Documented calls of FlashMLA and AITER on a GPU: eager without waiting for it, and captured and replayed.

The right results are those of the same call on the CPU, where tests/integrations compares it with the formulas. Without
a GPU the calls run eagerly on the CPU, turn after turn, which shows that the cases themselves are sound.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_problems import Recorded, allocations, moved, no_synchronisation
from integration_calls import CALLS, TURNS, Call

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMED = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)


def fresh(call: Call) -> Call:
    return dataclasses.replace(call, kept={})


_right: dict[tuple[str, int], tuple[torch.Tensor, ...]] = {}


def right(call: Call, turn: int) -> tuple[torch.Tensor, ...]:
    """Results on the CPU, computed once for the three tests."""
    if (call.name, turn) not in _right:
        _right[call.name, turn] = call.run(call.make(turn), {})
    return _right[call.name, turn]


def check(call: Call, turn: int, got: tuple[torch.Tensor, ...]) -> None:
    """Kernels round weights to 16 bits: 2^-8 of sum(p |v|), which is below 2 here, and the output once more."""
    for mine, theirs in zip(got, right(call, turn), strict=True):
        bound = 2**-7 if theirs.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(mine.cpu().float(), theirs.float(), rtol=bound, atol=bound)


@NAMED
def test_calls_in_turn(call: Call) -> None:
    """Kept state of a call, such as the first turn's metadata, serves the turns after it."""
    call = fresh(call)
    for turn in range(TURNS):
        check(call, turn, call.run(moved(call.make(turn), PLACE), call.kept))


@NAMED
def test_no_call_waits_for_the_gpu(call: Call) -> None:
    call = fresh(call)
    given = moved(call.make(0), PLACE)
    call.run(given, call.kept)  # compiles and loads kernels
    torch.cuda.synchronize()
    with no_synchronisation():
        got = call.run(given, call.kept)
    check(call, 0, got)


@NAMED
def test_captured_and_replayed_with_other_values(call: Call) -> None:
    call = fresh(call)
    given = moved(call.make(0), PLACE)
    results: list[tuple[torch.Tensor, ...]] = []
    recorded = Recorded(lambda: results.append(call.run(given, call.kept)), PLACE)
    got = results[-1]  # the graph's
    for turn in range(TURNS):
        for name, tensor in call.make(turn).items():
            given[name].copy_(tensor)
        before = allocations()
        recorded.replay()
        torch.cuda.synchronize()
        assert allocations() == before, "a replay allocates"
        check(call, turn, got)
