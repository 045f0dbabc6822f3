"""workers: as many pieces as a device works on at a time, so that no piece of a plan waits for another."""

from __future__ import annotations

import pytest
import torch

import mla_suite
from mla_suite import launch
from mla_suite import archs as arch
from mla_suite.ops.decode import workers as module


@pytest.mark.parametrize(("name", "units"), [("gfx942", 304), ("gfx950", 256)])
def test_tiles_of_128_rows_on_amd(name: str, units: int) -> None:
    with mla_suite.emulate(name):
        found = [mla_suite.workers(torch.empty(0), rows) for rows in (1, 128, 129, 256, 128 * 1000)]
    assert found == [units, units, units // 2, units // 2, 1]


def test_tiles_of_64_rows_on_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "current_arch", lambda tensor: arch.get("sm_90"))
    assert [module.workers(torch.empty(0), rows) for rows in (16, 64, 65, 128)] == [132, 132, 66, 66]


def test_a_cpu_shares_nothing_out() -> None:
    assert mla_suite.workers(torch.empty(0), 16) == 8


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rows is 0; give q_len x heads"):
        mla_suite.workers(torch.empty(0), 0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_step_may_ask_and_plan(dynamic: bool) -> None:
    def step(seq_lens: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        rows = q.shape[1] * q.shape[2]
        return mla_suite.plan(seq_lens, num_heads=rows)

    torch._dynamo.reset()
    inputs = torch.tensor([300, 7, 0], dtype=torch.int32), torch.empty(3, 2, 16, 576)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(*inputs), step(*inputs))
