"""plan's parts: as many as a device works on at a time, so that no work tile of a plan waits for another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mla_suite
from mla_suite import archs, launch
from mla_suite.ops.plan import sm_parts
from mla_suite.ops.plan.metadata import Plan, Word


@pytest.mark.parametrize(("name", "units"), [("gfx942", 304), ("gfx950", 256)])
def test_tiles_of_128_rows_on_amd(name, units):
    with mla_suite.emulate(name):
        found = [sm_parts(torch.empty(0), rows) for rows in (1, 128, 129, 256, 128 * 1000)]
    assert found == [units, units, units // 2, units // 2, 1]


@pytest.mark.parametrize("units", [78, 114, 132, 228])
def test_tiles_of_64_rows_on_sm_90(units, monkeypatch):
    """The device says how many compute units it has: an H20 78, an H100 PCIe 114."""
    device = archs.get("sm_90").on_device(units)
    monkeypatch.setattr(launch, "current_arch", lambda tensor: device)
    assert [sm_parts(torch.empty(0), rows) for rows in (16, 64, 65, 128)] == [units, units, units // 2, units // 2]


def test_a_cpu_counts_as_eight_units():
    assert sm_parts(torch.empty(0), 16) == 8


def test_numbers_of_numpy_of_few_bits_do_not_overflow():
    heads, queries = np.uint8(128), np.uint8(2)
    seq_lens = torch.tensor([300, 7, 0], dtype=torch.int32)
    found = mla_suite.plan(seq_lens, num_heads=heads, max_seqlen_q=queries)
    assert torch.equal(found, mla_suite.plan(seq_lens, num_heads=128, max_seqlen_q=2))
    assert mla_suite.batch_invariant_split_size(heads, queries) == 1024
    assert [mla_suite.batch_invariant_split_size(rows) for rows in (1, 128, 129)] == [512, 512, 1024]


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="num_heads x max_seqlen_q is 0; both must be 1 or more"):
        mla_suite.plan(torch.ones(1, dtype=torch.int32), num_heads=0)
    with pytest.raises(ValueError, match="num_heads and max_seqlen_q are 16 and 0; both must be 1 or more"):
        mla_suite.batch_invariant_split_size(16, 0)


def test_the_public_function_asks_the_device():
    seq_lens = torch.tensor([300, 7, 0], dtype=torch.int32)
    with mla_suite.emulate("gfx942"):
        header = Plan.read(mla_suite.plan(seq_lens, num_heads=128, max_seqlen_q=2)).header
        explained = mla_suite.explain("plan", seq_lens, num_heads=128, max_seqlen_q=2)
    assert header[Word.NUM_SM_PARTS] == 152
    assert explained.problem.num_sm_parts == 152


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_step_may_plan(dynamic):
    def step(seq_lens: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return mla_suite.plan(seq_lens, num_heads=q.shape[2], max_seqlen_q=q.shape[1])

    torch._dynamo.reset()
    inputs = torch.tensor([300, 7, 0], dtype=torch.int32), torch.empty(3, 2, 16, 576)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(*inputs), step(*inputs))
