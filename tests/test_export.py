"""torch.export and AOTInductor in this process, on the CPU.

The operators are Python: an exported program or a compiled package calls them through torch's dispatcher, so it runs
wherever Python has imported mla_suite, and not in a loader of C++ alone.
"""

import functools
import math
import os
import pathlib
import subprocess
import tempfile

import pytest
import torch
from torch.utils import _pytree as pytree

import mla_suite
from mla_suite.core import register
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, Step, cos_sin_table, slots

CPU = torch.device("cpu")
OPERATORS = register.registry().values()
# Packages here are small: the compiler's time is the test's, and precompiled headers cost more than they save.
QUICK = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}
PAGE = 16
CONFIG = MLAConfig.tiny()
# Packages of torch 2.11 and older number a dtype that they pass to an operator differently than torch does (float32
# arrives as float64), and go on without results where an operator raises.
PASSES_DTYPES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


@functools.cache
def shares_its_runtime():
    """Whether the C++ compiler that Inductor uses links libstdc++ as a shared library, as torch does."""
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory() as folder:
        source, library = pathlib.Path(folder, "a.cpp"), pathlib.Path(folder, "a.so")
        source.write_text("#include <iostream>\nvoid say() { std::cout << 1; }\n")
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
        return b"libstdc++.so.6" in library.read_bytes()


def packaged(program, folder):
    if not shares_its_runtime():
        pytest.skip(
            "the C++ compiler links libstdc++ into every library, and torch crashes on loading any package of such a "
            "one; CXX may name a compiler that links it dynamically"
        )
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "model.pt2"), inductor_configs=QUICK
    )
    return torch._inductor.aoti_load_package(path)


class Call(torch.nn.Module):
    """One operator as a module; where it writes in place, the written tensors are returned too."""

    def __init__(self, op, kwargs):
        super().__init__()
        self.packet, self.kwargs = getattr(torch.ops.mla_suite, op.name), kwargs

    def forward(self, *args):
        return self.packet(*args, **self.kwargs)


def equal(one, other):
    pairs = list(zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True))
    assert pairs
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a is not None else b is None for a, b in pairs)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_an_operator_is_exported_as_one_node(op):
    sample = op.samples()[0]
    args, kwargs = sample.make(CPU)
    program = torch.export.export(Call(op, kwargs), args)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    named = [node for node in calls if "mla_suite" in str(node.target)]
    assert len(named) == 1, program.graph
    (own, _), (other, _) = sample.make(CPU), sample.make(CPU)
    result = program.module()(*own)
    wanted = Call(op, kwargs)(*other)
    assert equal((result, own), (wanted, other)), "results, and what was written in place"


class WholeStep(torch.nn.Module):
    """Every operator in one graph: cache tokens, plan, attend densely, and sparsely in a copy, merge the two halves."""

    def forward(self, q, kv_c, k_pe, kv_cache, slot_mapping, block_table, seq_lens, indices):
        ops = torch.ops.mla_suite
        ops.append_kv(kv_c, k_pe, kv_cache, slot_mapping, kv_format="bf16")
        plan = ops.plan(seq_lens, num_heads=q.shape[2], max_seqlen_q=q.shape[1], num_sm_parts=4, max_seqlen_kv=0)
        dense, lse = ops.decode(q, kv_cache, seq_lens, block_table, plan=plan, softmax_scale=0.05)
        copy = torch.zeros_like(kv_cache)
        every = torch.arange(copy.shape[0] * copy.shape[1], device=copy.device)
        ops.convert_kv(kv_cache, copy, every, every, source_format="bf16", destination_format="bf16")
        chosen, chosen_lse = ops.sparse_decode(
            q, [copy], [indices], [None], [None], kv_formats=["bf16"], softmax_scale=0.05
        )
        halves = torch.stack((dense, chosen), 1).float().flatten(0, 1).flatten(1, 2)
        lses = torch.stack((lse, chosen_lse), 1).flatten(0, 1).flatten(1, 2)
        return mla_suite.combine(halves, lses, num_splits=2)


def whole_step_inputs(batch, width):
    generator = torch.Generator().manual_seed(batch)
    pages = batch * width + 1
    return (
        torch.randn(batch, 1, 8, 576, generator=generator).bfloat16(),
        torch.randn(batch, 512, generator=generator).bfloat16(),
        torch.randn(batch, 64, generator=generator).bfloat16(),
        torch.randn(64, PAGE, 576, generator=generator).bfloat16(),
        torch.arange(batch) * PAGE,
        torch.randperm(pages, generator=generator)[: batch * width].int().view(batch, width),
        torch.randint(1, width * PAGE, (batch,), generator=generator, dtype=torch.int32),
        torch.randint(-1, 64 * PAGE, (batch, 1, 24), generator=generator, dtype=torch.int32),
    )


@pytest.mark.full
def test_all_operators_in_a_package_at_another_batch(tmp_path):
    batch, width = torch.export.Dim("batch", min=2, max=32), torch.export.Dim("width", min=2, max=64)
    one = {0: batch}
    dims = (one, one, one, None, one, {0: batch, 1: width}, one, one)
    # A plan's size has a rounding in it; that decode's plan is long enough is then asserted when the program runs.
    program = torch.export.export(
        WholeStep(), whole_step_inputs(3, 4), dynamic_shapes=dims, prefer_deferred_runtime_asserts_over_guards=True
    )
    compiled = packaged(program, tmp_path)
    for batch, width in ((3, 4), (7, 5)):
        own, other = whole_step_inputs(batch, width), whole_step_inputs(batch, width)
        assert equal((compiled(*own), own[3]), (WholeStep()(*other), other[3]))


class Layer(torch.nn.Module):
    """A decode step of one MLA layer, positions and slots found on the device."""

    def __init__(self):
        super().__init__()
        self.attention = MLA(CONFIG, kv_format="bf16", dtype=torch.bfloat16).requires_grad_(False)
        for parameter in self.attention.parameters():
            parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
        self.register_buffer("cos_sin", cos_sin_table(CONFIG, 256), persistent=False)

    def forward(self, x, kv_cache, block_table, seq_lens):
        positions = seq_lens.long()[:, None]
        step = Step(block_table, seq_lens + 1, slots(block_table, positions, PAGE).flatten(), positions.flatten())
        return self.attention(x, kv_cache, step, self.cos_sin)


class LayerAndMerge(Layer):
    """And partial results merged beside it."""

    def forward(self, x, kv_cache, block_table, seq_lens, *partials):
        merged = mla_suite.combine(*partials, out_dtype=torch.float32) if PASSES_DTYPES else None
        return super().forward(x, kv_cache, block_table, seq_lens), merged


def layer_inputs(batch):
    generator = torch.Generator().manual_seed(batch)
    cache = PagedLatentCache(1, 24, PAGE)
    cache.layers[0].copy_(torch.randn(cache.layers[0].shape, generator=generator))
    x = torch.randn(batch, 1, CONFIG.hidden_size, generator=generator).bfloat16()
    table = torch.randperm(24, generator=generator)[: batch * 3].int().view(batch, 3)
    lens = torch.randint(3 * PAGE - 1, (batch,), generator=generator, dtype=torch.int32)
    return x, cache.layers[0], table, lens


def merging_inputs(batch):
    return *layer_inputs(batch), torch.randn(5, 8, 512), torch.randn(5, 8), torch.tensor([0, 2, 5], dtype=torch.int32)


def test_a_decode_step_of_mla(tmp_path):
    """Exported with a dynamic batch; the package writes the caller's cache in place, as the layer does, and a dtype and
    an error pass through it."""
    batch, layer = torch.export.Dim("batch", min=2, max=8), LayerAndMerge()
    dims = {"x": {0: batch}, "kv_cache": None, "block_table": {0: batch}, "seq_lens": {0: batch}}
    dims |= {"partials": (None,) * 3}
    program = torch.export.export(layer, merging_inputs(3), dynamic_shapes=dims)
    compiled = packaged(program, tmp_path)
    for size in (3, 5):
        own = merging_inputs(size)
        other, third = ((*layer_inputs(size), *own[4:]) for _ in range(2))
        wanted, merged = layer(*other)
        for given, (y, halves) in ((third, program.module()(*third)), (own, compiled(*own))):
            # bf16 projections may round once more or less when fused
            torch.testing.assert_close(y, wanted, rtol=2**-6, atol=2**-6)
            torch.testing.assert_close(given[1], other[1], rtol=2**-6, atol=2**-6)
            assert halves is None or equal(halves, merged)
        changed = (own[1] != layer_inputs(size)[1]).any(-1).sum()
        assert changed == size, "one new token per sequence"
    if PASSES_DTYPES:
        with pytest.raises(RuntimeError):
            compiled(*own[:6], torch.tensor([0, 6, 5], dtype=torch.int32))


def test_the_operators_are_named_in_the_package_not_compiled_into_it(tmp_path):
    """A loader of C++ alone would lack these: the kernels are calls to torch's dispatcher, filled by Python."""
    program = torch.export.export(WholeStep(), whole_step_inputs(3, 4))
    torch.export.save(program, tmp_path / "step.pt2")
    loaded = torch.export.load(tmp_path / "step.pt2")
    targets = {str(node.target) for node in loaded.graph.nodes if "mla_suite" in str(node.target)}
    assert {target.split(".")[1] for target in targets} == set(register.registry()), targets
    own, other = whole_step_inputs(3, 4), whole_step_inputs(3, 4)
    assert equal(loaded.module()(*own), WholeStep()(*other))
