"""Scripts as FlashMLA's documentation has them, run on our interface, against its documented formulas."""

import inspect

import numpy as np
import pytest
import torch
from backend_calls import Asked
from flash_mla_calls import Dense, check

from mla_suite.core import eager
from mla_suite.integrations import metadata_convert
from mla_suite.integrations.flash_mla import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    get_mla_metadata,
)


@pytest.mark.parametrize("form", ["holder", "arguments", "copied"])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "q_len", "page", "causal"),
    [
        ([130, 64, 1], 16, 1, 1, 64, False),
        ([130, 0, 700], 16, 1, 1, 64, True),  # varlen and zero-length
        ([300, 2, 65], 8, 1, 3, 64, True),  # MTP; two keys for three tokens
        ([300, 2], 8, 1, 2, 64, False),
        ([77, 40], 5, 1, 1, 2, True),
        ([77, 200], 16, 1, 2, 61, True),
        ([600], 128, 1, 1, 256, False),
        ([130, 0, 20], 3, 3, 1, 64, False),
        ([20], 9, 3, 4, 64, True),
        ([140, 20], 64, 2, 2, 64, False),
        ([70, 2, 0, 64], 64, 8, 4, 64, True),
        ([65, 3], 126, 3, 1, 64, True),
        ([129, 1], 128, 8, 1, 61, False),
        ([5, 300], 8, 2, 2, 1, True),
    ],
)
def test_dense_decoding_loop(lengths, heads, kv_heads, q_len, page, causal, form):
    """The loop of FlashMLA's README: metadata once, then every layer: a first call, one that is recognised, another."""
    problem = Dense(lengths, page, kv_heads=kv_heads)
    if form == "holder":
        metadata = get_mla_metadata()
    else:
        metadata = get_mla_metadata(problem.lens, q_len * heads // kv_heads, kv_heads, heads, False, None)
        assert metadata[0].shape[1] == 8
        assert metadata[1].shape == (len(lengths) * kv_heads + 1,)
    if form == "copied":
        metadata = tuple(tensor.clone() for tensor in metadata)
    for _ in range(3):
        problem.check(problem.queries(q_len, heads), *metadata, causal=causal)


def test_a_dense_call_is_recognised(monkeypatch):
    """By the metadata of the one before; else the host takes several times as long."""
    problem, holder, prepared = Dense([130, 64, 1], 64), get_mla_metadata(), []
    lookup = eager.lookup
    monkeypatch.setattr(eager, "lookup", lambda *given: prepared.append(lookup(*given)) or prepared[-1])
    for _ in range(3):
        problem.check(problem.queries(1, 16), *holder)
    assert len(prepared) == 2, "a holder's first call has nothing to recognise"
    assert all(prepared)


def test_nan_among_the_scores_is_nan_in_lse():
    """Unlike FlashMLA, which has +inf there, too; the guide for serving engineers says so."""
    problem = Dense([90, 0, 30])
    q = problem.queries()
    q[0, 0, 5] = torch.nan
    out, lse = problem.call(q)
    wrong = torch.zeros(3, 16, dtype=torch.bool)
    wrong[0, 5] = True
    assert torch.equal(lse[..., 0].isnan(), wrong)
    assert torch.equal(out[:, 0].isnan().all(-1), wrong)
    assert bool((lse[1] == torch.inf).all())


def test_older_names_of_the_arguments():
    problem = Dense([90, 5], dtype=torch.half)
    q = problem.queries()
    metadata = get_mla_metadata(cache_seqlens=problem.lens, num_heads_per_head_k=16, num_heads_k=1)
    out, lse = problem.call(q, *metadata, softmax_scale=0.1, causal=True)
    expected = problem.expected(q, True, 0.1)
    torch.testing.assert_close(out.float(), expected[0], rtol=2**-10, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)


def test_holder_outlives_its_lengths():
    """FlashMLA asks for new metadata when lengths change; here an old one is only less even."""
    problem, (holder, _) = Dense([900, 40]), get_mla_metadata()
    q = problem.queries()
    problem.call(q, holder, None)
    made = holder.tile_scheduler_metadata
    problem.lens, problem.lengths = problem.lens - 39, [861, 1]
    problem.check(q, holder)
    assert holder.have_initialized
    assert holder.tile_scheduler_metadata is made


def test_a_holder_that_is_set_back_takes_other_shapes():
    """FlashMLA looks at what the first call had only while have_initialized is True."""
    holder, _ = get_mla_metadata()
    for lengths in ([130, 7], [64, 2, 300]):
        problem = Dense(lengths)
        problem.check(problem.queries(), holder, causal=True)
        holder.have_initialized, holder.tile_scheduler_metadata, holder.num_splits = False, None, None


@pytest.mark.parametrize("selects", [False, True], ids=["dense", "sparse"])
def test_a_holder_that_was_traced_with_is_empty_for_real_tensors(selects):
    """A non-strict export leaves a plan without data in it, and sizes that the trace did not know."""
    problem, (holder, _) = Dense([130, 7]), get_mla_metadata()
    slots = (problem.table[:, :1] * 64 + torch.arange(5)).int()[:, None]
    given = problem.queries(), problem.table, problem.lens, slots

    class Layer(torch.nn.Module):
        def forward(self, q, table, lens, slots):
            indices = slots if selects else None
            return flash_mla_with_kvcache(q, problem.cache, table, lens, 512, holder, indices=indices)

    sizes = [{0: torch.export.Dim("batch")}] * 4 if selects else None
    torch.export.export(Layer(), given, dynamic_shapes=sizes, strict=False)
    if selects:
        given = tuple(tensor[:1] for tensor in given)
    found = Layer()(*given)
    holder, _ = get_mla_metadata()
    torch.testing.assert_close(found, Layer()(*given), rtol=0, atol=0)


def test_layers_that_are_traced_share_the_plan_of_the_first():
    problem, layers = Dense([130, 7]), 3

    class Step(torch.nn.Module):
        def forward(self, q, table, lens):
            holder, _ = get_mla_metadata()
            for _ in range(layers):
                out, _ = flash_mla_with_kvcache(q, problem.cache, table, lens, 512, holder)
            return out

    program = torch.export.export(Step(), (problem.queries(), problem.table, problem.lens), strict=False)
    called = [str(node.target) for node in program.graph.nodes]
    assert [name for name in called if "mla_suite.plan" in name] == ["mla_suite.plan.default"]
    assert len([name for name in called if "decode" in name]) == layers


def test_sink_in_a_dense_call():
    problem, sink = Dense([100, 0]), torch.tensor([0.5, -torch.inf, torch.inf, 3.0])
    problem.check(problem.queries(2, 4), causal=True, attn_sink=sink)


def test_precision_is_what_the_operator_is_asked_for():
    """No kernel that the CPU runs differs by it."""
    problem = Dense([90, 5])
    with Asked(torch.ops.mla_suite.decode.out, "precision", "full") as asked:
        for given in ({}, {"precision": "fp8"}, {"precision": "full"}):
            problem.call(problem.queries(), **given)
    assert asked.values == ["full", "fp8", "full"]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_no_sequences(kv_heads):
    cache, nothing = torch.zeros(1, 64, kv_heads, 576), torch.zeros(0, dtype=torch.int32)
    for metadata in (get_mla_metadata(), get_mla_metadata(nothing, 16, 1)):
        q = torch.zeros(0, 1, 16, 576)
        out, lse = flash_mla_with_kvcache(q, cache, nothing.view(0, 1), nothing, 512, *metadata, causal=True)
        assert out.shape == (0, 1, 16, 512)
        assert lse.shape == (0, 16, 1)


def test_refused_metadata():
    with pytest.raises(ValueError, match="or nothing"):
        get_mla_metadata(torch.ones(2, dtype=torch.int32))


def test_a_call_that_is_refused_leaves_the_holder_empty():
    problem, (holder, _) = Dense([70, 3, 9]), get_mla_metadata()
    q = problem.queries(1, 4)
    with pytest.raises(ValueError, match="head_dim_v is 999"):
        flash_mla_with_kvcache(q, problem.cache, problem.table, problem.lens, 999, holder)
    assert holder == get_mla_metadata()[0]
    problem.table, problem.lens = problem.table[:2], problem.lens[:2]
    problem.call(q[:2], holder)  # two sequences, not three


def test_the_older_pair_is_read_only_when_it_was_copied(monkeypatch):
    """Tensors passed on as they came need no conversion per call."""
    problem = Dense([700, 30])
    metadata, num_splits = get_mla_metadata(problem.lens, 16, 1)
    conversions, convert = [], metadata_convert.from_flash_mla
    monkeypatch.setattr(
        metadata_convert, "from_flash_mla", lambda *args, **columns: conversions.append(1) or convert(*args, **columns)
    )
    problem.call(problem.queries(), metadata, num_splits)
    assert not conversions
    problem.call(problem.queries(), metadata.clone(), num_splits)
    assert len(conversions) == 1
    metadata.copy_(get_mla_metadata(torch.tensor([30, 700]).int(), 16, 1)[0])  # as a server renews what it captured
    problem.check(problem.queries(), metadata, num_splits)
    assert len(conversions) == 2


def test_arguments_are_flash_mlas():
    """Names, order and defaults: FlashMLA's of 2026, those that sgl-flash-mla 1.0.0 adds, vLLM's `out`, our own."""
    lists = {
        flash_mla_with_kvcache: "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata "
        "num_splits=None softmax_scale=None causal=False is_fp8_kvcache=None indices=None attn_sink=None "
        "extra_k_cache=None extra_indices_in_kvcache=None topk_length=None extra_topk_length=None "
        "enable_batch_invariant=False use_legacy=False kv_format=None descale_q=None descale_k=None out=None "
        "precision=full",
        flash_mla_sparse_fwd: "q kv indices sm_scale d_v=512 attn_sink=None topk_length=None use_legacy=False "
        "return_log2_lse=None out=None enable_batch_invariant=False",
        get_mla_decoding_metadata: "seqlens_k num_q_tokens_per_head_k h_k h_q=None is_fp8_kvcache=False topk=None "
        "use_legacy=False",
    }
    for function, expected in lists.items():
        parameters = inspect.signature(function).parameters.values()
        shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        assert shown == expected.split()


def test_what_is_absent_says_so():
    from mla_suite.integrations import flash_mla
    from mla_suite.integrations.flash_mla import flash_attn_varlen_func

    with pytest.raises(NotImplementedError, match=r"flash_attn_varlen_func: this interface has no un-absorbed prefill"):
        flash_attn_varlen_func(1, causal=True)
    with pytest.raises(AttributeError, match="has no attribute 'flash_mla'"):
        flash_mla.flash_mla  # noqa: B018  the look-up is what is tested


@pytest.mark.parametrize(
    ("older", "kv_heads"), [(False, 1), (True, 1), (False, 2)], ids=["holder", "older", "KV heads"]
)
def test_dense_decode_compiles_in_one_graph(older, kv_heads):
    if older and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("dynamo of older torch (2.9 was tried) cannot walk over the words of a plan, an enumeration")

    def decode(q, cache, table, lens, *metadata):
        return flash_mla_with_kvcache(q, cache, table, lens, 512, *(metadata or get_mla_metadata()), causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True, dynamic=None if kv_heads == 1 else True, backend="aot_eager")
    for lengths in ([70, 0, 130], [5, 64, 200, 9])[: 1 if kv_heads == 1 else 2]:
        problem = Dense(lengths, kv_heads=kv_heads)
        q = problem.queries(2, 8)
        metadata = get_mla_metadata(problem.lens, 16, 1) if older else ()
        check(*compiled(q, problem.cache, problem.table, problem.lens, *metadata), problem.expected(q, True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("selects", [False, True], ids=["dense", "sparse"])
def test_backward_says_that_there_is_none(selects, compiled):
    """FlashMLA returns tensors without a gradient, so that what comes before the call learns nothing, in silence."""
    problem = Dense([130, 7])
    table, lens, indices = problem.table, problem.lens, None
    if selects:
        table, lens, indices = None, None, torch.arange(64, dtype=torch.int32).expand(2, 1, 64).contiguous()

    def call(q, *metadata):
        given = metadata or get_mla_metadata()
        return flash_mla_with_kvcache(q, problem.cache, table, lens, 512, *given, indices=indices)

    q, metadata = problem.queries().requires_grad_(), get_mla_metadata()
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else lambda q: call(q, *metadata)
    name = "sparse_decode" if selects else "decode"
    for _ in range(2):  # gradients are recorded for calls that are recognised, too
        with torch.no_grad():
            assert not any(result.requires_grad for result in run(q))
        with torch.enable_grad():
            for result in run(q):
                with pytest.raises(RuntimeError, match=f"^{name} has no backward: it is an inference operator"):
                    result.float().sum().backward(retain_graph=True)


def test_calls_in_turn_share_nothing_but_their_metadata():
    """Two problems whose calls alternate, each recognised by its metadata: results are those of a first call."""
    made = (([130, 0, 7], 1, torch.bfloat16), ([64, 2], 3, torch.bfloat16), ([9], 1, torch.half))
    problems = [(Dense(lengths, dtype=dtype), q_len, get_mla_metadata()[0]) for lengths, q_len, dtype in made]
    for _ in range(3):
        for problem, q_len, holder in problems:
            problem.check(problem.queries(q_len, 8), holder, causal=True)


def test_a_recognised_call_is_checked_as_the_first():
    """A holder of other shapes, other options and bad values are refused after any number of right calls."""
    problem, (holder, _), (other, _) = Dense([130, 7]), get_mla_metadata(), get_mla_metadata()
    q = problem.queries(1, 8)
    problem.call(torch.cat((q, q), 2), other, causal=True)
    for _ in range(3):
        problem.call(q, holder, causal=True)
    for given, options, sentence in (
        ((other,), dict(causal=True), "heads is 8 and was 16"),
        ((holder,), dict(causal=False), "causal is False and was True"),
        ((holder, problem.lens), dict(causal=True), "num_splits is given"),
        ((holder, None, None, True, 1), {}, "is_fp8_kvcache is 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            problem.call(q, *given, **options)
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\] is 900"):
        flash_mla_with_kvcache(q, problem.cache, problem.table, problem.lens + 770, 512, holder, causal=True)
    problem.check(q, holder, causal=True)


@pytest.mark.parametrize("scale", [torch.tensor(0.5), np.array(0.5)], ids=["tensor", "array"])
def test_a_scale_that_is_written_to_between_calls_counts_as_it_is(scale):
    problem = Dense([90, 5])
    q = problem.queries()
    for value in (0.5, 0.5, 0.125):
        scale[()] = value
        assert all(map(torch.equal, *(problem.call(q, softmax_scale=given) for given in (scale, value))))
