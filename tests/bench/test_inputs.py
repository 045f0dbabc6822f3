"""Inputs rotate without losing their kv_format, and errors are held to the bound of what was computed."""

import pytest
import torch

from mla_suite import testing
from mla_suite.bench import inputs, runners, sets
from mla_suite.core import register
from mla_suite.ops.sparse_decode.samples import PoolShape

CPU = torch.device("cpu")
SMALL = sets.decode(2, 4, 20, page=4)


def test_copies_keep_strides_and_own_their_memory() -> None:
    padded = sets.sparse(2, 8, 1, [PoolShape("dsv4", 4, 2, 3)])
    call = inputs.make(padded, CPU)
    cache = call.args[1][0]
    assert not cache.is_contiguous()  # blocks of this kv_format are padded
    twin = inputs.copy(call).args[1][0]
    assert twin.stride() == cache.stride()
    assert torch.equal(twin, cache)
    assert twin.data_ptr() != cache.data_ptr()


def test_a_rotation_has_copies_of_its_own() -> None:
    call = inputs.make(SMALL, CPU)
    turns = inputs.rotation(call, 3)
    assert turns[0] is call
    assert len({turn.args[1].data_ptr() for turn in turns}) == 3


def test_a_planned_case_brings_its_plan_and_the_same_result() -> None:
    planned = sets.decode(2, 4, 200, page=4, planned=True)
    call = inputs.make(planned, CPU)
    assert call.args[inputs.PLAN] is not None
    right = inputs.expected(planned, call)
    assert right.source == "fp64"
    out = torch.ops.mla_suite.decode(*call.args, **call.kwargs)
    assert inputs.error(out, right.outputs) < 5e-3


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
