"""Each operator's results beside the exact ones, as check mode sees them: the bounds are neither wider nor narrower."""

from __future__ import annotations

from typing import Any

import merges
import pytest
import sparse_problems
import torch

from mla_suite.core import check_mode, register
from mla_suite.core.check_mode import Call
from mla_suite.core.op import Compared
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode, fp8_weights_bound, score_rounding, ulp

CPU = torch.device("cpu")
DECODE_SAMPLES = [sample for sample in register.get("decode").samples() if sample.bytes < 5e6]


def made(op_name: str, args: Any, kwargs: dict[str, Any]) -> Call:
    """A call with outputs of the reference."""
    op = register.get(op_name)
    tensors = (*args, *op.functional.positional[len(args) :])
    call = Call(op, (), tensors, tuple((op.out.options | kwargs).values()))
    outputs = tuple(torch.empty(each.shape, dtype=each.dtype) for each in op.check(call.record))
    op.backends[-1].run(None, outputs, call.record)
    return call._replace(outputs=outputs)


def compared(call: Call, config: Any = None) -> list[Compared]:
    assert call.op.compare is not None
    return list(call.op.compare(config, call.outputs, call.record))


def assert_edges(call: Call) -> None:
    """A value of each output may be off by half of what is allowed, and by twice as much it is wrong.

    Rounding the value to the output's dtype, half of an ulp, is within a half of what is allowed.
    """
    assert check_mode.difference(call, None) is None
    for at, (_, got, exact, allowed) in enumerate(compared(call)):
        index = tuple(exact.isfinite().nonzero()[-1].tolist())
        limit = torch.as_tensor(allowed).expand(got.shape)[index]
        for share in (0.5, 2.0):
            outputs = [output.clone() for output in call.outputs]
            outputs[at][index] = exact[index] + share * limit
            found = check_mode.difference(call._replace(outputs=tuple(outputs)), None)
            assert (found is None) is (share < 1), (share, found)


@pytest.mark.parametrize("sample", DECODE_SAMPLES, ids=lambda sample: sample.name)
def test_decode_beside_fp64_by_the_formula(sample):
    args, kwargs = sample.make(CPU)
    call, exact = made("decode", args, kwargs), exact_decode(*args, **kwargs)
    out, lse = compared(call)
    torch.testing.assert_close(out.exact, exact.out, rtol=1e-6, atol=1e-6)  # keys are decoded and rotated in fp32
    torch.testing.assert_close(lse.exact, exact.lse, rtol=1e-6, atol=1e-6)
    if args[10] is None:  # with rope_cos_sin rotated keys may be rounded
        off = lse.allowed - 1e-4 * exact.lse.abs().nan_to_num(posinf=0.0).clamp(min=1.0)
        stated = (2.0**-8 + torch.expm1(2 * off)[..., None]) * exact.magnitude + ulp(out.exact, call.outputs[0].dtype)
        torch.testing.assert_close(out.allowed, stated, rtol=1e-4, atol=1e-7)
        # The longest key in a window may be shorter than the sequence's.
        torch.testing.assert_close(off, score_rounding(*args, **kwargs), rtol=0.1, atol=1e-8)
        assert_edges(call)
    else:
        assert bool((torch.as_tensor(out.allowed) >= 2.0**-8 * exact.magnitude).all())
        # A score moves by 2^-9 of |q| |k| of its rotated values; here are keys that no sequence has, too.
        q, keys = (tensor.double()[..., -64:].norm(dim=-1) for tensor in args[:2])
        off = lse.allowed - 1e-4 * exact.lse.abs().clamp(min=1.0)
        torch.testing.assert_close(off, 2.0**-9 * q * keys.max() * kwargs["softmax_scale"], rtol=0.1, atol=0)


def test_query_tokens_of_no_sequence_have_no_exact_result_and_may_be_anything():
    args, kwargs = decode_sample((90, 33), heads=4, q_len=2, varlen=True).make(CPU)
    padded = torch.cat((args[0], torch.full_like(args[0][:2], torch.nan))), *args[1:]
    for found, right in (
        *zip(exact_decode(*padded, **kwargs), exact_decode(*args, **kwargs), strict=True),
        *((bound(*padded, **kwargs), bound(*args, **kwargs)) for bound in (fp8_weights_bound, score_rounding)),
    ):
        assert torch.equal(found[:3], right)
        assert bool(found[3:].isnan().all())
        assert found.shape[0] == 5
    call = made("decode", padded, kwargs)
    for output in call.outputs:
        output[3:] = torch.nan
    assert check_mode.difference(call, None) is None
    assert check_mode.difference(call, type("Config", (), {"fp8_weights": True})()) is None


def test_operands_that_kernels_round_move_scores_by_no_more_than_is_allowed():
    """Scaled queries and rotated keys, both rounded to bf16 by hand."""
    (q, cache, seq_lens, table, *rest), kwargs = decode_sample((90, 33), heads=4, q_len=2, rotate=True, rope=64).make(
        CPU
    )
    rest[3] = torch.tensor([0.37])
    call = made("decode", (q, cache, seq_lens, table, *rest), kwargs)
    rounded = made(
        "decode", ((q.float() * 0.37).bfloat16(), cache, seq_lens, table, *rest[:3], None, *rest[4:]), kwargs
    )
    plain = call._replace(outputs=rounded.outputs)
    assert check_mode.difference(plain, None) is None
    off = (rounded.outputs[1] - call.outputs[1]).abs().max()
    assert off > 1e-4  # or the test would show nothing


@pytest.mark.parametrize("options", [{}, {"rotate": True, "rope": 64}, {"window_left": 40}], ids=str)
def test_rows_of_no_sequence_or_window_widen_no_bound(options):
    args, kwargs = decode_sample((90, 33), heads=4, q_len=2, page=16, **options).make(CPU)
    call = made("decode", args, kwargs)
    read = torch.zeros(args[1].shape[:2], dtype=torch.bool)
    for length, pages in zip(args[2].tolist(), args[3].tolist(), strict=True):
        first = max(length - 2 - options.get("window_left", length), 0)
        for position in range(first, length):
            read[pages[position // 16], position % 16] = True
    filled = torch.where(read[..., None], args[1], 3e38)
    for plain, wide in zip(compared(call), compared(made("decode", (args[0], filled, *args[2:]), kwargs)), strict=True):
        assert torch.equal(torch.as_tensor(plain.allowed), torch.as_tensor(wide.allowed))


@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_to_attend_to(batch):
    for kwargs in ({}, {"rotate": True, "rope": 64}):
        (q, cache, seq_lens, table, *rest), options = decode_sample((0, 0), heads=4, **kwargs).make(CPU)
        call = made("decode", (q[:batch], cache, seq_lens[:batch], table[:batch], *rest), options)
        assert check_mode.difference(call, None) is None
    nothing = torch.empty(batch, 1, 5, dtype=torch.int32).fill_(-1)
    args = torch.randn(batch, 1, 4, 576).bfloat16(), [torch.randn(2, 4, 576).bfloat16()], [nothing], [None], [None]
    call = made("sparse_decode", args, dict(kv_formats=["bf16"], softmax_scale=0.1))
    assert check_mode.difference(call, None) is None
    assert call.op.pages is not None
    assert call.op.pages(call.record)["kv_caches"][0].numel() == 0
    slots = torch.full((batch,), -1)
    args = torch.randn(batch, 512), torch.randn(batch, 64), torch.zeros(2, 4, 576).bfloat16(), slots
    assert check_mode.difference(made("append_kv", args, dict(kv_format="bf16")), None) is None


def test_weights_in_fp8_have_the_bound_of_their_own():
    args, kwargs = decode_sample((90,), heads=4, kv_format="fp8", dtype=torch.float8_e4m3fn).make(CPU)
    call = made("decode", args, kwargs)
    config = type("Config", (), {"fp8_weights": True})()
    wide, narrow = compared(call, config)[0].allowed, compared(call)[0].allowed
    assert bool((torch.as_tensor(wide) > 4 * torch.as_tensor(narrow)).all())
    exact = exact_decode(*args, **kwargs)
    assert bool((torch.as_tensor(wide) <= 0.14 * exact.magnitude + ulp(exact.out, torch.bfloat16)).all())


def test_scores_that_fp8_tensor_cores_sum_have_the_bound_of_their_own():
    args, kwargs = decode_sample((90,), heads=4, kv_format="fp8", dtype=torch.float8_e4m3fn).make(CPU)
    call = made("decode", args, kwargs)
    config = type("Config", (), {"fp8_scores": True})()
    _, lse = compared(call, config)
    q, keys = args[0].double(), args[1].view(torch.float8_e4m3fn).double() * args[8]
    sums = (q.abs()[0, 0] @ keys.flatten(0, 1).abs().T).amax(-1) * kwargs["softmax_scale"]
    off = torch.as_tensor(lse.allowed)[0, 0] - 1e-4 * lse.exact[0, 0].abs().clamp(min=1.0)
    assert bool(((off > 0) & (off <= 2.0**-10 * sums)).all())


def test_sparse_decode_beside_fp64_by_the_formula():
    args, kwargs = sparse_problems.problem(sparse_problems.POOLS["three pools"], 4, 16, 5, 0.2)
    sparse_problems.in_mode("mtp", args, kwargs, 5)
    call, exact = made("sparse_decode", args, kwargs), sparse_problems.exact(*args, **kwargs, rounded=False)
    out, lse = compared(call)
    torch.testing.assert_close(out.exact, exact.out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.exact, exact.lse, rtol=1e-6, atol=1e-6)
    off = lse.allowed - 1e-4 * exact.lse.abs().clamp(min=1.0)
    stated = (2.0**-8 + torch.expm1(2 * off)[..., None]) * exact.magnitude + ulp(out.exact, call.outputs[0].dtype)
    torch.testing.assert_close(out.allowed, stated, rtol=1e-4, atol=1e-7)
    # All rows are of about one length, so the longest that a token selects is about that of the others.
    per_key = kwargs["softmax_scale"] * args[0].double().norm(dim=-1) * 576**0.5 * 2.0**-24
    torch.testing.assert_close(off / per_key, (off / per_key).mean().expand_as(off), rtol=0.15, atol=0)
    assert_edges(call)


def test_the_largest_scores_of_several_pools():
    (q, *rest), kwargs = sparse_problems.problem(sparse_problems.POOLS["three pools"], 4, 16, 5, 0.2)
    call = made("sparse_decode.max_logits", (q, *rest[:4], torch.randn(16)), kwargs)
    assert_edges(call)


def test_combine_beside_fp64_by_the_formula():
    partial_out, partial_lse = merges.partials(8, 6)
    kwargs = dict(out_dtype=torch.bfloat16)
    bounds = torch.tensor([0, 3, 4, 8]).int()
    call = made("combine", (partial_out, partial_lse, bounds, torch.randn(6)), kwargs)
    exact = merges.exact(partial_out, partial_lse, bounds.tolist(), call.tensors[3])
    out, _ = compared(call)
    torch.testing.assert_close(out.exact, exact.out, rtol=1e-5, atol=1e-5)
    assert_edges(call)
    left = made("combine", call.tensors, kwargs | {"skip_single": True})
    left.outputs[0][1], left.outputs[1][1] = torch.nan, torch.nan
    assert check_mode.difference(left, None) is None
    left.outputs[0][0, 0, 0] = torch.nan
    found = check_mode.difference(left, None)
    assert found is not None
    assert found.startswith("out at [0, 0, 0] is nan, ")


def test_combine_of_rows_that_are_not_finite():
    call = made("combine", merges.special(), dict(num_splits=6))
    assert call.outputs[0].isnan().any()
    assert call.outputs[1].isinf().any()
    assert check_mode.difference(call, None) is None
    call.outputs[0][call.outputs[0].isnan()] = 0.0
    found = check_mode.difference(call, None)
    assert found is not None
    assert "exact is nan" in found


def test_append_kv_of_equal_slots_and_one_wrong_bit():
    kv_c, k_pe = torch.randn(5, 512).bfloat16(), torch.randn(5, 64).bfloat16()
    cache, slots = torch.zeros(3, 4, 576).bfloat16(), torch.tensor([9, 2, 9, -1, 0])
    call = made("append_kv", (kv_c, k_pe, cache, slots), dict(kv_format="bf16"))
    assert check_mode.difference(call, None) is None
    cache[0, 0, 3] += 1
    found = check_mode.difference(call, None)
    assert found is not None
    assert found.startswith("the rows written, in the order of their tokens, at [2, 3] is ")


def test_every_operator_that_is_not_compared_for_equality_says_how():
    """Without `compare`, only outputs are compared: an operator that writes an argument needs its own."""
    for op in register.registry().values():
        assert op.compare is not None or not op.mutates
        read = [name for name in op.functional.arguments if "kv_cache" in name or name == "source"]
        assert (op.pages is not None) is bool(set(read) - set(op.mutates))
