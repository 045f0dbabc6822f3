"""combine in Triton gives the reference's numbers, run by Triton's interpreter on the CPU.

The interpreter's bf16 dot is wrong (Triton 3.6), so inputs are fp16 and fp32.
"""

import pytest
import torch
from backend import CPU, check_layouts, run

import mla_suite
from mla_suite import testing
from mla_suite.core.op import Sample
from mla_suite.ops.combine import CombineArgs
from mla_suite.ops.combine import triton as combine
from mla_suite.ops.combine.samples import sample as combine_sample

COMBINE = [
    combine_sample(3, 16, 1),
    combine_sample(2, 24, 7, ragged=True, sink=True),
    combine_sample(2, 8, 33, head_dim_v=128),
]


@pytest.mark.parametrize("sample", COMBINE, ids=lambda s: s.name)
def test_combine(sample: Sample) -> None:
    args, kwargs = sample.make(CPU)
    kwargs["out_dtype"] = torch.float32
    got = run(combine, "combine", args, kwargs)
    torch.testing.assert_close(got, mla_suite.combine(*args, **kwargs), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("sink", [False, True])
def test_large_scores_cost_no_bits(sink: bool) -> None:
    """Weights are those of the same lse near 0, though the merged one is rounded to 5e-4 there."""
    (partial_out, partial_lse, *_), _ = combine_sample(1, 8, 5, head_dim_v=128).make(CPU)
    partial_lse = (partial_lse * 64).round() / 64  # which 8192 more leave as they are
    results = []
    for offset in (0.0, 8192.0):
        attn_sink = torch.full((8,), 0.5 + offset) if sink else None
        args = (partial_out, partial_lse + offset, None, attn_sink)
        results.append(run(combine, "combine", args, dict(num_splits=5, out_dtype=torch.float32))[0])
    torch.testing.assert_close(results[1], results[0], atol=2e-6, rtol=1e-6)


def test_outputs_of_any_strides() -> None:
    args, kwargs = combine_sample(3, 16, 2).make(CPU)
    args[1][:2, 5] = -torch.inf
    check_layouts(combine, "combine", args, kwargs | {"out_dtype": torch.float32})


def test_combine_of_nothing_of_nan_and_of_dead_splits() -> None:
    inf, nan = float("inf"), float("nan")
    partial_out = torch.randn(4, 6, 128)
    partial_lse = torch.tensor([-inf, 0.0, nan, 1.0, 2.0, -inf]).expand(4, 6).clone()
    partial_out[:3, 4:], partial_lse[:3, 4:] = 0.0, inf  # parts without keys, as FlashMLA marks them
    partial_out[0, 5, 127] = 1.0  # no such part
    partial_lse[1:, 1] = -inf
    partial_lse[1:, 3] = -300.0  # weight exactly 0 in fp32
    testing.poison(partial_out[1:, 1])
    testing.poison(partial_out[1:, 3])
    args, kwargs = (partial_out, partial_lse), dict(num_splits=4, out_dtype=torch.float32)
    got = run(combine, "combine", args, kwargs)
    torch.testing.assert_close(got, mla_suite.combine(*args, **kwargs), atol=2e-6, rtol=1e-6, equal_nan=True)
    assert got[0][0, 0].eq(0).all()
    assert got[1][0, 0] == -inf
    torch.testing.assert_close(got[0][0, 4], partial_out[3, 4])
    assert got[0][0, 5].isnan().all()


def test_combine_leaves_single_splits_alone() -> None:
    (partial_out, partial_lse, bounds, _), _ = combine_sample(3, 8, 2, ragged=True).make(CPU)  # 1, 2 and 1 splits
    out, lse = torch.full((3, 8, 512), 7.0), torch.full((3, 8), 7.0)
    keywords = dict(out_dtype=torch.float32, skip_single=True)
    combine.run(None, (out, lse), CombineArgs(partial_out, partial_lse, bounds, **keywords))
    assert out[0].eq(7).all()
    assert lse[2].eq(7).all()
    assert not out[1].eq(7).any()
