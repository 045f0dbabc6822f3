"""sparse_decode's reference against fp64, with what its native kernels pass: pools, formats, sinks, absurd indices."""

import pytest
import sparse_runs
import torch
from hostile_inputs import ABSURD, poisoned
from sparse_problems import FNUZ_POOLS, FP8_POOLS, MODES, POOLS, V41_POOLS, in_mode, problem, with_descales

import mla_suite
from mla_suite.ops.decode import Q_FP8
from mla_suite.ops.decode.samples import in_parts
from mla_suite.testing import assert_close

REFERENCE = sparse_runs.Machine(lambda args, kwargs: mla_suite.sparse_decode(*args, **kwargs), assert_close)
FLAVOURS = {"two flavours": [("dsv4_fnuz", 2, 16, 13), ("dsv4", 3, 5, 7)]}
ALL_POOLS = POOLS | V41_POOLS | FP8_POOLS | FNUZ_POOLS | FLAVOURS
HEADS = (1, 8, 12, 24, 40, 96, 128)


@pytest.mark.parametrize("heads", HEADS)
def test_against_fp64(heads):
    """Any two of heads, pools and mode meet at least once."""
    assert len(HEADS) == len(MODES)
    sparse_runs.pools_in_modes(REFERENCE, ALL_POOLS, heads, HEADS.index(heads), tokens=2, planned=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("q_len", [1, 3, 4, 5, 8])
def test_query_lengths_and_dtypes(dtype, q_len):
    args, kwargs = problem(POOLS["v4"], 2 * q_len, 8, seed=q_len, spread=0, dtype=dtype)
    args[0], args[2] = args[0].view(2, q_len, 8, 512), [index.view(2, q_len, -1) for index in args[2]]
    out, lse = REFERENCE.check(args, kwargs)
    assert (out.shape, out.dtype) == ((2, q_len, 8, 512), dtype)
    assert (lse.shape, lse.dtype) == ((2, q_len, 8), torch.float32)


@pytest.mark.parametrize("mode", ["ragged", "lengths and sink"])
def test_lists_of_several_query_tokens_of_a_sequence(mode):
    args, kwargs = problem(POOLS["both scales"], 6, 8)
    in_mode(mode, args, kwargs, 1)
    args[0] = args[0].unflatten(0, (2, 3))
    if mode != "ragged":
        args[2], args[4] = ([tensor.unflatten(0, (2, 3)) for tensor in args[i]] for i in (2, 4))
    REFERENCE.check(args, kwargs)


@pytest.mark.parametrize("pools", FP8_POOLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, *Q_FP8])
def test_rows_of_per_tensor_fp8(pools, dtype):
    """Descales multiply in fp32: rows that fp16 could not hold, queries that are no e4m3 after it."""
    args, kwargs = problem(FP8_POOLS[pools], 3, 8, seed=1, dtype=dtype)
    args = with_descales(args, 1, dtype)
    args[-1] = torch.tensor(3000.0)
    out, _ = REFERENCE.check(args, kwargs | {"softmax_scale": 3e-6})
    assert out.dtype == (torch.bfloat16 if dtype in Q_FP8 else dtype)


@pytest.mark.parametrize("head_dim_v", [1, 64, 448, 512, 576])
def test_v_is_the_front_of_the_row(head_dim_v):
    args, kwargs = problem(POOLS["bf16"], 2, 4)
    out, _ = REFERENCE.check(args, kwargs | {"head_dim_v": head_dim_v})
    assert out.shape == (2, 4, head_dim_v)


def test_queries_in_two_tensors():
    args, kwargs = problem(POOLS["v32"], 3, 4)
    q, q_rope = in_parts(args[0], 512)
    others = args[1:] + [None] * (9 - len(args))
    for overload in (mla_suite.sparse_decode, torch.ops.mla_suite.sparse_decode.max_logits):
        parts, joined = overload(q, *others, q_rope, **kwargs), overload(args[0], *others, **kwargs)
        assert all(map(torch.equal, parts, joined))
    for wrong, words in ((q_rope[:2], "q_rope has shape"), (q_rope.float(), "q_rope is float32; it takes bfloat16")):
        with pytest.raises((ValueError, TypeError), match=words):
            mla_suite.sparse_decode(q, *others, wrong, **kwargs)


def test_what_is_left_out_is_absent():
    args, kwargs = problem(POOLS["v32"], 2, 4)
    assert all(map(torch.equal, mla_suite.sparse_decode(*args[:3], **kwargs), REFERENCE.attend(args, kwargs)))


@pytest.mark.parametrize("sink", [*sparse_runs.SINKS, -60.0])
@pytest.mark.parametrize("splits", [1, 2])
def test_sinks(sink, splits):
    sparse_runs.sinks(REFERENCE, sink, splits)


@pytest.mark.parametrize("selection", sparse_runs.SELECTIONS)
def test_selections(selection):
    sparse_runs.selections(REFERENCE, "dsv4", 16, selection)


@pytest.mark.parametrize("empty", ["all invalid", "length 0", "ragged", "no pages", "topk 0"])
@pytest.mark.parametrize("sink", [None, 0.0, torch.inf, -torch.inf, torch.nan])
def test_nothing_to_attend_to(empty, sink):
    q = torch.randn(2, 3, 512).bfloat16()
    cache = poisoned("dsv4", 0 if empty == "no pages" else 2, 4, (), 0)
    index = torch.zeros(2, 0 if empty == "topk 0" else 6, dtype=torch.int32)
    indptr = lengths = None
    if empty == "all invalid":
        index = torch.tensor([[*ABSURD, 8, 9]] * 2, dtype=torch.int32)
    elif empty == "length 0":
        lengths = torch.zeros(2, dtype=torch.int32)
    elif empty == "ragged":
        index, indptr = index.flatten(), torch.full((3,), 5, dtype=torch.int32)
    sinks = None if sink is None else torch.full((3,), sink)
    out, lse = mla_suite.sparse_decode(
        q, [cache], [index], [indptr], [lengths], sinks, kv_formats=["dsv4"], softmax_scale=1.0
    )
    assert torch.equal(out, torch.zeros(2, 3, 512).bfloat16())
    assert (lse == -torch.inf).all()


def test_a_query_token_is_bitwise_the_same_in_any_batch():
    sparse_runs.batch_invariant(REFERENCE, 16)


def test_strided_queries_and_outputs():
    args, kwargs, (out, lse) = sparse_runs.strided(torch.device("cpu"))
    torch.ops.mla_suite.sparse_decode.out(*args, **kwargs, out=out, lse=lse)
    assert_close(out, lse, REFERENCE.exact(args, kwargs))


def test_a_pool_beyond_two_and_four_gigabytes():
    sparse_runs.far_pool(REFERENCE, "v32")
