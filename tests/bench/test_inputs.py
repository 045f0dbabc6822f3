"""Inputs rotate without losing their kv_format, and a wrong result is not timed."""

import timeit
from functools import partial
from typing import Any

import pytest
import torch

from mla_suite import testing
from mla_suite.bench import clock, inputs, run, runners, sets
from mla_suite.bench.clock import Effort
from mla_suite.core import dispatch, register
from mla_suite.core.dispatch import Backend, Supported
from mla_suite.core.op import Op
from mla_suite.ops.sparse_decode.samples import PoolShape

CPU = torch.device("cpu")
SMALL = sets.decode(2, 4, 20, page=4)
ONCE = Effort(rounds=4, passes=1, rest_s=0.0)


def test_copies_keep_strides_and_own_their_memory() -> None:
    padded = sets.sparse(2, 8, 1, [PoolShape("dsv4", 4, 2, 3)])
    call = inputs.make(padded, CPU)
    cache = call.args[1][0]
    assert not cache.is_contiguous()  # blocks of this kv_format are padded
    twin = inputs.copy(call).args[1][0]
    assert twin.stride() == cache.stride()
    assert torch.equal(twin, cache)
    assert twin.data_ptr() != cache.data_ptr()


def test_a_rotation_touches_what_a_cache_could_hold() -> None:
    call = inputs.make(SMALL, CPU)
    assert len(inputs.rotation(call, SMALL.sample.bytes, 10 * SMALL.sample.bytes, 64)) == 10
    assert len(inputs.rotation(call, SMALL.sample.bytes, 1000 * SMALL.sample.bytes, 64)) == 64
    assert len(inputs.rotation(call, SMALL.sample.bytes, 0, 64)) == 2


def test_a_planned_case_brings_its_plan_and_the_same_result() -> None:
    planned = sets.decode(2, 4, 200, page=4, planned=True)
    call = inputs.make(planned, CPU)
    assert call.args[inputs.PLAN] is not None
    right = inputs.expected(planned, call)
    assert right.source == "fp64"
    out = torch.ops.mla_suite.decode(*call.args, **call.kwargs)
    assert inputs.error(out, right.outputs) < 5e-3


def tampered(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    """decode's reference, in place of a fast backend, with something done to what it wrote."""
    op = register.get("decode")
    reference = op.backends[-1]

    def wrong(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> Any:
        def launch(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
            reference.run(config, outputs, args)
            damage(*outputs)

        return launch

    fast = Backend("native", lambda problem, arch: Supported(None, "a test's own"), wrong)
    monkeypatch.setattr("mla_suite.core.register._registry", {"decode": _with(op, (fast, reference))})
    dispatch.clear_caches()


def _with(op: Op, backends: tuple[Backend, ...]) -> Op:
    from dataclasses import replace

    return replace(op, backends=backends)


@pytest.fixture(autouse=True)
def _choices_are_forgotten() -> Any:
    yield
    dispatch.clear_caches()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda out, lse: out[1, 0, 3].mul_(1.03), "its worst row by 3"),
        (lambda out, lse: out[1, 0, 3, 7].fill_(torch.nan), "off by nan"),
        (lambda out, lse: out.view(torch.uint8)[..., -2:].fill_(0xFF), "off by nan"),
        (lambda out, lse: lse[0, 0, 2].add_(0.1), "lse is off by"),
        (lambda out, lse: lse[0, 0, 2].fill_(-torch.inf), "lse is off by inf"),
    ],
    ids=["one row 3 % off", "one NaN", "the last column never written", "one lse off", "one lse -inf"],
)
def test_a_wrong_result_is_not_timed(damage: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, damage)
    (result,) = run.run([SMALL], CPU, ONCE, backends=["native"])
    assert result.wrong
    assert sentence in result.failure
    assert result.rounds == []


def test_a_right_result_is_timed_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, lambda out, lse: None)
    native, reference = run.run([SMALL], CPU, Effort(2, 3, 0.0), backends=["native", "reference"])
    for result in (native, reference):
        assert result.failure == ""
        assert len(result.rounds) >= 6  # more where a busy CPU does not let them settle
        assert result.checked == "fp64"
        assert 0 < result.error < 5e-3


def test_a_backend_that_fails_is_a_result_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*outputs: torch.Tensor) -> None:
        raise RuntimeError("no such\n  kernel")

    tampered(monkeypatch, fail)
    native, reference = run.run([SMALL], CPU, ONCE, backends=["native", "reference"])
    assert (native.failure, native.wrong) == ("no such kernel", True)
    assert reference.rounds


def test_arguments_that_an_operator_writes_are_compared() -> None:
    op = register.get("append_kv")
    sample = op.samples()[0]
    call = inputs.Call(*sample.make(CPU))
    before = call.args[2].clone()
    reference = op.backends[-1]
    runner = runners.configured(op, reference, None, "")
    assert runner.answer is not None
    (cache,) = runner.answer(call)
    assert not torch.equal(cache.view(torch.uint8), before.view(torch.uint8))
    assert torch.equal(call.args[2].view(torch.uint8), before.view(torch.uint8))  # the case's own cache is left alone


def test_portable_refuses_the_cpu_in_a_sentence() -> None:
    (result,) = run.run([SMALL], CPU, ONCE, backends=["triton"])
    assert result.failure == "it runs on cuda, not on cpu"
    assert not result.wrong


@pytest.mark.parametrize("took_s", [2e-6, 0.002, 0.6])
def test_cpu_rounds_are_microseconds(took_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves when the call does; the first call, which is slower, decides how often it is repeated."""
    now, calls = 0.0, 0

    def call() -> None:
        nonlocal now, calls
        calls += 1
        now += took_s if calls > 1 else 1.5 * took_s

    monkeypatch.setattr(clock.timeit, "Timer", partial(timeit.Timer, timer=lambda: now))
    rounds = clock.cpu_rounds(call, ONCE)
    assert rounds == pytest.approx([took_s * 1e6] * ONCE.rounds)
    repeats = {2e-6: 5 * 666, 0.002: 5, 0.6: 1}[took_s]
    assert calls == 1 + ONCE.rounds * repeats


def test_fp8_weights_have_a_bound_where_the_dominant_value_is_zero() -> None:
    """One key has nearly all of the weight and zeros for values; what is left is rounded away, and that is allowed."""
    case = sets.decode(1, 2, 40, page=1, kv_format="fp8", dtype=torch.float8_e4m3fn)
    args, kwargs = case.sample.make(CPU)
    q, cache, seq_lens, table, *rest = args
    rest[4] = torch.tensor(1.0)  # kv_descale
    latent = torch.zeros(576)
    latent[512:] = 16.0  # keys meet in the rope part alone, which is no value
    keys = torch.randn(cache.shape[0], 1, 576).mul(0.1)
    keys[table[0, 7].item(), 0] = latent
    cache = keys.to(torch.float8_e4m3fn).view(torch.uint8)
    q = torch.zeros_like(q.float()).index_fill(-1, torch.arange(512, 576), 1.0).to(q.dtype)
    call = inputs.Call((q, cache, seq_lens, table, *rest), kwargs)
    right = inputs.expected(case, call)
    exact = testing.exact_decode(*call.args, **call.kwargs)
    assert right.source == "fp64"
    assert right.fp8_weights is not None
    rounded_away = torch.zeros_like(exact.out)
    share = 0.14 * exact.magnitude
    assert bool(((rounded_away - exact.out).abs() > share + testing.ulp(exact.out, torch.bfloat16)).any())
    got = (rounded_away.bfloat16(), exact.lse.float())
    assert inputs.error(got, right.outputs, fp8_weights=right.fp8_weights) > 0
    off = (exact.out + 2 * right.fp8_weights + 1e-2, exact.lse)
    with pytest.raises(ValueError, match="times as far off as softmax weights in fp8 allow"):
        inputs.error((off[0].bfloat16(), off[1]), right.outputs, fp8_weights=right.fp8_weights)
