"""A decode step of the whole MLA layer on a GPU: captured, compiled, exported, packaged, without waiting or allocating.

On a CPU the same layer is held to fp64 in tests/models/test_mla.py, compiled in test_compiled_layers.py and packaged in
tests/test_export.py.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from gpu_problems import CPU, Recorded, allocations, moved, no_synchronisation, only
from test_compiled_on_gpu import graphs_recorded
from test_export import Layer, layer_inputs, packaged
from torch._dynamo.utils import counters

from mla_suite.core import dispatch, register

GPU = torch.device("cuda")
STEPS, BATCH = 4, 3
CLOSE = dict(rtol=2**-6, atol=2**-6)  # bf16 projections round once more or less when fused

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def fused() -> Layer:
    torch.manual_seed(0)
    layer = Layer()
    layer.attention.fuse()
    return layer


@pytest.fixture
def layer() -> Layer:
    return fused().to(GPU)


def begin(batch: int = BATCH) -> Inputs:
    """x, kv_cache, block_table and seq_lens on the CPU, with room for STEPS more tokens in every sequence."""
    x, kv_cache, table, lens = layer_inputs(batch)
    return x, kv_cache, table, (lens - STEPS).clamp(min=0)


def advance(inputs: Inputs, turn: int) -> None:
    """The next token: another x, one key more."""
    x, _, _, seq_lens = inputs
    generator = torch.Generator().manual_seed(turn)
    x.copy_(torch.randn(x.shape, generator=generator))
    seq_lens += 1


@pytest.fixture(scope="module")
def right() -> list[torch.Tensor]:
    """The steps' outputs on the CPU."""
    layer, inputs = fused(), begin()
    outputs = []
    for turn in range(STEPS):
        outputs.append(layer(*inputs))
        advance(inputs, turn)
    return outputs


def steps(call: object, inputs: Inputs, right: list[torch.Tensor]) -> None:
    """Every step through `call`, compared with the CPU's."""
    for turn in range(STEPS):
        torch.testing.assert_close(call(*inputs).to(CPU), right[turn], **CLOSE)  # type: ignore[operator]
        advance(inputs, turn)


def with_backend(backend: str) -> None:
    """Skips where the layer's decode has no such backend here."""
    decode = register.get("decode")
    _, kv_cache, table, lens = moved(begin(), GPU)
    q = torch.empty(BATCH, 1, 2, 576, dtype=torch.bfloat16, device=GPU)
    answer = next(each for each in decode.backends if each.name == backend).supports(
        decode.problem(q, kv_cache, lens, table, softmax_scale=1.0), dispatch.arch_of(q)
    )
    if isinstance(answer, dispatch.Unsupported):
        pytest.skip(f"decode {backend}: {answer.reason}")


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_steps_in_eager_mode(layer: Layer, right: list[torch.Tensor], backend: str) -> None:
    with_backend(backend)
    with only(backend):
        steps(layer, moved(begin(), GPU), right)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_one_graph_for_every_step(layer: Layer, right: list[torch.Tensor], backend: str) -> None:
    """Captured at the first length, replayed at the others; replays neither allocate nor wait."""
    with_backend(backend)
    inputs, out = moved(begin(), GPU), torch.empty(BATCH, 1, layer.attention.config.hidden_size, device=GPU)

    def step() -> None:
        out.copy_(layer(*inputs))

    with only(backend):
        recorded = Recorded(step, GPU)
    for turn in range(STEPS):
        before = allocations()
        with no_synchronisation():
            recorded.replay()
        assert allocations() == before
        torch.testing.assert_close(out.to(CPU, torch.bfloat16), right[turn], **CLOSE)
        advance(inputs, turn)


def test_an_eager_step_never_waits(layer: Layer) -> None:
    inputs = moved(begin(), GPU)
    layer(*inputs)
    torch.cuda.synchronize()
    with no_synchronisation():
        layer(*inputs)


def test_compiled_once_for_every_step(layer: Layer, right: list[torch.Tensor]) -> None:
    """By Inductor with CUDA graphs; benchmarks/bench_layer.py has the other modes, at a model's size."""
    inputs = moved(begin(), GPU)
    for tensor in inputs:
        torch._dynamo.mark_static_address(tensor)
    counters.clear()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")

    def call(*given: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*given).clone()

    steps(call, inputs, right)
    assert counters["stats"]["unique_graphs"] == 1, "no recompilation"
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert graphs_recorded() > 0


def test_exported_and_packaged(layer: Layer, right: list[torch.Tensor], tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    dims = {"x": {0: batch}, "kv_cache": None, "block_table": {0: batch}, "seq_lens": {0: batch}}
    program = torch.export.export(layer, moved(begin(), GPU), dynamic_shapes=dims)
    steps(program.module(), moved(begin(), GPU), right)
    compiled = packaged(program, tmp_path)
    steps(compiled, moved(begin(), GPU), right)
    another = begin(5)
    expected = fused()(*copy.deepcopy(another))
    torch.testing.assert_close(compiled(*moved(another, GPU)).to(CPU), expected, **CLOSE)
