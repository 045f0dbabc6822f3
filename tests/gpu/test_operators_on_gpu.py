"""Every operator and backend on a GPU: numbers, graphs at other lengths, no waiting, no allocation, streams."""

from __future__ import annotations

import pytest
import torch
from gpu_problems import CASES, FIRST, Problem, Recorded, allocations, no_synchronisation, only, tensors

from mla_suite import testing
from mla_suite.core import register
from mla_suite.core.op import Sample

GPU = torch.device("cuda")


def each(cases: list[tuple[str, Sample]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "sample"), cases, ids=[f"{name}-{sample.name}" for name, sample in cases])


@pytest.fixture
def problem(name: str, sample: Sample, backend: str) -> Problem:
    found = Problem(name, sample, backend, GPU)
    if found.unsupported is not None:
        pytest.skip(found.unsupported)
    return found


BACKENDS = pytest.mark.parametrize("backend", ["native", "triton"])


@BACKENDS
@each(CASES)
def test_numbers(problem: Problem) -> None:
    for turn in (0, 1):
        problem.load(turn)
        problem.call()
        problem.check()


@BACKENDS
@each(CASES)
def test_a_graph_replayed_at_other_lengths(problem: Problem) -> None:
    """Captured once; values and lengths change in place; a replay allocates nothing and is right."""
    problem.load(0)
    recorded = Recorded(problem.call, GPU)
    for turn in (1, 2, 3):
        problem.load(turn)
        before = allocations()
        recorded.replay()
        assert allocations() == before
        problem.check()


@BACKENDS
@each(FIRST)
def test_the_operator_neither_waits_nor_keeps_memory(name: str, backend: str, problem: Problem) -> None:
    """A second call through torch.ops allocates its outputs and no more, and the host never waits for the GPU."""
    packet = getattr(torch.ops.mla_suite, name)
    with only(backend):
        packet(*problem.args, **problem.kwargs)
        torch.cuda.synchronize()
        before = allocations()
        with no_synchronisation():
            results = packet(*problem.args, **problem.kwargs)
        assert allocations() - before == len(tensors(results))


@BACKENDS
@each([case for case in FIRST if register.get(case[0]).outputs])
def test_outputs_of_the_caller(name: str, backend: str, problem: Problem) -> None:
    problem.load(1)
    outputs = dict(zip(problem.op.outputs, problem.outputs, strict=True))
    with only(backend):
        getattr(torch.ops.mla_suite, name).out(*problem.args, **problem.kwargs, **outputs)
        problem.check()
        torch.cuda.synchronize()
        before = allocations()
        with no_synchronisation():
            getattr(torch.ops.mla_suite, name).out(*problem.args, **problem.kwargs, **outputs)
        assert allocations() == before


@BACKENDS
@each(FIRST)
def test_two_streams_at_once(name: str, sample: Sample, backend: str, problem: Problem) -> None:
    """Two problems of one shape, forty calls each, in flight together: neither reads what is the other's."""
    pair = [problem, Problem(name, sample, backend, GPU)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for turn, one in enumerate(pair, start=1):
        one.load(turn)
    torch.cuda.synchronize()
    for _ in range(40):
        for one, stream in zip(pair, streams, strict=True):
            with torch.cuda.stream(stream):
                for output in one.outputs:
                    testing.poison(output)
                one.call()
    torch.cuda.synchronize()
    for one in pair:
        one.check()


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_graph_of_all_operators(backend: str) -> None:
    """plan, decode and the rest captured in one graph, as a step of a model is: scratch is theirs in turn."""
    problems = [Problem(name, sample, backend, GPU) for name, sample in FIRST]
    taken = [one for one in problems if one.unsupported is None]
    if not taken:
        pytest.skip(f"{backend}: {problems[0].unsupported}")
    for one in taken:
        one.load(0)

    def step() -> None:
        for one in taken:
            one.call()

    recorded = Recorded(step, GPU)
    for turn in (1, 2):
        for one in taken:
            one.load(turn)
        recorded.replay()
        for one in taken:
            one.check()
