"""decode over a rank's keys on a real GPU: the ranks' results, merged by combine, are those of all keys."""

from __future__ import annotations

import pytest
import torch
from decode_calls import decode_grid, native
from rank_problems import SHAPES, merged, rank_calls, whole_call

import mla_suite
from mla_suite.testing import exact_decode

pytestmark = pytest.mark.usefixtures("native_decode")


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_merge_to_the_whole(name):
    results = []
    for args, kwargs in rank_calls(name, torch.device("cuda")):
        native(args, kwargs)
        results.append(mla_suite.decode(*args, **kwargs))
    args, kwargs = whole_call(name)
    out, lse = merged(results)
    decode_grid.assert_within_bound(out, lse, exact_decode(*args, **kwargs), 2.0**-7)


def test_a_compiled_graph_of_ranks_follows_new_lengths():
    args, kwargs = rank_calls("four tokens", torch.device("cuda"))[1]
    compiled = torch.compile(mla_suite.decode, fullgraph=True)
    eager = mla_suite.decode(*args, **kwargs)
    for found, wanted in zip(compiled(*args, **kwargs), eager, strict=True):
        assert torch.equal(found, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(*args, **kwargs)
    shorter = rank_calls("four tokens, shorter", torch.device("cuda"))[1][0]
    wanted = mla_suite.decode(*args[:2], shorter[2], *args[3:12], shorter[12], **kwargs)
    args[2].copy_(shorter[2])
    args[12].copy_(shorter[12])
    graph.replay()
    for found, expected in zip(captured, wanted, strict=True):
        assert torch.equal(found, expected)
