"""Calls skip torch's dispatcher where nobody could notice: public functions, and calls of `torch.ops.mla_suite` too."""

import gc
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from observers import Functions, Marked, Operators
from torch._inductor.utils import run_and_get_code
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mla_suite
from mla_suite.archs import decode_table
from mla_suite.core import allocation, dispatch, register

OPS = torch.ops.mla_suite
WAYS = ("public", "overload", "packet")
OPERATORS = tuple(register.registry())
WITH_OUTPUTS = tuple(name for name, op in register.registry().items() if op.outputs)
CPU = torch.device("cpu")


@pytest.fixture
def dispatched(monkeypatch):
    """Names of what went through the dispatcher."""
    through = []

    def noting(base):
        original = base.__call__

        def call(self, *args, **kwargs):
            if str(self).startswith("mla_suite"):
                through.append(str(self))
            return original(self, *args, **kwargs)

        return call

    for base in (OpOverload, OpOverloadPacket):
        monkeypatch.setattr(base, "__call__", noting(base))
    dispatch.clear_caches()
    yield through
    dispatch.clear_caches()


@pytest.fixture
def partials(dispatched):
    """Arguments of a call that is known, so that nothing but a listener keeps it from the short way."""
    given = torch.randn(6, 4, 128), torch.randn(6, 4)
    with torch.no_grad():
        for way in WAYS:
            for _ in range(2):
                merge(way)(*given)
        dispatched.clear()
        yield given


def of_way(way, name):
    """An operator as it may be called."""
    return {"public": getattr(mla_suite, name), "overload": getattr(OPS, name).default, "packet": getattr(OPS, name)}[
        way
    ]


def merge(way="public", **changes):
    return partial(of_way(way, "combine"), **{"num_splits": 3, "out_dtype": torch.float32, **changes})


def made(name):
    """(positional, keyword) arguments of an operator as its schema has them."""
    op = register.get(name)
    args, kwargs = op.samples()[0].make(CPU)
    return args, kwargs if op.defaults is None else op.defaults(*args, **kwargs)


def flat(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_known_call_skips_the_dispatcher(dispatched, name, way, grad):
    args, kwargs = made(name)
    called = of_way(way, name)
    dispatched.clear()  # making the arguments may take a plan
    with torch.set_grad_enabled(grad):
        want = [tensor.clone() for tensor in flat(called(*args, **kwargs))]
        first = dispatched[:]  # of a function's first call more is said below
        assert way == "public" or first == [str(called)], "the first call with some metadata has all checks"
        for _ in range(2):
            found = flat(called(*args, **kwargs))
            assert all(map(torch.equal, found, want))
            assert not any(tensor.requires_grad for tensor in found)
    with torch.inference_mode():
        assert all(tensor.is_inference() for tensor in flat(called(*args, **kwargs)))
    assert dispatched == first


@pytest.mark.parametrize("packet", [False, True])
@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_a_known_call_with_outputs_skips_the_dispatcher(dispatched, name, packet):
    op, (args, kwargs) = register.get(name), made(name)
    want = getattr(OPS, name).default(*args, **kwargs)
    called = getattr(OPS, name) if packet else getattr(OPS, name).out
    dispatched.clear()
    for _ in range(3):
        outputs = allocation.empty(op.specify(*args, **kwargs), CPU)
        assert called(*args, **kwargs, **dict(zip(op.outputs, outputs, strict=True))) is None
        assert all(map(torch.equal, outputs, want))
        assert all(output._version > 0 for output in outputs)
    assert dispatched == [str(called)]


def test_outputs_in_memory_of_an_argument_are_refused_after_a_like_call_too(dispatched):
    given = torch.randn(6, 4, 128), torch.randn(6, 4)
    for _ in range(2):
        OPS.combine.out(*given, num_splits=3, out=torch.empty(2, 4, 128).bfloat16(), lse=torch.empty(2, 4))
    with pytest.raises(ValueError, match="lse shares memory with partial_lse"):
        OPS.combine.out(*given, num_splits=3, out=torch.empty(2, 4, 128).bfloat16(), lse=given[1][:2])
    assert len(dispatched) == 1


def test_arguments_may_be_given_by_name_in_any_order(dispatched):
    args, kwargs = made("decode")
    names = register.get("decode").functional.arguments
    want = OPS.decode.default(*args, **kwargs)
    by_name = dict(zip(names, args, strict=False)) | kwargs
    backwards = dict(reversed(by_name.items()))
    for given in (by_name, backwards, by_name | {"rope_cos_sin": None, "split_size": 0}):
        dispatched.clear()
        assert all(map(torch.equal, OPS.decode.default(**given), want))
        assert dispatched == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"plans": None}, "plans"),
        ({"q": torch.zeros(1)}, "q"),
        ({"softmax_scale": "1"}, "softmax_scale"),
        ({"num_splits": 1.0}, "num_splits"),
        ({"num_splits": None}, "num_splits"),
    ],
)
def test_what_the_schema_refuses_is_refused_after_a_like_call_too(wrong, sentence, way):
    args, kwargs = made("decode")
    called = of_way(way, "decode")
    for _ in range(2):
        called(*args, **kwargs)
    with pytest.raises((RuntimeError, TypeError), match=sentence):
        called(*args, **kwargs | wrong)
    with pytest.raises((RuntimeError, TypeError), match="softmax_scale"):
        called(*args)


def test_a_list_that_the_caller_changes_is_looked_at_again():
    args, kwargs = made("sparse_decode")
    formats = list(kwargs.pop("kv_formats"))
    for _ in range(3):
        OPS.sparse_decode.default(*args, kv_formats=formats, **kwargs)
    formats[0] = "fp32"
    with pytest.raises(TypeError, match="kv_format 'fp32' takes float32"):
        OPS.sparse_decode.default(*args, kv_formats=formats, **kwargs)


@pytest.mark.parametrize("way", WAYS)
def test_tensors_in_lists_are_looked_at(dispatched, way):
    (q, (cache,), *rest), kwargs = register.get("sparse_decode").samples()[2].make(CPU)
    called = of_way(way, "sparse_decode")
    with torch.no_grad():
        for _ in range(2):
            want = called(q, [cache], *rest, **kwargs)
        for given in (cache, torch._neg_view(-cache), cache.as_subclass(Marked)):
            dispatched.clear()
            assert all(map(torch.equal, called(q, [given], *rest, **kwargs), want))
            assert bool(dispatched) == (given is not cache)
        for wrong in ((q, [[cache]]), (q, cache), ([q], [cache])):
            with pytest.raises((RuntimeError, TypeError)):
                called(*wrong, *rest, **kwargs)


def in_mode(mode, call, given):
    with mode():
        call(*given)


def traced(call, given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit itself
        assert "mla_suite::combine" in str(torch.jit.trace(call, given, check_trace=False).graph)


def recorded(mode, call, given):
    graph = make_fx(call, tracing_mode=mode)(*given)
    assert OPS.combine.default in [node.target for node in graph.graph.nodes]


def faked(call, given):
    with FakeTensorMode() as mode:
        assert isinstance(call(*map(mode.from_tensor, given))[0], FakeTensor)


def learned(call, given):
    with torch.enable_grad():
        assert call(given[0].clone().requires_grad_(), given[1])[0].requires_grad


def with_default_device(call):
    torch.set_default_device("cpu")
    try:
        return call()
    finally:
        torch.set_default_device(None)


OBSERVERS = {
    "dispatch mode": partial(in_mode, Operators),
    "function mode": partial(in_mode, Functions),
    "profiler": partial(in_mode, torch.profiler.profile),
    "debug mode": partial(in_mode, mla_suite.debug),
    "counted": partial(in_mode, dispatch.count_calls),
    "policy": partial(in_mode, partial(decode_table.policy, "aiter-pr3003")),
    "subclass": lambda call, given: call(*[tensor.as_subclass(Marked) for tensor in given]),
    "gradient": learned,
    "default device and a mode": lambda call, given: with_default_device(partial(in_mode, Functions, call, given)),
    "negated": lambda call, given: call(given[0], torch._neg_view(given[1])),
    "vmap": lambda call, given: torch.vmap(call)(*[torch.stack([tensor] * 2) for tensor in given]),
    "functionalize": lambda call, given: torch.func.functionalize(call)(*given),
    **{f"make_fx of {mode} tensors": partial(recorded, mode) for mode in ("real", "fake", "symbolic")},
    "trace": traced,
    "fake tensors": faked,
}


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("way", WAYS)
def test_who_could_see_the_operator_sees_it(dispatched, partials, way, observer):
    call = merge(way)
    OBSERVERS[observer](lambda *tensors: call(*tensors), partials)
    assert dispatched


def test_inductors_code_skips_the_dispatcher(dispatched):
    args, kwargs = made("decode")
    compiled = torch.compile(lambda *tensors: mla_suite.decode(*tensors, **kwargs), fullgraph=True)
    with torch.no_grad():
        want = mla_suite.decode(*args, **kwargs)
        found, (code,) = run_and_get_code(compiled, *args)
        assert "torch.ops.mla_suite.decode.default(" in code
        dispatched.clear()
        for result in (found, compiled(*args), compiled(*args)):
            assert all(map(torch.equal, result, want))
    assert dispatched == []


# Ways of calling that look as if they left the fast path


def test_plain_tensors_of_other_classes_and_modes_take_the_short_way(dispatched, partials):
    want = merge()(*partials)
    for given, call in (
        ((torch.nn.Parameter(partials[0]), partials[1]), merge()),
        (partials, merge(num_splits=np.int32(3))),
        (partials, partial(with_default_device, lambda: merge()(*partials))),
    ):
        for _ in range(3):
            assert all(map(torch.equal, call(*(given if call.func is not with_default_device else ())), want))
    assert dispatched == []


@pytest.mark.parametrize("scale", [1, np.float32(1), np.float64(1), np.int64(1)])
def test_numbers_of_other_kinds_take_the_short_way(dispatched, scale):
    args, kwargs = made("decode")
    kwargs |= {"softmax_scale": 1.0}
    with torch.no_grad():
        want = mla_suite.decode(*args, **kwargs)
        dispatched.clear()
        for _ in range(3):
            assert all(map(torch.equal, mla_suite.decode(*args, **kwargs | {"softmax_scale": scale}), want))
    assert dispatched == []


@pytest.mark.parametrize("scale", [torch.tensor(0.5), np.array(0.5)], ids=["tensor", "array"])
def test_a_number_that_is_written_to_between_calls_counts_as_it_is(scale):
    args, kwargs = made("decode")
    with torch.no_grad():
        for value in (0.5, 0.5, 2.0, 0.25):
            scale[()] = value
            found = mla_suite.decode(*args, **kwargs | {"softmax_scale": scale})
            want = mla_suite.decode(*args, **kwargs | {"softmax_scale": value})
            assert all(map(torch.equal, found, want))


def test_values_that_are_yet_to_be_made_are_made(dispatched, partials):
    for sink, same in (
        (torch._neg_view(torch.tensor([-2.0])), torch.tensor([2.0])),
        (torch._efficientzerotensor(1), 0),
    ):
        want = merge(attn_sink=torch.zeros(1) + same)(*partials)
        for _ in range(2):
            dispatched.clear()
            torch.testing.assert_close(merge(attn_sink=sink)(*partials), want, rtol=0, atol=0)
            assert dispatched


def test_values_are_checked_on_the_short_way_too(dispatched, partials):
    right, wrong = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 2, 6], [0, 9, 6]))
    for _ in range(2):
        mla_suite.combine(*partials, right)
    dispatched.clear()
    with pytest.raises(ValueError, match="split_indptr is"):
        mla_suite.combine(*partials, wrong)
    assert dispatched == []


def test_nothing_of_a_call_is_kept():
    with torch.no_grad():
        made = torch.randn(6, 4, 128), torch.randn(6, 4)
        for _ in range(3):
            results = merge()(*made)
        watched = [weakref.ref(tensor) for tensor in (*made, *results)]
        del made, results
    gc.collect()
    assert [watch() for watch in watched] == [None] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_the_short_way_on_a_gpu(dispatched, partials):
    """The same numbers as the dispatcher's way, eagerly and in a graph that was captured the short way."""
    given = [tensor.cuda() for tensor in partials]
    right = merge("overload")(*given)
    dispatched.clear()
    assert all(map(torch.equal, merge()(*given), right))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = merge()(*given)
    assert dispatched == []
    for tensor in given:
        tensor.normal_()
    graph.replay()
    assert all(map(torch.equal, captured, merge("overload")(*given)))


def test_a_first_call_goes_past_the_dispatcher_where_it_would_be_passed_on_unchanged(dispatched):
    """Tensors that require a gradient, an int for a bool and a missing tensor are the dispatcher's to judge."""
    args, kwargs = made("decode")
    options = {name: value for name, value in kwargs.items() if name != "causal"}

    def first(*tensors, causal=True):
        dispatch.clear_caches()
        dispatched.clear()
        return mla_suite.decode(*tensors, causal=causal, **options)[0]

    out = first(*args)
    assert not dispatched
    assert torch.equal(first(*args, causal=1), out)
    assert len(dispatched) == 1
    assert first(args[0].clone().requires_grad_(), *args[1:]).requires_grad
    assert len(dispatched) == 1
    with pytest.raises(TypeError, match="kv_cache is None; it takes a tensor"):
        first(args[0], None, *args[2:])
    assert len(dispatched) == 1
