"""decode under torch.compile (when it recompiles), bad input, callers' outputs, and memory."""

import contextlib
import doctest
import re
import weakref

import pytest
import torch
from backend_calls import BackendCalls
from torch import is_tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import mla_suite
from mla_suite import archs as arch
from mla_suite import kv_formats
from mla_suite.core.dispatch import Unsupported
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.metadata import Plan
from mla_suite.testing import assert_close, exact_decode

NATIVE = BackendCalls(DECODE, "native")
REFERENCE = BackendCalls(DECODE, "reference")

CPU = torch.device("cpu")
Q, CACHE, LENS, TABLE, INDPTR, INDICES, CU_SEQLENS, Q_DESCALE, KV_DESCALE, SINK, ROPE, PLAN = range(12)
Q_ROPE = 14


def problem(lens=(70, 33), width=0, **options):
    args, kwargs = decode_sample(lens, latent=16, rope=8, heads=4, page=16, **options).make(CPU)
    args = list(args)
    if width:
        args[TABLE] = torch.nn.functional.pad(args[TABLE], (0, width - args[TABLE].shape[1]), value=2**31 - 1)
    return args, kwargs


class Step:
    """A compiled step that plans and decodes; `of(...)` says how many graphs a problem added."""

    def __init__(self, plan=True, backend="aot_eager"):
        torch._dynamo.reset()
        self.counter = CompileCounterWithBackend(backend)
        self.plan = plan
        self.compiled = torch.compile(self.step, fullgraph=True, backend=self.counter)

    def step(self, args, kwargs):
        plan = None
        if self.plan:
            plan = mla_suite.plan(args[LENS], num_heads=4, num_sm_parts=6, max_seqlen_kv=4096)
        out, lse = mla_suite.decode(*args[:PLAN], plan, **kwargs)
        return out * 2, lse

    def of(self, lens, width, mark=(), **options):
        args, kwargs = problem(lens, width, **options)
        for index, dimension in mark:
            torch._dynamo.mark_dynamic(args[index], dimension)
        before = self.counter.frame_count
        out, lse = self.compiled(args, kwargs)
        eager_out, eager_lse = self.step(args, kwargs)
        assert torch.equal(out, eager_out)
        assert torch.equal(lse, eager_lse)
        return self.counter.frame_count - before


@pytest.mark.parametrize("plan", [False, True], ids=["no plan", "plan"])
def test_recompiles(plan):
    # The cache and so its page count stay as they are while a model decodes.
    step = Step(plan)
    assert step.of((70, 33), 8, pages=40) == 1
    assert step.of((71, 34), 8, pages=40) == 0  # lengths are data
    assert step.of((128, 0), 8, pages=40) == 0
    assert step.of((70, 33), 11, pages=40) <= 1  # the width changes for the first time
    assert step.of((70, 33), 23, pages=40) == 0
    assert step.of((70, 33, 5), 11, pages=40) <= 1  # the batch changes for the first time
    assert step.of((70, 33, 5, 9, 31), 23, pages=40) == 0
    assert step.of((70,), 11, pages=40) <= 1  # batch 1
    assert step.of((50,), 23, pages=40) == 0
    assert step.of((16, 3, 1), 1, pages=40) <= 1  # width 1
    assert step.of((7, 3, 1, 2), 1, pages=40) == 0


def test_no_recompile_when_the_width_is_marked():
    step = Step()
    assert step.of((70, 33), 8, mark=[(TABLE, 1)], pages=40) == 1
    for width in (11, 23, 5):
        assert step.of((70, 33), width, mark=[(TABLE, 1)], pages=40) == 0


# Bad input


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


FP8_CACHE = {CACHE: torch.zeros(9, 16, 24).to(torch.float8_e4m3fn), "kv_format": "fp8"}
BAD = [
    ({Q: torch.zeros(2, 4, 24).bfloat16()}, r"q has shape \(2, 4, 24\); it takes 4 dimensions: \[batch, q_len"),
    ({Q: torch.zeros(2, 1, 4, 24, dtype=torch.float64)}, "q is float64; it takes bfloat16, float16, float32, "),
    ({Q: torch.zeros(3, 1, 4, 24).bfloat16()}, r"q has shape \(3, 1, 4, 24\); seq_lens has 2 sequences"),
    ({Q: torch.zeros(2, 1, 4, 32).bfloat16()}, r"kv_cache has shape \(\d+, 16, 24\); kv_format 'bf16' takes"),
    ({Q: torch.zeros(2, 1, 24, 4).bfloat16().mT}, "q has strides .*; its last dimension must be contiguous"),
    (
        {CACHE: torch.zeros(9, 16, 24)},
        "kv_cache is float32; kv_format 'bf16' takes bfloat16; a cache of float32 is in kv_format fp32",
    ),
    ({CACHE: torch.zeros(9, 24).bfloat16()}, r"kv_cache has shape \(9, 24\); it takes 3 dimensions: \[num_pages"),
    (
        {CACHE: torch.zeros(9, 32, 24).bfloat16()[:, ::2]},
        "kv_cache has strides .*; tokens of kv_format 'bf16' lie exactly",
    ),
    (
        {Q_ROPE: torch.zeros(2, 1, 4, 8).bfloat16()},
        "q has rows of 24 values; beside q_rope it takes the first head_dim_v = 16",
    ),
    ({Q_ROPE: torch.zeros(2, 1, 4, 8)}, "q_rope is float32; it takes bfloat16"),
    ({Q_ROPE: torch.zeros(2, 4, 8).bfloat16()}, r"q_rope has shape \(2, 4, 8\); it takes 4 dimensions"),
    (
        {Q_ROPE: torch.zeros(2, 1, 5, 8).bfloat16()},
        r"q_rope has shape \(2, 1, 5, 8\); it takes \[2, 1, 4\] and the rope part",
    ),
    ({LENS: ints(70, 33).long()}, "seq_lens is int64; it takes int32"),
    ({LENS: ints(70, -3)}, r"seq_lens\[1\] is -3; it takes 0\.\."),
    ({LENS: ints(70, 81)}, r"seq_lens\[1\] is 81; block_table has 5 pages of 16 each"),
    ({LENS: ints(70, 33, 1)}, "q has shape .*; seq_lens has 3 sequences"),
    ({TABLE: None}, r"block_table is missing; pass exactly one of block_table or \(kv_indptr, kv_indices\)"),
    ({INDPTR: ints(0, 1, 2), INDICES: ints(0, 1)}, "block_table is given beside kv_indices; pass exactly one"),
    ({INDPTR: ints(0, 1, 2)}, "kv_indices is missing although kv_indptr is given"),
    ({TABLE: torch.zeros(3, 5).int()}, r"block_table has shape \(3, 5\); seq_lens has 2 sequences"),
    ({TABLE: torch.full((2, 5), 99, dtype=torch.int32)}, r"block_table\[0, 0\] is page 99; kv_cache has 9 pages"),
    ({TABLE: torch.full((2, 5), -1, dtype=torch.int32)}, r"block_table\[0, 0\] is page -1; kv_cache has 9 pages"),
    ({TABLE: None, INDPTR: ints(0, 9, 3), INDICES: ints(*range(9))}, r"kv_indptr is \[0, 9, 3\]; it must rise"),
    (
        {TABLE: None, INDPTR: ints(0, 4, 9), INDICES: ints(*range(9))},
        r"seq_lens\[0\] is 70; kv_indptr gives it too few",
    ),
    ({TABLE: None, INDPTR: ints(0, 5, 8), INDICES: ints(0, 1, 2, 3, 9, 5, 6, 7)}, r"kv_indices\[4\] is page 9"),
    ({CU_SEQLENS: ints(0, 1, 2)}, r"q has shape \(2, 1, 4, 24\); it takes 3 dimensions: \[tokens"),
    ({Q: torch.zeros(2, 4, 24).bfloat16(), CU_SEQLENS: ints(0, 2, 1)}, r"cu_seqlens_q is \[0, 2, 1\]; it must rise"),
    (
        {Q: torch.zeros(2, 4, 24).bfloat16(), CU_SEQLENS: ints(0, 2, 2)},
        "max_seqlen_q is 1; a sequence has 2 query tokens",
    ),
    (
        {Q: torch.zeros(2, 4, 24).bfloat16(), CU_SEQLENS: ints(0, 1, 2), "max_seqlen_q": 0},
        "max_seqlen_q is 0; pass the most query tokens of a sequence",
    ),
    ({Q_DESCALE: torch.ones(4)}, r"q_descale has shape \(4,\); it takes one value"),
    ({Q_DESCALE: torch.tensor(-0.5)}, "q_descale is -0.5; it takes a finite number, 0 or more"),
    ({Q_DESCALE: torch.tensor([torch.inf])}, "q_descale is inf; it takes a finite number"),
    ({Q_DESCALE: torch.tensor([torch.nan])}, "q_descale is nan; it takes a finite number"),
    (FP8_CACHE | {KV_DESCALE: torch.tensor([-1e-30])}, "kv_descale is -1e-30; it takes a finite number, 0 or more"),
    (FP8_CACHE | {KV_DESCALE: torch.tensor(-torch.inf)}, "kv_descale is -inf; it takes a finite number"),
    (FP8_CACHE | {KV_DESCALE: torch.tensor(torch.nan)}, "kv_descale is nan; it takes a finite number"),
    ({KV_DESCALE: torch.ones(1)}, "kv_descale was given with kv_format 'bf16'; only fp8, fp8_fnuz read one"),
    ({SINK: torch.zeros(5)}, r"attn_sink has shape \(5,\); it takes \[heads\]"),
    ({SINK: torch.zeros(4).double()}, "attn_sink is float64; it takes float32"),
    ({ROPE: torch.zeros(99, 7)}, r"rope_cos_sin has shape \(99, 7\)"),
    ({ROPE: torch.zeros(60, 8)}, "rope_cos_sin has 60 positions; the longest sequence has 70 keys"),
    ({ROPE: torch.zeros(99, 16)[:, :8]}, "rope_cos_sin has strides .*; its rows must lie side by side"),
    ({CACHE: torch.zeros(9, 0, 24).bfloat16()}, r"kv_cache has shape \(9, 0, 24\); a page holds 1 token or more"),
    (
        {
            Q: torch.zeros(2, 1, 4, 512).bfloat16(),
            CACHE: kv_formats.empty("dsv4", 9, 16),
            ROPE: torch.zeros(99, 32),
            "kv_format": "dsv4",
        },
        r"rope_cos_sin has shape \(99, 32\); it takes \[max_len, 64\]",
    ),
    ({PLAN: ints(1, 2)}, r"plan has 2 words; one for 2 sequences has at least \d+"),
    ({PLAN: torch.zeros(200).int()}, r"plan does not begin with .* pass a tensor made by mla_suite.plan"),
    ({"softmax_scale": torch.nan}, "softmax_scale is nan; it takes a finite number"),
    ({"softmax_scale": -torch.inf}, "softmax_scale is -inf; it takes a finite number"),
    ({"softmax_scale": 1e300}, r"softmax_scale is 1e\+300; it takes a finite number, at most 3.4e\+38"),
    ({"softmax_scale": 1.0, "head_dim_v": 25}, "head_dim_v is 25; it takes 1..24"),
    ({"head_dim_v": 0}, "head_dim_v is 0"),
    ({"kv_format": "fp4"}, "kv_format 'fp4' is unknown; the kv_formats are bf16, "),
    ({"kv_format": "fp8"}, "kv_cache is bfloat16; kv_format 'fp8' takes float8_e4m3fn or uint8"),
    ({"max_seqlen_kv": 50}, r"seq_lens\[0\] is 70; it takes 0..50 \(max_seqlen_kv\)"),
    ({"max_seqlen_kv": -1}, "max_seqlen_kv is -1"),
    ({"max_seqlen_kv": 2**31}, "max_seqlen_kv is 2147483648; it takes the longest length, at most 2147483647, or 0"),
    ({"max_seqlen_q": 3}, "max_seqlen_q is 3; q has 1 query tokens"),
    ({"num_splits": -2}, "num_splits is -2"),
    ({"precision": "half"}, "precision is 'half'; it takes 'full', or 'fp8' for sums in fewer bits"),
    ({"split_size": 2**31}, "split_size is 2147483648; it takes 1..2147483647 keys, or 0"),
    ({"num_splits": 2, "split_size": 64}, "pass one of the two: splits are counted or sized"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_is_refused_in_one_sentence_before_anything_is_written(change, words):
    args, kwargs = problem()
    for key, value in change.items():
        if isinstance(key, int):
            args[key] = value
        else:
            kwargs[key] = value
    with pytest.raises((ValueError, TypeError), match=words) as raised:
        mla_suite.decode(*args, **kwargs)
    assert str(raised.value).startswith(("decode: ", "kv_format "))
    assert "\n" not in str(raised.value)
    outputs = {"out": torch.full((2, 1, 4, 16), 7.0).bfloat16(), "lse": torch.full((2, 1, 4), 7.0)}
    with pytest.raises((ValueError, TypeError)):
        torch.ops.mla_suite.decode.out(*args, **kwargs, **outputs)
    assert all(bool((tensor == 7.0).all()) for tensor in outputs.values())


@pytest.mark.parametrize(
    ("made", "given", "words"),
    [
        ({"lens": [5]}, {}, "plan was made for 1 sequences; seq_lens has 2"),
        ({"num_splits": 2}, {"num_splits": 3}, "num_splits is 3; the plan was made with 2: pass that or 0"),
        ({"split_size": 64}, {"split_size": 128}, "split_size is 128; the plan was made with 64"),
        ({}, {"num_splits": 3}, "num_splits is 3; the plan was made with 0"),
    ],
)
def test_a_plan_for_something_else_is_refused(made, given, words):
    args, kwargs = problem()
    lens = ints(*made.pop("lens", [70, 33, 1][:2]))
    # A longer plan than any for one sequence, so that its size alone does not give it away.
    args[PLAN] = mla_suite.plan(lens, num_heads=4, num_sm_parts=64, max_seqlen_kv=4096, **made)
    with pytest.raises(ValueError, match=words):
        mla_suite.decode(*args, **(kwargs | given))


@pytest.mark.parametrize("turned", [32, 128])
def test_a_kernel_that_turns_the_rope_part_alone_refuses_another_width(turned):
    args, kwargs = decode_sample((70, 33)).make(CPU)
    facts = DECODE.problem(*args[:ROPE], torch.zeros(70, turned), **kwargs)
    for answer in (NATIVE.supports(facts, arch.get("gfx942")), DECODE.backends[1].supports(facts, None)):
        assert isinstance(answer, Unsupported)
        assert re.search(f"rope_cos_sin (of|rotates) {turned} values", answer.reason)


def test_an_unaligned_cache_is_refused():
    block = kv_formats.get_kv_format("dsv4").block_bytes(16)
    cache = torch.zeros(2 * block + 8, dtype=torch.uint8).as_strided((2, 16, 584), (block, 584, 1), 4)
    q, table = torch.zeros(1, 1, 4, 512).bfloat16(), torch.zeros(1, 1).int()
    with pytest.raises(ValueError, match="decode: kv_cache begins 4 bytes past a multiple of 8; .* slice whole pages"):
        mla_suite.decode(q, cache, ints(5), table, softmax_scale=1.0, kv_format="dsv4")


def test_more_splits_than_keys():
    args, kwargs = problem()
    many = mla_suite.decode(*args, **kwargs | {"num_splits": 2**31 - 1})  # empty ones cost nothing
    assert_close(*many, exact_decode(*args, **kwargs))


def test_the_reference_sums_in_full_whatever_the_precision():
    args, kwargs = problem(kv_format="fp8", dtype=torch.float8_e4m3fn)
    full, fewer = (mla_suite.decode(*args, **kwargs, precision=name) for name in ("full", "fp8"))
    assert all(map(torch.equal, full, fewer))


# Nothing to do


@pytest.mark.parametrize("plan", [False, True], ids=["", "plan"])
def test_sequences_without_query_tokens(plan):
    q, cache, lens = torch.randn(3, 4, 24), torch.randn(5, 16, 24), ints(20, 7, 0, 5)
    cu_seqlens_q, table = ints(0, 0, 2, 2, 3), torch.tensor([[4, 1], [2, 0], [9, 9], [3, 9]], dtype=torch.int32)
    args = [q, cache, lens, table, None, None, cu_seqlens_q, None, None, None, None, None]
    if plan:
        args[PLAN] = mla_suite.plan(lens, cu_seqlens_q, num_heads=8, num_sm_parts=3, max_seqlen_kv=20)
    kwargs = {"softmax_scale": 1.0, "head_dim_v": 16, "kv_format": "fp32", "max_seqlen_q": 2}
    assert_close(*mla_suite.decode(*args, **kwargs), exact_decode(*args, **kwargs))


@pytest.mark.parametrize("plan", [False, True], ids=["", "plan"])
@pytest.mark.parametrize("backend", ["reference", "gfx942", "gfx950"])
def test_query_tokens_of_no_sequence_are_not_written(backend, plan):
    """A captured step pads its packed queries so: sequences without tokens, and tokens behind the last sequence's."""
    q, cache, lens = torch.randn(8, 16, 576).bfloat16(), torch.randn(9, 64, 576).bfloat16(), ints(300, 7, 200, 0, 0)
    table, cu_seqlens_q = torch.stack([torch.randperm(9)[:5].int() for _ in lens]), ints(0, 2, 3, 6, 6, 6)
    q[6:] = torch.nan
    given = [lens, table, None, None, cu_seqlens_q, None, None, None, None]
    kwargs = {"softmax_scale": 0.05, "max_seqlen_q": 3}
    out, lse = torch.full((8, 16, 512), 7.0).bfloat16(), torch.full((8, 16), 7.0)
    emulated = contextlib.nullcontext() if backend == "reference" else mla_suite.emulate(backend)
    with emulated:
        made = mla_suite.plan(lens, cu_seqlens_q, num_heads=16, max_seqlen_q=3, num_sm_parts=7) if plan else None
        torch.ops.mla_suite.decode.out(q, cache, *given, made, **kwargs, out=out, lse=lse)
        right = mla_suite.decode(q[:6], cache, *given, made, **kwargs)
    assert torch.equal(out[:6], right[0])
    assert torch.equal(lse[:6], right[1])
    assert bool((out[6:] == 7).all())
    assert bool((lse[6:] == 7).all())


@pytest.mark.parametrize("batch", [0, 2])
def test_no_sequences_and_no_keys(batch):
    q, cache, lens = torch.zeros(batch, 1, 4, 24), torch.zeros(0, 16, 24), torch.zeros(batch, dtype=torch.int32)
    table = torch.zeros(batch, 0, dtype=torch.int32)
    for plan in (None, mla_suite.plan(lens, num_heads=4, num_sm_parts=3, max_seqlen_kv=20)):
        out, lse = mla_suite.decode(
            q, cache, lens, table, plan=plan, softmax_scale=1.0, head_dim_v=16, kv_format="fp32"
        )
        assert torch.equal(out, torch.zeros(batch, 1, 4, 16))
        assert torch.equal(lse, torch.full((batch, 1, 4), -torch.inf))


@pytest.mark.parametrize("sink", [None, torch.zeros(0)], ids=["plain", "sink"])
def test_no_heads(sink):
    args, kwargs = decode_sample((30, 7)).make(CPU)
    q = args[0][:, :, :0]
    out, lse = mla_suite.decode(q, *args[1:4], attn_sink=sink, **kwargs)
    assert (out.shape, lse.shape) == ((*q.shape[:-1], 512), q.shape[:-1])


def test_the_example_in_the_docstring_runs():
    import mla_suite.ops.decode as module

    assert doctest.testmod(module, extraglobs={"torch": torch}) == (0, 6)


# Memory


class Allocations(TorchDispatchMode):
    """The most bytes that fresh results of operators held at once, by storage, while the block ran."""

    def __init__(self):
        super().__init__()
        self.live, self.most = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage().data_ptr() for tensor in pytree.tree_leaves((args, kwargs)) if is_tensor(tensor)
        }
        for tensor in filter(is_tensor, pytree.tree_leaves(result)):
            storage = tensor.untyped_storage()
            known = {address for _, address, _ in self.live}
            if storage.data_ptr() not in given or storage.data_ptr() in known:
                self.live.append((weakref.ref(tensor), storage.data_ptr(), storage.nbytes()))
        self.live = [entry for entry in self.live if entry[0]() is not None]
        self.most = max(self.most, sum({address: size for _, address, size in self.live}.values()))
        return result


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("planned", [False, True], ids=["", "plan"])
def test_memory_is_bounded_by_the_keys_of_one_sequence(heads, planned):
    """By its bytes in the bf16 cache; partial results of splits, which scale with the rows, come on top."""
    args, kwargs = decode_sample((4096, 4000, 100), heads=heads, planned=planned).make(CPU)
    outputs = torch.empty(3, 1, heads, 512).bfloat16(), torch.empty(3, 1, heads)
    with Allocations() as allocations:
        REFERENCE.run(None, outputs, *args, **kwargs)
    partials = heads * 512 * 4 * max(len(splits) for splits in Plan.read(args[PLAN]).splits()) if planned else 0
    assert heads * 512 * 4 < allocations.most <= 4096 * 576 * 2 + 2 * partials
