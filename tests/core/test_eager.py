"""Public functions skip torch's dispatcher only where nobody could notice."""

import gc
import weakref

import numpy as np
import pytest
import torch
from observers import Functions, Marked
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_suite
from mla_suite.core import dispatch, eager, register
from mla_suite.ops.decode.samples import decode_sample

COMBINE = torch.ops.mla_suite.combine.default


def call(partial_out, partial_lse, **changes):
    return mla_suite.combine(partial_out, partial_lse, **{"num_splits": 3, "out_dtype": torch.float32, **changes})


@pytest.fixture
def partials():
    """Arguments of a call that is known and like the last, so that nothing but a listener keeps it from the short
    way."""
    made = torch.randn(6, 4, 128), torch.randn(6, 4)
    with torch.no_grad():
        for _ in range(2):
            call(*made)
        yield made


@pytest.fixture
def short(monkeypatch, partials):
    """Names of the operators whose public functions were called without the dispatcher."""
    taken, through = [], []
    slow, call_of = eager._through_dispatcher, eager.call

    def dispatched(op, *given):
        through.append(op.name)
        return slow(op, *given)

    def noted(op, tensors, options, otherwise=None):
        before = len(through)
        try:
            return call_of(op, tensors, options, otherwise)
        finally:
            if not eager.is_dynamo_compiling() and len(through) == before and otherwise is None:
                taken.append(op.name)

    monkeypatch.setattr(eager, "_through_dispatcher", dispatched)
    monkeypatch.setattr(eager, "call", noted)
    return taken


def test_a_known_call_without_listeners_takes_the_short_way(short, partials):
    right = torch.ops.mla_suite.combine(*partials, num_splits=3, out_dtype=torch.float32)
    dispatch.clear_caches()
    ways = []
    for _ in range(3):
        short.clear()
        torch.testing.assert_close(call(*partials), right, rtol=0, atol=0)
        ways.append(bool(short))
    assert ways == [False, True, True], "the first call with some metadata is the dispatcher's, with all its checks"
    with torch.inference_mode():
        out, _ = call(*partials)
    assert out.is_inference()
    assert len(short) == 2


def test_every_operator_with_a_short_way_takes_it(short):
    with torch.no_grad():
        for name, op in register.registry().items():
            args, kwargs = op.samples()[0].make(torch.device("cpu"))
            for _ in range(2):
                getattr(mla_suite, name)(*args, **kwargs)
    assert set(short) == set(register.registry())


def test_a_parameter_is_a_plain_tensor(short, partials):
    call(torch.nn.Parameter(partials[0]), partials[1])
    assert short == ["combine"]


def test_fakes_stay_fakes(short, partials):
    with FakeTensorMode() as mode:
        out, _ = call(*map(mode.from_tensor, partials))
    assert isinstance(out, torch._subclasses.FakeTensor)
    assert short == []


@pytest.mark.parametrize("strict", [False, True])
def test_export_traces_the_operator(short, partials, strict):
    class Model(torch.nn.Module):
        def forward(self, *partials):
            return call(*partials)

    program = torch.export.export(Model(), partials, strict=strict)
    assert COMBINE in [node.target for node in program.graph.nodes]
    assert short == []


def test_compile_traces_the_operator_without_a_break(short, partials):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(*partials), call(*partials), rtol=0, atol=0)
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert COMBINE in called or torch.ops.mla_suite.combine in called
    assert short == ["combine"] * 2, "of the calls outside"


def test_gradients_are_refused_as_ever(short, partials):
    needs = partials[0].clone().requires_grad_()
    with torch.enable_grad():
        out, _ = call(needs, partials[1])
        assert out.requires_grad
        with pytest.raises(RuntimeError, match="combine has no backward"):
            out.sum().backward()
        call(*partials)
    assert short == ["combine"], "of the call whose tensors ask for no gradient"
    short.clear()
    assert not call(needs, partials[1])[0].requires_grad
    assert short == ["combine"]


def test_values_that_are_yet_to_be_made_are_made(short, partials):
    sinks = torch.zeros(1), torch._neg_view(torch.tensor([-2.0])), torch._efficientzerotensor(1)
    for sink, same in zip(sinks, (sinks[0], torch.tensor([2.0]), sinks[0]), strict=True):
        want = mla_suite.combine(*partials, attn_sink=same, num_splits=3)
        short.clear()
        for _ in range(2):
            torch.testing.assert_close(mla_suite.combine(*partials, attn_sink=sink, num_splits=3), want, rtol=0, atol=0)
        assert short == (["combine"] * 2 if sink is sinks[0] else [])


def test_tensors_in_lists_are_looked_at(short):
    args, kwargs = register.registry()["sparse_decode"].samples()[2].make(torch.device("cpu"))
    q, (cache,), *rest = args
    with torch.no_grad():
        for given, taken in ((cache, 1), (torch._neg_view(-cache), 0), (cache.as_subclass(Marked), 0)):
            want = torch.ops.mla_suite.sparse_decode(q, [cache], *rest, **kwargs)
            short.clear()
            found = mla_suite.sparse_decode(q, [given], *rest, **kwargs)
            assert all(map(torch.equal, found, want))
            assert len(short) == taken
        for wrong in ((q, [[cache]]), (q, cache), ([q], [cache])):
            with pytest.raises((RuntimeError, TypeError)):
                mla_suite.sparse_decode(*wrong, *rest, **kwargs)
    assert short == []


@pytest.mark.parametrize("wrong", [3.0, "3", None])
def test_what_the_schema_refuses_is_refused_after_a_like_call_too(partials, wrong):
    with pytest.raises((RuntimeError, TypeError)):
        call(*partials, num_splits=wrong)


def test_values_are_checked_on_the_short_way_too(short):
    partial_out, partial_lse = torch.randn(6, 4, 128), torch.randn(6, 4)
    with torch.no_grad():
        for bounds, right in (([0, 2, 6], True), ([0, 3, 5], True), ([0, 9, 6], False)):
            given = partial_out, partial_lse, torch.tensor(bounds, dtype=torch.int32)
            if right:
                mla_suite.combine(*given)
            else:
                with pytest.raises(ValueError, match="split_indptr is"):
                    mla_suite.combine(*given)
    assert short == ["combine"] * 2


def test_nothing_of_a_call_is_kept():
    with torch.no_grad():
        made = torch.randn(6, 4, 128), torch.randn(6, 4)
        for _ in range(3):
            results = call(*made)
        watched = [weakref.ref(tensor) for tensor in (*made, *results)]
        del made, results
    gc.collect()
    assert [watch() for watch in watched] == [None] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_the_short_way_on_a_gpu(short, partials):
    """The same numbers as the dispatcher's way, eagerly and in a graph that was captured the short way."""
    given = [tensor.cuda() for tensor in partials]
    right = COMBINE(*given, num_splits=3, out_dtype=torch.float32)
    assert short == []
    assert all(map(torch.equal, call(*given), right))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*given)
    assert short == ["combine"] * 2
    for tensor in given:
        tensor.normal_()
    graph.replay()
    assert all(map(torch.equal, captured, COMBINE(*given, num_splits=3, out_dtype=torch.float32)))


# Ways of calling that look as if they left the fast path


@pytest.mark.parametrize("scale", [1, np.float32(1), np.float64(1), np.int64(1)])
def test_numbers_of_other_kinds_take_the_short_way(short, scale):
    """An int for a float and NumPy's numbers are what their value is; the schema's own kind is not needed."""
    args, kwargs = register.get("decode").samples()[0].make(torch.device("cpu"))
    kwargs |= {"softmax_scale": 1.0}
    with torch.no_grad():
        want = mla_suite.decode(*args, **kwargs)
        short.clear()
        for _ in range(3):
            found = mla_suite.decode(*args, **kwargs | {"softmax_scale": scale})
            assert all(map(torch.equal, found, want))
    assert short == ["decode"] * 3


@pytest.mark.parametrize("scale", [torch.tensor(0.5), np.array(0.5)], ids=["tensor", "array"])
def test_a_number_that_is_written_to_between_calls_counts_as_it_is(scale):
    args, kwargs = register.get("decode").samples()[0].make(torch.device("cpu"))
    with torch.no_grad():
        for value in (0.5, 0.5, 2.0, 0.25):
            scale[()] = value
            found = mla_suite.decode(*args, **kwargs | {"softmax_scale": scale})
            want = mla_suite.decode(*args, **kwargs | {"softmax_scale": value})
            assert all(map(torch.equal, found, want))


def test_numpys_integers_take_the_short_way(short, partials):
    want = call(*partials)
    short.clear()
    for _ in range(3):
        assert all(map(torch.equal, call(*partials, num_splits=np.int32(3)), want))
    assert short == ["combine"] * 3


def test_a_default_device_takes_the_short_way(short, partials):
    want = call(*partials)
    short.clear()
    torch.set_default_device("cpu")
    try:
        for _ in range(2):
            assert all(map(torch.equal, call(*partials), want))
        with Functions():
            call(*partials)
    finally:
        torch.set_default_device(None)
    assert short == ["combine"] * 2, "a mode on top of the default device still sees the operator"


def test_gradients_that_nobody_asks_for_take_the_short_way(short, partials):
    with torch.enable_grad():
        for _ in range(3):
            out, _ = call(*partials)
            assert not out.requires_grad
    assert short == ["combine"] * 3
    with torch.enable_grad():
        assert call(partials[0].clone().requires_grad_(), partials[1])[0].requires_grad
    assert short == ["combine"] * 3


def test_calls_through_torch_ops_are_recognised(partials):
    """A call from Inductor's code finds the prepared call that the public function's guards recognise."""
    for _ in range(3):
        COMBINE(*partials, num_splits=3, out_dtype=torch.float32)
    guards = register.get("combine").known.guards
    call(*partials)
    assert register.get("combine").known.guards is guards


def test_a_first_call_goes_past_the_dispatcher_where_it_would_be_passed_on_unchanged(monkeypatch):
    """Tensors that require a gradient, an int for a bool and a missing tensor are the dispatcher's to judge."""
    through, slow = [], eager._through_dispatcher
    monkeypatch.setattr(eager, "_through_dispatcher", lambda *given: through.append(given) or slow(*given))
    args, kwargs = decode_sample((5, 3)).make(torch.device("cpu"))
    options = {name: value for name, value in kwargs.items() if name != "causal"}

    def first(*tensors, causal=True):
        dispatch.clear_caches()
        return mla_suite.decode(*tensors, causal=causal, **options)[0]

    out = first(*args)
    assert not through
    assert torch.equal(first(*args, causal=1), out)
    assert len(through) == 1
    assert first(args[0].clone().requires_grad_(), *args[1:]).requires_grad
    assert len(through) == 2
    with pytest.raises(TypeError, match="kv_cache is None; it takes a tensor"):
        first(args[0], None, *args[2:])
    assert len(through) == 3
    dispatch.clear_caches()
