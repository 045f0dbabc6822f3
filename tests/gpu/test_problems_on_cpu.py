"""The parts of the GPU suite, on a CPU: problems do change, right results pass, wrong ones are noticed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from gpu_problems import CASES, CPU, FIRST, Problem, Recorded, only, steps, tensors, values, written
from gpu_summary import table

import mla_suite
from mla_suite import archs as arch_records
from mla_suite.core import dispatch
from mla_suite.core.op import Sample

each = pytest.mark.parametrize(("name", "sample"), CASES, ids=[f"{name}-{sample.name}" for name, sample in CASES])


@each
def test_the_definition_passes_at_other_lengths(name: str, sample: Sample) -> None:
    problem = Problem(name, sample, "reference", CPU)
    assert problem.unsupported is None
    problem.load(0)
    recorded = Recorded(problem.call, CPU)
    recorded.replay()
    results = (*problem.outputs, *written(name, problem.args))
    for turn in (1, 2):
        before = [result.clone() for result in results]
        problem.load(turn)
        recorded.replay()
        problem.check()
        assert not all(torch.equal(mine, theirs) for mine, theirs in zip(before, results, strict=True))


@pytest.mark.parametrize("sample", [sample for name, sample in CASES if name == "plan"], ids=lambda sample: sample.name)
def test_a_plan_is_right_for_its_own_device(sample: Sample) -> None:
    """The suite of a GPU asks for its plans first; their cost figures, and so their splits, are not those of a CPU."""
    for turn in (0, 1, 2):
        token = dispatch.emulated.set(arch_records.get("sm_90"))  # tensors of the CPU count as an H200's
        try:
            gpu = Problem("plan", sample, "reference", CPU)
            gpu.load(turn)
            gpu.call()
            gpu.check()
        finally:
            dispatch.emulated.reset(token)
        cpu = Problem("plan", sample, "reference", CPU)
        cpu.load(turn)
        cpu.call()
        cpu.check()
    by_costs = not cpu.kwargs["num_splits"] and not cpu.kwargs["split_size"]
    if by_costs and cpu.kwargs.get("window_left", -1) < 0:  # a window leaves too few keys for other splits
        assert not torch.equal(gpu.outputs[0], cpu.outputs[0]), "one plan for both would not show a mix-up"


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        pytest.param(name, sample, marks=[] if sample.name in taken else pytest.mark.full, id=f"{name}-{sample.name}")
        for name, sample in CASES
        for taken in ({first.name for operator, first in FIRST if operator == name},)
    ],
)
def test_an_emulated_gpu_passes_at_other_lengths(name: str, sample: Sample) -> None:
    """The same turns, computed by the machine code that an MI300X would run."""
    with mla_suite.emulate("gfx942"):
        problem = Problem(name, sample, "native", CPU)
        if problem.unsupported is not None:
            pytest.skip(problem.unsupported)
        problem.load(0)
        problem.call()
        for turn in (1, 2):
            problem.load(turn)
            problem.call()
            problem.check()


@pytest.mark.parametrize(("name", "sample"), FIRST, ids=[name for name, _ in FIRST])
def test_what_was_captured_too_early_is_noticed(name: str, sample: Sample) -> None:
    """A replay that computes with the values of the capture, and one that computes nothing."""
    problem = Problem(name, sample, "reference", CPU)
    problem.load(1)
    with pytest.raises(AssertionError):
        problem.check()
    problem.call()
    results = (*problem.outputs, *written(name, problem.args))
    early = [result.clone() for result in results]
    problem.load(2)
    for result, old in zip(results, early, strict=True):
        result.copy_(old)
    with pytest.raises(AssertionError):
        problem.check()


def test_turns_change_every_length() -> None:
    args, _ = values("decode", dict(FIRST)["decode"], 0)
    lengths = {tuple(values("decode", dict(FIRST)["decode"], turn)[0][2].tolist()) for turn in range(4)}
    assert len(lengths) == 4
    assert len(tensors(args)) == 5


def test_only_one_backend() -> None:
    (name, sample), *_ = FIRST
    args, kwargs = sample.make(CPU)
    with only("reference"):
        getattr(torch.ops.mla_suite, name)(*args, **kwargs)
    with only("native"), pytest.raises(RuntimeError, match="no backend takes this problem"):
        getattr(torch.ops.mla_suite, name)(*args, **kwargs)
    assert not dispatch._choices, "choices of either kind are forgotten"
    assert mla_suite.explain(name, *args, **kwargs)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@each
def test_values_are_made_whatever_backend_runs(name: str, sample: Sample) -> None:
    """A sample may call another operator for its plan: on the CPU, where the backend under test need not run."""
    with only("native"):
        args, kwargs = values(name, sample, 1)
    free_args, free_kwargs = values(name, sample, 1)
    assert kwargs == free_kwargs
    pairs = list(zip(tensors(args), tensors(free_args), strict=True))
    assert pairs
    assert all(torch.equal(_flat(one), _flat(other)) for one, other in pairs)
    assert not dispatch._choices, "what was chosen for making values is forgotten"


@pytest.mark.parametrize(("name", "sample"), FIRST, ids=[name for name, _ in FIRST])
def test_compiled_steps(name: str, sample: Sample) -> None:
    """The steps of test_compiled_on_gpu.py, without CUDA graphs: traced and run without Inductor."""
    problem = Problem(name, sample, "reference", CPU)
    packet, kwargs = getattr(torch.ops.mla_suite, name), problem.kwargs
    torch._dynamo.reset()
    call = torch.compile(lambda *args: packet(*args, **kwargs), fullgraph=True, backend="aot_eager")
    assert steps(problem, "reference", call) == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_the_table_counts() -> None:
    cells: dict[tuple[str, str], Counter[str]] = {
        ("decode native", "numbers"): Counter(passed=3, failed=1),
        ("decode native", "graph"): Counter(skipped=2),
        ("plan", "numbers"): Counter(passed=1),
    }
    lines = table(cells)
    assert [" ".join(line.split()) for line in lines] == [
        "decode native graph 2 refused",
        "numbers 3 ok, 1 FAILED",
        "plan numbers 1 ok",
    ]
    assert len({line.index(word) for line, word in zip(lines, ("2 ref", "3 ok", "1 ok"), strict=True)}) == 1


def test_refusals_are_sentences() -> None:
    for backend in ("native", "triton"):
        for name, sample in FIRST:
            reason: Any = Problem(name, sample, backend, CPU).unsupported
            assert reason is None or reason.startswith(name)
