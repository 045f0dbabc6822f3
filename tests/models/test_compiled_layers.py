"""Several layers in one graph: each writes its own cache, in place, and no cache is copied on the way."""

import math
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import mla_suite
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, Step, cos_sin_table, slots

CONFIG = MLAConfig.tiny()
NUM_PAGES, PAGE = 48, 16
CACHE_ELEMENTS = NUM_PAGES * PAGE * 576
SYMBOL = re.compile(r"s\d+|u\d+")


def allocations(code, symbol=8):
    """Elements of every buffer that Inductor's code allocates; a symbolic size counts as 8, more than any here."""
    shapes = re.findall(r"empty_strided\w*\(\(([^()]*)\)", code)
    sizes = [[size for size in shape.split(",") if size.strip()] for shape in shapes]
    return [math.prod(eval(SYMBOL.sub(str(symbol), size)) for size in shape) for shape in sizes]


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(0)
    made = [MLA(CONFIG, kv_format="bf16", dtype=torch.bfloat16) for _ in range(2)]
    for layer in made:
        for parameter in layer.parameters():
            parameter.requires_grad_(False).normal_(std=1 / math.sqrt(parameter.shape[-1]))
    return made


def make_step(layers):
    table = cos_sin_table(CONFIG, 256)

    def step(x, first, second, block_table, seq_lens):
        positions = seq_lens.long()[:, None]
        where = Step(block_table, seq_lens + 1, slots(block_table, positions, PAGE).flatten(), positions.flatten())
        for layer, kv_cache in zip(layers, (first, second), strict=True):
            x = x + layer(x, kv_cache, where, table)
        return x

    return step


def problem(batch, width, num_pages=NUM_PAGES):
    """Sequences of up to `width` pages in shuffled pages; unwritten rows are NaN."""
    generator = torch.Generator().manual_seed(batch * 10 + width)
    cache = PagedLatentCache(2, num_pages, PAGE)
    pages = torch.randperm(num_pages, generator=generator)[: batch * width].int().view(batch, width)
    seq_lens = torch.randint(width * PAGE, (batch,), generator=generator, dtype=torch.int32)
    for layer in cache.layers:
        layer.fill_(torch.nan)
        for b in range(batch):
            rows = torch.arange(int(seq_lens[b]))
            layer[pages[b, rows // PAGE].long(), rows % PAGE] = torch.randn(
                len(rows), 576, generator=generator
            ).bfloat16()
    x = torch.randn(batch, 1, CONFIG.hidden_size, generator=generator).bfloat16()
    return x, *cache.layers, pages, seq_lens


def marked(inputs):
    x, _, _, pages, seq_lens = inputs
    for tensor in (x, pages, seq_lens):
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.mark_dynamic(pages, 1)
    return inputs


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_two_layers_with_batch_and_table_width_dynamic(layers, backend):
    """Traced in every run; Inductor, whose code for such a graph the next test looks at, takes whole layers in `full`
    and in the demo, which CI runs."""
    step = make_step(layers)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    if backend == "inductor":
        _, (code,) = run_and_get_code(compiled, *marked(problem(3, 2)))
        assert max(allocations(code)) < CACHE_ELEMENTS
    for batch, width in ((3, 2), (5, 4), (2, 7), (6, 2)):
        before, expected_inputs, inputs = problem(batch, width), problem(batch, width), marked(problem(batch, width))
        # Inductor keeps fp32 between fused operations where eager rounds to bf16.
        torch.testing.assert_close(compiled(*inputs), step(*expected_inputs), rtol=2e-2, atol=2e-2)
        _, _, _, pages, seq_lens = before
        page = pages.gather(1, seq_lens.long()[:, None] // PAGE)[:, 0].long()
        for number in (1, 2):
            written = (inputs[number].view(torch.int16) != before[number].view(torch.int16)).any(-1)
            assert int(written.sum()) == batch
            assert written[page, seq_lens % PAGE].all(), "every write is at its sequence's end"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def append_and_read(kv_c, k_pe, first, second, slot_mapping, seq_lens, block_table, q):
    """Two layers' appends and decodes with nothing for Inductor to fuse, so bytes can be compared."""
    outs = []
    for kv_cache in (first, second):
        mla_suite.append_kv(kv_c, k_pe, kv_cache, slot_mapping, kv_format="bf16")
        out, _ = mla_suite.decode(q, kv_cache, seq_lens, block_table, softmax_scale=0.1)
        kv_c = out[:, 0, 0]
        outs.append(out)
    return torch.stack(outs)


def operands(batch, width, num_pages=NUM_PAGES):
    _, first, second, pages, seq_lens = problem(batch, width, num_pages)
    generator = torch.Generator().manual_seed(batch)
    kv_c, k_pe = (torch.randn(batch, n, generator=generator).bfloat16() for n in (512, 64))
    q = torch.randn(batch, 1, CONFIG.num_heads, 576, generator=generator).bfloat16()
    slot_mapping = slots(pages, seq_lens.long()[:, None], PAGE).flatten()
    return [kv_c, k_pe, first, second, slot_mapping, seq_lens + 1, pages, q]


@pytest.mark.parametrize("sizes", [((3, 2, 48), (5, 4, 48), (2, 7, 48)), ((3, 2, 48), (5, 4, 31), (2, 7, 77))], ids=str)
def test_cache_bytes_equal_eager(sizes):
    """With a cache of one size, and with its number of pages dynamic, too."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(append_and_read, fullgraph=True)
    same_cache = len({num_pages for _, _, num_pages in sizes}) == 1
    for size in sizes:
        expected_inputs, inputs = operands(*size), operands(*size)
        for i, operand in enumerate(inputs):
            if not (same_cache and i in (2, 3)):
                torch._dynamo.mark_dynamic(operand, 0)
        torch._dynamo.mark_dynamic(inputs[6], 1)
        expected = append_and_read(*expected_inputs)
        assert torch.equal(compiled(*inputs), expected)
        for i in (2, 3):
            assert torch.equal(inputs[i].view(torch.int16), expected_inputs[i].view(torch.int16))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    _, codes = run_and_get_code(compiled, *inputs)
    # A symbol counts as 10000: then a buffer per sequence has fewer values than a buffer per page.
    assert max(operand[0].numel() for operand in (inputs[7], inputs[0])) < PAGE * 576
    limit = CACHE_ELEMENTS if same_cache else 10_000 * PAGE * 576
    assert max(allocations(codes[0], symbol=8 if same_cache else 10_000)) < limit


def test_the_search_for_copies_finds_one():
    """The check above can fail: a graph that does copy a cache is caught by it."""
    torch._dynamo.reset()

    def copying(first, second, block_table):
        mla_suite.append_kv(first[0, :1, :512], first[0, :1, 512:], second, block_table[:, 0], kv_format="bf16")
        return second + 1

    _, codes = run_and_get_code(
        torch.compile(copying, fullgraph=True), *operands(1, 2)[2:4], torch.zeros(1, 1, dtype=torch.int64)
    )
    assert max(allocations(codes[0])) >= CACHE_ELEMENTS


def stacked_append(stack, kv_c, k_pe, slot_mapping):
    for number in range(stack.shape[0]):
        mla_suite.append_kv(kv_c + number, k_pe, stack[number], slot_mapping, kv_format="bf16")


def stacked_operands(pages=8):
    stack = torch.zeros(3, pages, PAGE, 576, dtype=torch.bfloat16)
    return stack, torch.ones(4, 512).bfloat16(), torch.ones(4, 64).bfloat16(), torch.tensor([0, 17, 34, 50])


@pytest.mark.parametrize("how", ["dynamic=True", "pages marked", "pages change"])
def test_a_stacked_cache_sliced_in_the_graph_is_refused_with_dynamic_sizes(how):
    """Inductor would write every layer's tokens into layer 0; nothing is written instead."""
    torch._dynamo.reset()
    compiled = torch.compile(stacked_append, fullgraph=True, dynamic=True if how == "dynamic=True" else None)
    operands = stacked_operands()
    if how == "pages marked":
        torch._dynamo.mark_dynamic(operands[0], 1)
    if how == "pages change":
        compiled(*stacked_operands(pages=6))
    with pytest.raises(RuntimeError, match=r"kv_cache is a slice made inside a graph .* keep one tensor per layer"):
        compiled(*operands)
    assert not operands[0].any()


def test_slices_of_a_stacked_cache_as_graph_inputs_are_right():
    torch._dynamo.reset()

    def append(first, second, kv_c, k_pe, slot_mapping):
        mla_suite.append_kv(kv_c, k_pe, first, slot_mapping, kv_format="bf16")
        mla_suite.append_kv(kv_c + 1, k_pe, second, slot_mapping, kv_format="bf16")

    expected, got = stacked_operands(), stacked_operands()
    append(expected[0][1], expected[0][2], *expected[1:])
    torch.compile(append, fullgraph=True, dynamic=True)(got[0][1], got[0][2], *got[1:])
    assert torch.equal(got[0], expected[0])
