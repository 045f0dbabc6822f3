"""Queries in two tensors on a GPU: the bits of the same queries in one, of every kernel of both operators."""

from __future__ import annotations

import pytest
import torch
from decode_calls import SHAPES, Q, assert_a_graph_repeats, assert_same_bits, decode, hostile, require_kernels

from mla_suite.ops.decode.samples import decode_sample, in_parts
from mla_suite.ops.sparse_decode.samples import PoolShape
from mla_suite.ops.sparse_decode.samples import sample as sparse_sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
IN_TWO = {name: shape for name, shape in SHAPES.items() if shape.get("rope") != 0}
IN_TWO |= {
    "shared keys": dict(lens=(700, 100, 0, 1063, 1, 33, 64) * 10, heads=128),
    "shared keys, four tiles": dict(lens=(700, 100, 0, 1063, 1, 33, 64) * 10, heads=128, q_len=2, num_splits=1),
    "96 heads, of which two blocks": dict(lens=(700, 33), heads=96, num_splits=3),
    "96 heads, whose blocks begin within a token": dict(lens=(700, 33), heads=96, q_len=2),
}


@pytest.fixture(autouse=True)
def gpu():
    require_kernels()


@pytest.mark.parametrize("name", IN_TWO)
def test_parts_have_the_bits_of_joined_queries(name):
    args, kwargs = hostile(decode_sample(seed=len(name), **IN_TWO[name]))
    expected = decode(args, kwargs)
    q, q_rope = in_parts(args[Q], kwargs["head_dim_v"])
    in_two = [q, *args[1:-1], q_rope]
    assert_same_bits([decode(in_two, kwargs)], [expected])


@pytest.mark.parametrize("options", [dict(heads=128, planned=True), dict(heads=16, q_len=4, num_splits=3)])
def test_captured_and_compiled(options):
    args, kwargs = hostile(decode_sample((700, 100, 2063, 500), parts=True, **options))
    expected = decode(args, kwargs)
    assert_a_graph_repeats([(args, kwargs)], [expected])
    compiled = torch.compile(lambda *args: torch.ops.mla_suite.decode(*args, **kwargs), fullgraph=True)
    assert_same_bits([compiled(*args)], [expected])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("kv_format", ["v32", "bf16", "fp8"])
@pytest.mark.parametrize(("tokens", "heads"), [*((6, heads) for heads in (8, 16, 20, 32, 64, 96, 128)), (140, 128)])
def test_parts_over_selected_keys(tokens, heads, kv_format, splits):
    shape = sparse_sample(tokens // 2, 2, heads, [PoolShape(kv_format, 40, 64, 500)], lengths=True, parts=True)
    args, kwargs = shape.make(torch.device("cuda"))
    *others, q_rope = args
    kwargs["num_splits"] = splits
    found = torch.ops.mla_suite.sparse_decode(*args, **kwargs)
    joined = torch.cat((others[0], q_rope), dim=-1), *others[1:]
    assert_same_bits([found], [torch.ops.mla_suite.sparse_decode(*joined, **kwargs)])
    if kv_format == "bf16":
        largest = torch.ops.mla_suite.sparse_decode.max_logits
        assert_same_bits([largest(*args, **kwargs)], [largest(*joined, **kwargs)])
