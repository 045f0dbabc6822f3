"""combine's own kernels on a real GPU against fp64: the whole product of shapes, bits, hostile values, memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from merges import HEADS, INF, NAN, SPLITS, TOKENS, assert_rounded, exact, hard_to_round, partials, special

from mla_suite.archs import combine as config
from mla_suite.core import dispatch
from mla_suite.ops.combine import COMBINE
from mla_suite.testing import Exact, assert_close, poison

DEVICE = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def combine(partial_out, partial_lse, split_indptr=None, attn_sink=None, **arguments):
    """Result of the native kernel, twice the same bits, in outputs that were poisoned; a skip names what is missing."""
    arguments = {"out_dtype": torch.bfloat16, "num_splits": 0, **arguments}
    args = (partial_out, partial_lse, split_indptr, attn_sink)
    problem = COMBINE.problem(*args, **arguments)
    choice = dispatch.choose("combine", COMBINE.backends, problem, dispatch.arch_of(partial_out), DEVICE.type)
    if choice.backend.name != "native":
        pytest.skip(str(choice))
    functional = {name: value for name, value in arguments.items() if name != "skip_single"}
    results = []
    for _ in range(2):
        out, lse = (
            poison(torch.empty(o.shape, dtype=o.dtype, device=DEVICE)) for o in COMBINE.specify(*args, **functional)
        )
        torch.ops.mla_suite.combine.out(*args, **arguments, out=out, lse=lse)
        results.append((out, lse))
    for first, again in zip(*results, strict=True):
        assert torch.equal(first.view(torch.uint8), again.view(torch.uint8)), "another run, other bits"
    return results[0]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_whole_product(heads, tokens):
    """Every number of splits; out dtype, head_dim_v and the sink take turns."""
    for turn, splits in enumerate(SPLITS):
        head_dim_v = 128 if turn % 4 == 3 else 512
        out, lse = partials(tokens * splits, heads, head_dim_v, device=DEVICE)
        sink = torch.randn(heads, device=DEVICE) if turn % 3 == 1 else None
        result = combine(out, lse, None, sink, num_splits=splits, out_dtype=DTYPES[turn % 3])
        assert_close(*result, exact(out, lse, range(0, tokens * splits + 1, splits), sink))


@pytest.mark.parametrize("head_dim_v", config.HEAD_DIMS_V)
def test_ragged_splits_with_a_sink(head_dim_v):
    counts = [0, 1, 5, 0, 33, 2, 161, 1, 1024]
    bounds = [0, *itertools.accumulate(counts)]
    out, lse = partials(bounds[-1] + 3, 24, head_dim_v, device=DEVICE)
    poison(out[bounds[-1] :])  # room that no sequence owns
    poison(lse[bounds[-1] :])
    sink = torch.randn(8, device=DEVICE)
    indptr = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    assert_close(*combine(out, lse, indptr, sink, out_dtype=torch.float32), exact(out, lse, bounds, sink))


def test_skip_single_leaves_those_rows():
    bounds = [0, 1, 4, 5, 5]
    out, lse = partials(5, 12, device=DEVICE)
    indptr = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    merged, total = combine(out, lse, indptr, skip_single=True)
    assert_close(merged[1:2], total[1:2], exact(out, lse, [1, 4]))
    assert bool((merged[[0, 2]].view(torch.int16) == -1).all())
    assert bool((total[[0, 2]].view(torch.int32) == -1).all())
    assert not bool(merged[3].any())
    assert bool((total[3] == -INF).all())


@pytest.mark.parametrize("batch", [1, 300])
def test_what_is_not_read_and_what_is_nan(batch):
    """In a small batch several waves share a row, in a large one a wave has several."""
    out, lse = special(device=DEVICE)
    merged, total = combine(out.repeat(batch, 1, 1), lse.repeat(batch, 1), num_splits=6, out_dtype=torch.float32)
    for row in (0, batch - 1):
        nan = merged[row].isnan()
        assert nan.all(dim=1).nonzero().flatten().tolist() == [1, 6]
        assert nan[4].nonzero().flatten().tolist() == [7]
        assert total[row].isnan().nonzero().flatten().tolist() == [1]
        assert total[row, 6] == INF
        assert not bool(merged[row, 2].any())
        assert merged[row, 8, 0] == INF
        assert merged[row, 8, 1] == -INF
        rest = [0, 3, 5, 7]
        assert_close(merged[row : row + 1, rest], total[row : row + 1, rest], exact(out[:, rest], lse[:, rest], [0, 6]))


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_nan_and_infinity_survive_rounding(out_dtype):
    assert_rounded(*combine(*hard_to_round(DEVICE), num_splits=2, out_dtype=out_dtype))


def test_sinks():
    out, lse = special(device=DEVICE)
    sink = torch.tensor([1.0, INF, INF, 400.0, -INF, 3.0, 2.0, -3.0, NAN], device=DEVICE)
    merged, total = combine(out, lse, None, sink, num_splits=6, out_dtype=torch.float32)
    plain, plain_total = combine(out, lse, num_splits=6, out_dtype=torch.float32)
    assert torch.equal(total.view(torch.int32), plain_total.view(torch.int32)), "no sink is ever in lse"
    assert merged[0, 1].isnan().all(), "an lse is NaN, sink +inf or not"
    assert not bool(merged[0, 2:4].any()), "nothing to attend to, and e^400 beside e^0"
    assert torch.equal(merged[0, 4].view(torch.int32), plain[0, 4].view(torch.int32))
    assert merged[0, 8].isnan().all()
    rest = [0, 5, 7]
    assert_close(merged[:, rest], total[:, rest], exact(out[:, rest], lse[:, rest], [0, 6], sink[rest]))
    out, lse = partials(6, 8, device=DEVICE)
    out[3] = NAN  # weight 0: counts for nothing
    merged, _ = combine(out, lse, None, torch.full((4,), INF, device=DEVICE), num_splits=3)
    assert not bool(merged.any())


def test_partials_beyond_two_to_the_31_elements():
    """By strides, then by size; 8.6 GB each."""
    far = 2**30 + 512
    room = torch.empty(2 * far + 4 * 512, device=DEVICE)
    out = room.as_strided((3, 4, 512), (far, 512, 1))
    out.copy_(torch.randn(3, 4, 512, device=DEVICE))
    lse = torch.randn(3, 4, device=DEVICE)
    assert out[2].storage_offset() > 2**31
    assert_close(*combine(out, lse, num_splits=3), exact(out, lse, [0, 3]))
    del room, out
    rows = 2**23 + 5
    wide, lse = torch.randn(2, rows, 128, device=DEVICE), torch.randn(2, rows, device=DEVICE)
    merged, total = combine(wide, lse, num_splits=2)
    last = slice(rows - 100, rows)
    assert_close(merged[:, last], total[:, last], exact(wide[:, last], lse[:, last], [0, 2]))


def test_strided_outputs_and_partials():
    wide, lse = torch.randn(6, 3, 12, 512, device=DEVICE), torch.randn(6, 20, device=DEVICE)[:, 4:16]
    merged = poison(torch.empty(2, 14, 1024, dtype=torch.bfloat16, device=DEVICE))
    totals = poison(torch.empty(2, 40, device=DEVICE))
    torch.ops.mla_suite.combine.out(
        wide[:, 1], lse, None, None, num_splits=3, out_dtype=torch.bfloat16,
        out=merged[:, :12, 512:], lse=totals[:, 5:17],
    )  # fmt: skip
    wanted: Exact = exact(wide[:, 1], lse, [0, 3, 6])
    assert_close(merged[:, :12, 512:], totals[:, 5:17], wanted)
    assert bool((merged[:, 12:].view(torch.int16) == -1).all())
    assert bool((merged[:, :, :512].view(torch.int16) == -1).all())
