"""decode's own kernels on a real GPU against fp64: numbers, hostile memory, bits, streams, graphs, large caches."""

from __future__ import annotations

import random

import pytest
import torch
from decode_calls import (
    CACHE,
    COS_SIN,
    FP8,
    HALF,
    LENS,
    PLAN,
    Q_DESCALE,
    SHAPES,
    SINK,
    TABLE,
    Q,
    assert_right,
    assert_right_at_other_lengths,
    assert_same_bits,
    check,
    check_arguments,
    decode,
    decode_grid,
    hostile,
    native,
    on_cpu,
    require_kernels,
)

import mla_suite
from mla_suite.models import rope
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.metadata import Plan
from mla_suite.testing import exact_decode


@pytest.fixture(autouse=True)
def gpu(rules):
    """Plans are walked however little they save, or none of short sequences would be."""
    require_kernels()
    rules(every_plan=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_within_the_rounding_bound(shape):
    check(decode_sample(seed=len(shape), **SHAPES[shape]))


def test_random_problems():
    """200 draws over everything that the kernels take, each with a cache of its queries' type or of e4m3."""
    draw = random.Random(90)
    for number in range(200):
        heads = draw.choice((1, 2, 5, 8, 16, 24, 32, 40, 64, 96, 127, 128))
        q_len = draw.choice((1, 1, 1, 2, 3, 4, 8)) if heads <= 64 else draw.choice((1, 2))
        longest = draw.choice((1, 31, 32, 64, 100, 300, 1000, 2100))
        lens = tuple(draw.randint(0, longest) for _ in range(draw.randint(1, 6)))
        if max(lens) == 0:
            lens = (1, *lens[1:])
        split: dict = draw.choice(
            (dict(), dict(), dict(num_splits=draw.randint(1, 9)), dict(split_size=draw.choice((32, 100, 256))))
        )
        options = dict(
            page=draw.choice((1, 2, 7, 16, 32, 48, 64, 96, 128)),
            causal=draw.random() < 0.8,
            sink=draw.random() < 0.3,
            varlen=draw.random() < 0.3,
            ragged_pages=draw.random() < 0.3,
            planned=draw.random() < 0.3,
            rope=draw.choice((64, 64, 0)),
            **draw.choice(({}, {}, HALF, FP8, {"kv_format": "fp8"}, {**HALF, "kv_format": "fp8"})),
        )
        rotatable = options["rope"] == 64 and options.get("kv_format", "bf16") != "fp8"
        options["rotate"] = rotatable and draw.random() < 0.3
        try:
            check(decode_sample(lens, heads=heads, q_len=q_len, seed=number, **split, **options))
        except AssertionError as error:
            raise AssertionError(f"problem {number}: {heads=} {q_len=} {lens=} {split=} {options=}: {error}") from error


@pytest.mark.parametrize("kind", ["equal", "dominating", "rising", "falling", "large"])
def test_hard_scores(kind):
    """Rows that are all equal, one key above all others, maxima that move at every key or never, logits to +-200."""
    args, kwargs = decode_sample((300,), heads=40, q_len=2, num_splits=1).make(torch.device("cpu"))
    decode_grid.hard_scores(kind, args)
    check_arguments(args, kwargs)


@pytest.mark.parametrize("scale", [0.0, -(192**-0.5)])
def test_scales_that_are_not_positive(scale):
    args, kwargs = hostile(decode_sample((100, 7), heads=16))
    kwargs["softmax_scale"] = scale
    assert_right(*decode(args, kwargs), exact_decode(*on_cpu(args), **kwargs))


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
def test_infinite_sinks(sink):
    args, kwargs = hostile(decode_sample((100, 0), heads=16, sink=True))
    args[SINK].fill_(sink)
    assert_right(*decode(args, kwargs), exact_decode(*on_cpu(args), **kwargs))


DESCALED = {
    "whole": dict(num_splits=1, heads=40),
    "three splits, fp16": dict(num_splits=3, heads=16, **HALF),
    "a cluster exchanges P": dict(num_splits=2, heads=128, sink=True),
    "a cluster reduces O": dict(lens=(3000,), num_splits=2, heads=64),
    "many splits, fp16": dict(lens=(3000,), num_splits=32, heads=128, **HALF),
    "planned": dict(lens=(700, 100, 2063, 500), planned=True, heads=128),
    "gathered, fp16": dict(page=24, heads=16, **HALF),
    "512 wide, fp16": dict(rope=0, heads=16, **HALF),
    "un-rotated": dict(rotate=True, heads=64, num_splits=2),
    "un-rotated, gathered, fp16": dict(rotate=True, page=24, heads=16, **HALF),
    "e4m3 cache": dict(kv_format="fp8", heads=64),
    "e4m3 cache, few rows, fp16": dict(kv_format="fp8", heads=16, num_splits=3, dtype=torch.float16),
    "e4m3 queries": dict(heads=64, **FP8),
    "e4m3 queries, few rows": dict(heads=16, num_splits=3, **FP8),
}


@pytest.mark.parametrize("shape", DESCALED)
def test_a_scale_of_the_queries(shape):
    """Queries times 1e6 are infinite in fp16 and times 1e-6 lose bits. With 0 all scores are 0; NaN reaches all."""
    args, kwargs = hostile(decode_sample(**{"lens": (100, 7), **DESCALED[shape]}))
    scale = kwargs["softmax_scale"]
    for factor in (1e6, 0.3, 1e-6, 0.0):
        args[Q_DESCALE] = torch.tensor([factor], device="cuda")
        kwargs["softmax_scale"] = scale / (factor or 1.0)
        assert_right(*decode(args, kwargs), exact_decode(*on_cpu(args), **kwargs))
    args[Q_DESCALE].fill_(torch.nan)
    assert all(bool(result.isnan().all()) for result in decode(args, kwargs))


def test_strided_tensors():
    """Queries off any alignment, a cache with room between its pages, outputs within larger ones."""
    args, kwargs = hostile(decode_sample((100, 7), heads=16))
    wide = torch.zeros(2, 1, 16, 580, dtype=torch.bfloat16, device="cuda")
    wide[..., 1:577] = args[Q]
    pages = args[CACHE].shape[0]
    spaced = torch.full((pages, 65, 576), torch.nan, dtype=torch.bfloat16, device="cuda")[:, :64]
    spaced.copy_(args[CACHE])
    padded = torch.zeros(2, 3, 32, 520, dtype=torch.bfloat16, device="cuda")[:, :1, ::2, :512]
    lse = torch.zeros(2, 3, 32, device="cuda")[:, :1, :16]
    given = [wide[..., 1:577], spaced, *args[2:]]
    native(given, kwargs)
    torch.ops.mla_suite.decode.out(*given, **kwargs, out=padded, lse=lse)
    assert_right(padded, lse, exact_decode(*on_cpu(args), **kwargs))


@pytest.mark.parametrize("page", [64, 16])
@pytest.mark.parametrize("types", [{}, HALF], ids=["bf16", "fp16"])
def test_an_unrotated_cache_has_the_bits_of_a_rotated_one(types, page):
    require_kernels("sm_90")
    sample = decode_sample((700,), heads=40, q_len=2, page=page, rotate=True, num_splits=3, **types)
    args, kwargs = sample.make(torch.device("cuda"))
    unrotated = decode(args, kwargs)
    pages, cos_sin = args[TABLE][0].long(), args[COS_SIN]
    keys = args[CACHE][pages].flatten(0, 1)
    keys[:700, 512:] = rope.rotate(keys[:700, 512:], cos_sin, interleaved=False)
    args[CACHE][pages] = keys.unflatten(0, (-1, page))
    assert_same_bits([decode([*args[:COS_SIN], None, *args[COS_SIN + 1 :]], kwargs)], [unrotated])


@pytest.mark.parametrize("page", [64, 24])
def test_same_bits_every_time(page):
    for options in (dict(), dict(num_splits=7), dict(planned=True)):
        args, kwargs = hostile(decode_sample((900, 65, 130, 1500), heads=128, page=page, **options))
        first = decode(args, kwargs)
        for _ in range(20):
            again = decode(args, kwargs)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("heads", [16, 40, 128])
def test_batch_invariant_bits(heads, planned):
    """A sequence's bits in batches of 1, 5 and 64, at another place in each, with other lengths beside it."""
    args, kwargs = decode_sample((2000, *[5, 170, 333] * 21), heads=heads, split_size=256).make(torch.device("cuda"))
    kwargs["max_seqlen_kv"] = 2048

    def of(order):
        given = decode_grid.sequences(args, order)
        if planned:
            given[PLAN] = mla_suite.plan(given[LENS], num_heads=heads, max_seqlen_kv=2048, split_size=256)
        return decode(given, kwargs)

    for own in (0, 2):  # eight splits, and one
        alone = of([own])
        for batch, place in ((5, 3), (64, 40)):
            others = [b for b in range(64) if b != own]
            found = of([*others[:place], own, *others[place : batch - 1]])
            assert all(torch.equal(a[0], b[place]) for a, b in zip(alone, found, strict=True))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("types", [{}, {"kv_format": "fp8"}, FP8], ids=["bf16", "e4m3 cache", "e4m3"])
@pytest.mark.parametrize("heads", [16, 128])
def test_batch_invariant_bits_of_one_split(heads, types, sink):
    """A sequence that fits one split: alone its result needs no combine, beside a longer one it passes through it."""
    sample = decode_sample((200, 2000), heads=heads, split_size=256, sink=sink, **types)
    args, kwargs = sample.make(torch.device("cuda"))
    together = decode(args, kwargs)
    alone = decode(decode_grid.sequences(args, slice(1)), kwargs | {"max_seqlen_kv": 256})
    assert all(torch.equal(a[0], t[0]) for a, t in zip(alone, together, strict=True))


def test_two_streams():
    """Two problems of different shapes at once, each split so that it needs scratch: results have the usual bits."""
    problems = [
        hostile(decode_sample(lens, heads=heads, num_splits=9)) for lens, heads in (((3000, 700), 16), ((500,) * 8, 96))
    ]
    usual = [decode(*problem) for problem in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    found: list[list] = [[], []]
    for _ in range(40):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[index].append(decode(*problems[index]))
    torch.cuda.synchronize()
    for right, results in zip(usual, found, strict=True):
        assert all(torch.equal(a, b) for result in results for a, b in zip(right, result, strict=True))


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("types", [{}, {"kv_format": "fp8"}, FP8], ids=["bf16", "e4m3 cache", "e4m3"])
def test_a_captured_graph_replays_at_other_lengths(planned, types):
    """Captured at one set of lengths, with its plan or without; replayed at others, it is right at each."""
    args, kwargs = decode_sample((2000, 1500, 1000, 64), heads=32, q_len=2, **types).make(torch.device("cuda"))
    lens, rows = args[LENS], 64

    def step():
        plan = mla_suite.plan(lens, num_heads=rows, num_sm_parts=132, max_seqlen_kv=2000) if planned else None
        return torch.ops.mla_suite.decode(*args[:PLAN], plan, **kwargs)

    every_lengths = ((2000, 1500, 1000, 64), (2, 0, 999, 33), (1999, 1, 32, 2))
    assert_right_at_other_lengths(step, args, kwargs, every_lengths)


@pytest.mark.parametrize("others", [80, 30])
def test_a_plan_that_is_made_anew_before_each_step(others):
    """Launches overlap: what merges reads the plan while decode runs, and must find this step's. On sm_90 one kernel
    merges the rows of 81 sequences and another those of 31."""
    args, kwargs = decode_sample((3000, *[400] * others), heads=128).make(torch.device("cuda"))
    lens, few = args[LENS], torch.full_like(args[LENS], 64)
    steps = [lens.clone(), few, lens.flip(0).clamp(max=400), few]

    def step(these):
        lens.copy_(these)
        plan = mla_suite.plan(lens, num_heads=128, num_sm_parts=66, max_seqlen_kv=3000)
        return *torch.ops.mla_suite.decode(*args[:PLAN], plan, **kwargs), plan

    expected = [step(these) for these in steps]
    pieces = [Plan.read(plan).split_indptr[-1] for *_, plan in expected]
    assert pieces[0] > 0
    assert pieces[1] == 0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [step(these) for these in steps]
    for _ in range(5):
        for made in found:
            for tensor in made:
                tensor.view(torch.uint8).fill_(0xFF)
        graph.replay()
        for usual, again in zip(expected, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(usual, again, strict=True))


def test_a_plan_for_other_lengths_is_still_right():
    args, kwargs = hostile(decode_sample((700, 2100, 3, 64), heads=16, q_len=2))
    stale = torch.tensor([2000, 4, 700, 64], dtype=torch.int32, device="cuda")
    args[PLAN] = mla_suite.plan(stale, num_heads=32, num_sm_parts=132, max_seqlen_kv=2048)
    assert len(Plan.read(args[PLAN]).work_tiles) > 4, "something is split"
    assert_right(*decode(args, kwargs), exact_decode(*on_cpu(args), **kwargs))


@pytest.mark.parametrize("page", [64, 48])
def test_a_cache_beyond_2_to_the_31_elements(page):
    pages = 2**31 // (page * 576) + 100
    if torch.cuda.mem_get_info()[0] < pages * page * 576 * 2 + (1 << 30):
        pytest.skip("the GPU has no room for a cache of more than 2^31 elements")
    small, kwargs = decode_sample((700, 300), heads=16, page=page, num_splits=2).make(torch.device("cuda"))
    used = small[CACHE].shape[0]
    cache = torch.full((pages, page, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    cache[-used:] = small[CACHE]
    table = small[TABLE] + (pages - used)
    found = decode([small[Q], cache, small[LENS], table, *small[4:]], kwargs)
    usual = decode(small, kwargs)
    assert all(torch.equal(a, b) for a, b in zip(found, usual, strict=True))


@pytest.mark.parametrize("page", [4_000_064, 5_000_001], ids=["a page", "contiguous"])
@pytest.mark.parametrize("types", [("bf16", torch.bfloat16), ("fp8", torch.bfloat16)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [16, 64])
def test_a_page_of_millions_of_tokens(page, types, heads):
    """Offsets within a page pass 2^31 from 3.7 million tokens on. Keys of the last few thousand decide the result."""
    kv_format, dtype = types
    if torch.cuda.mem_get_info()[0] < page * 576 * 4 + (2 << 30):
        pytest.skip("the GPU has no room for a page of that size")
    stored = torch.bfloat16 if kv_format == "bf16" else torch.float8_e4m3fn
    cache = torch.zeros(1, page, 576, dtype=stored, device="cuda")
    last = torch.randn(3000, 576, device="cuda").to(stored)
    cache[0, page - 3000 :] = last
    q = 8 * torch.randn(1, 1, heads, 576, device="cuda", dtype=dtype)
    lens = torch.tensor([page], dtype=torch.int32, device="cuda")
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    out, lse = mla_suite.decode(q, cache, lens, table, softmax_scale=576**-0.5, kv_format=kv_format)
    scores = q[0, 0].double() @ last.double().T * 576**-0.5
    zeros = torch.tensor(page - 3000.0, dtype=torch.float64, device="cuda").log().expand(heads, 1)  # keys of zeros
    exact_lse = torch.cat((scores, zeros), 1).logsumexp(1)
    exact = (scores - exact_lse[:, None]).exp() @ last[:, :512].double()
    torch.testing.assert_close(lse[0, 0].double(), exact_lse, rtol=0, atol=1e-3)
    torch.testing.assert_close(out[0, 0].double(), exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("batch", "heads", "q_len", "kv"), [(128, 128, 1, 4096), (1, 16, 1, 8192), (32, 32, 4, 1200), (128, 16, 1, 1024)]
)
def test_production_shapes(batch, heads, q_len, kv):
    """Three sequences of the batch against fp64."""
    args, kwargs = decode_sample([kv] * batch, heads=heads, q_len=q_len).make(torch.device("cuda"))
    out, lse = decode(args, kwargs)
    some = sorted({0, batch // 2, batch - 1})
    chosen = on_cpu(decode_grid.sequences(args, some))
    assert_right(out[some], lse[some], exact_decode(*chosen, **kwargs))
