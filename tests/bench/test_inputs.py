"""Inputs rotate without losing their kv_format, and errors are held to the bound of what was computed."""

from types import SimpleNamespace

import pytest
import torch

from mla_suite import testing
from mla_suite.bench import inputs, runners, sets
from mla_suite.core import register
from mla_suite.core.dispatch import Backend, Supported
from mla_suite.ops.sparse_decode.samples import PoolShape

CPU = torch.device("cpu")
SMALL = sets.decode(2, 4, 20, page=4)


def test_copies_keep_strides_and_own_their_memory():
    padded = sets.sparse(2, 8, 1, [PoolShape("dsv4", 4, 2, 3)])
    call = inputs.make(padded, CPU)
    cache = call.args[1][0]
    assert not cache.is_contiguous()  # blocks of this kv_format are padded
    twin = inputs.copy(call).args[1][0]
    assert twin.stride() == cache.stride()
    assert torch.equal(twin, cache)
    assert twin.data_ptr() != cache.data_ptr()


def test_a_rotation_has_copies_of_its_own():
    call = inputs.make(SMALL, CPU)
    turns = inputs.rotation(call, 3)
    assert turns[0] is call
    assert len({turn.args[1].data_ptr() for turn in turns}) == 3


def test_a_planned_case_brings_its_plan_and_the_same_result():
    planned = sets.decode(2, 4, 200, page=4, planned=True)
    call = inputs.make(planned, CPU)
    assert call.args[inputs.PLAN] is not None
    outputs = torch.ops.mla_suite.decode(*call.args, **call.kwargs)
    assert 0 < inputs.error(register.get("decode"), None, outputs, call) < 5e-3


def test_arguments_that_an_operator_writes_are_compared():
    op = register.get("append_kv")
    call = inputs.Call(*op.samples()[0].make(CPU))
    before = call.args[2].clone()
    reference = op.backends[-1]
    assert runners.configured(op, reference, None, "").error(call) == 0
    assert torch.equal(call.args[2].view(torch.uint8), before.view(torch.uint8))  # the case's own cache is left alone

    idle = Backend("idle", lambda problem, arch: Supported(None, ""), lambda config, outputs, args: lambda *given: None)
    with pytest.raises(ValueError, match="the rows written, in the order of their tokens, at "):
        runners.configured(op, idle, None, "").error(call)


def test_fp8_weights_have_a_bound_where_the_dominant_value_is_zero():
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
    exact = testing.exact_decode(*call.args, **call.kwargs)
    rounded_away = torch.zeros_like(exact.out).bfloat16(), exact.lse.float()
    op, narrow = register.get("decode"), SimpleNamespace(fp8_weights=True)
    assert inputs.error(op, narrow, rounded_away, call) > 0
    with pytest.raises(ValueError, match=r"out at .* is 0, exact is "):
        inputs.error(op, None, rounded_away, call)
    bound = testing.fp8_weights_bound(*call.args, **call.kwargs)
    with pytest.raises(ValueError, match=r"out at .* is allowed between them"):
        inputs.error(op, narrow, ((exact.out + 2 * bound + 1e-2).bfloat16(), exact.lse), call)
