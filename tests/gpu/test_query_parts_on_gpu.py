"""Decode of queries in two tensors on a GPU: the bits of the same queries in one, of every kernel."""

from __future__ import annotations

import pytest
import torch
from decode_calls import SHAPES, Q, assert_a_graph_repeats, assert_same_bits, decode, hostile, require_kernels

from mla_suite.ops.decode.samples import decode_sample, in_parts

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
