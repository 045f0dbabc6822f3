"""Every operator under torch.compile with CUDA graphs, exported, and in an AOTInductor package, on a GPU.

The same on a CPU: tests/test_registry.py (tracing), tests/test_export.py (export and packages).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_problems import FIRST, Problem, moved, steps, tensors, written
from test_export import Call, WholeStep, packaged, whole_step_inputs
from torch._dynamo.utils import counters

from mla_suite.core.op import Sample

GPU = torch.device("cuda")
NAMED = pytest.mark.parametrize(("name", "sample"), FIRST, ids=[name for name, _ in FIRST])


def graphs_recorded() -> int:
    """CUDA graphs that Inductor has recorded since the last reset."""
    from torch._inductor.cudagraph_trees import get_container

    manager = get_container(torch.cuda.current_device()).tree_manager
    return 0 if manager is None else manager.new_graph_id().id


@pytest.mark.parametrize("backend", ["native", "triton"])
@NAMED
def test_reduce_overhead(name: str, sample: Sample, backend: str) -> None:
    """One graph without a break, recorded by Inductor and replayed with other values and lengths, right every time."""
    problem = Problem(name, sample, backend, GPU)
    if problem.unsupported is not None:
        pytest.skip(problem.unsupported)
    packet, kwargs = getattr(torch.ops.mla_suite, name), problem.kwargs
    for tensor in tensors(problem.args):  # caches and index tensors of a server stay where they are
        torch._dynamo.mark_static_address(tensor)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(lambda *args: packet(*args, **kwargs), fullgraph=True, mode="reduce-overhead")

    def call(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*args)

    assert steps(problem, backend, call) == 0, "a replay allocates"
    assert counters["stats"]["unique_graphs"] == 1, "compiled once"
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert graphs_recorded() > 0


@NAMED
def test_export(name: str, sample: Sample) -> None:
    """The exported program calls the operator by name and gives its numbers."""
    problem = Problem(name, sample, "native", GPU)
    program = torch.export.export(Call(problem.op, problem.kwargs), problem.args)
    args = moved(problem.args, GPU)
    problem.load(1)
    for mine, theirs in zip(tensors(args), tensors(problem.args), strict=True):
        mine.copy_(theirs)
    returned = program.module()(*args)
    wanted = Call(problem.op, problem.kwargs)(*problem.args)
    pairs = zip(
        (*tensors(returned), *written(name, args)), (*tensors(wanted), *written(name, problem.args)), strict=True
    )
    assert all(torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)) for mine, theirs in pairs)


def test_all_operators_in_a_package(tmp_path: Path) -> None:
    """AOTInductor's code runs every operator, in this process, at other values than it was made with."""
    inputs = moved(whole_step_inputs(3, 4), GPU)
    compiled = packaged(torch.export.export(WholeStep(), inputs), tmp_path)
    for seed in (0, 1):
        own, other = moved(whole_step_inputs(3, 4), GPU), moved(whole_step_inputs(3, 4), GPU)
        for pair in zip((own[0], own[6]), (other[0], other[6]), strict=True):
            for tensor in pair:
                tensor.copy_(tensor.roll(seed, 0))
        wanted = (*tensors(WholeStep()(*other)), other[3])
        got = (*tensors(compiled(*own)), own[3])
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-7)
