"""Calls of `torch.ops.mla_suite` skip torch's dispatcher where the public functions do, and nobody notices."""

import warnings
from functools import partial

import pytest
import torch
from observers import Functions, Marked, Operators
from torch._inductor.utils import run_and_get_code
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.experimental.proxy_tensor import make_fx

import mla_suite
from mla_suite.archs import decode_table
from mla_suite.core import allocation, dispatch, register

OPS = torch.ops.mla_suite
OPERATORS = tuple(register.registry())
WITH_OUTPUTS = tuple(name for name, op in register.registry().items() if op.outputs)
WAYS = {"public": mla_suite.combine, "overload": OPS.combine.default, "packet": OPS.combine}
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


def made(name):
    """(positional, keyword) arguments of an operator as its schema has them."""
    op = register.get(name)
    args, kwargs = op.samples()[0].make(CPU)
    return args, kwargs if op.defaults is None else op.defaults(*args, **kwargs)


def flat(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("packet", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_known_call_skips_the_dispatcher(dispatched, name, packet, grad):
    args, kwargs = made(name)
    called = getattr(OPS, name) if packet else getattr(OPS, name).default
    dispatched.clear()  # making the arguments may take a plan
    with torch.set_grad_enabled(grad):
        want = [tensor.clone() for tensor in flat(called(*args, **kwargs))]
        assert dispatched == [str(called)], "the first call with some metadata has all checks"
        for _ in range(2):
            assert all(map(torch.equal, flat(called(*args, **kwargs)), want))
    assert dispatched == [str(called)]


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
    names = register.get("decode").arguments
    want = OPS.decode.default(*args, **kwargs)
    by_name = dict(zip(names, args, strict=False)) | kwargs
    backwards = dict(reversed(by_name.items()))
    for given in (by_name, backwards, by_name | {"rope_cos_sin": None, "split_size": 0}):
        dispatched.clear()
        assert all(map(torch.equal, OPS.decode.default(**given), want))
        assert dispatched == []


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"plans": None}, "plans"),
        ({"q": torch.zeros(1)}, "q"),
        ({"softmax_scale": "1"}, "softmax_scale"),
        ({"num_splits": 1.0}, "num_splits"),
    ],
)
def test_what_the_schema_refuses_is_refused_after_a_like_call_too(wrong, sentence):
    args, kwargs = made("decode")
    for _ in range(2):
        OPS.decode.default(*args, **kwargs)
    with pytest.raises((RuntimeError, TypeError), match=sentence):
        OPS.decode.default(*args, **kwargs | wrong)
    with pytest.raises(RuntimeError, match="softmax_scale"):
        OPS.decode.default(*args)


def test_a_list_that_the_caller_changes_is_looked_at_again():
    args, kwargs = made("sparse_decode")
    formats = list(kwargs.pop("kv_formats"))
    for _ in range(3):
        OPS.sparse_decode.default(*args, kv_formats=formats, **kwargs)
    formats[0] = "fp32"
    with pytest.raises(TypeError, match="kv_format 'fp32' takes float32"):
        OPS.sparse_decode.default(*args, kv_formats=formats, **kwargs)


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


OBSERVERS = {
    "dispatch mode": partial(in_mode, Operators),
    "function mode": partial(in_mode, Functions),
    "profiler": partial(in_mode, torch.profiler.profile),
    "debug mode": partial(in_mode, mla_suite.debug),
    "counted": partial(in_mode, dispatch.count_calls),
    "policy": partial(in_mode, partial(decode_table.policy, "aiter-pr3003")),
    "subclass": lambda call, given: call(*[tensor.as_subclass(Marked) for tensor in given]),
    "gradient": lambda call, given: call(given[0].clone().requires_grad_(), given[1]),
    "negated": lambda call, given: call(given[0], torch._neg_view(given[1])),
    "vmap": lambda call, given: torch.vmap(call)(*[torch.stack([tensor] * 2) for tensor in given]),
    "functionalize": lambda call, given: torch.func.functionalize(call)(*given),
    **{f"make_fx of {mode} tensors": partial(recorded, mode) for mode in ("real", "fake", "symbolic")},
    "trace": traced,
}


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("way", WAYS)
def test_who_could_see_the_operator_sees_it(dispatched, way, observer):
    given = torch.randn(6, 4, 128), torch.randn(6, 4)
    call = partial(WAYS[way], num_splits=3, out_dtype=torch.float32)
    for _ in range(2):
        call(*given)
    dispatched.clear()
    OBSERVERS[observer](lambda *tensors: call(*tensors), given)
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
