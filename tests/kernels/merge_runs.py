"""Hostile runs of combine's native kernels that every machine must pass: AMD's in the emulator, a GPU's own.

`combine` takes the operator's arguments on `device`, runs the native kernel and nothing else, and returns out and lse,
which were poisoned before.
"""

from __future__ import annotations

import itertools

import torch
from merges import INF, NAN, exact, partials, special

from mla_suite.ops.combine import COMBINE
from mla_suite.testing import assert_close, poison


def into_poisoned(partial_out, partial_lse, split_indptr=None, attn_sink=None, **options):
    """The operator's out and lse, in tensors that were poisoned."""
    args, options = (partial_out, partial_lse, split_indptr, attn_sink), {"out_dtype": torch.bfloat16, **options}
    functional = {name: value for name, value in options.items() if name != "skip_single"}
    device = partial_out.device
    out, lse = (
        poison(torch.empty(o.shape, dtype=o.dtype, device=device)) for o in COMBINE.specify(*args, **functional)
    )
    torch.ops.mla_suite.combine.out(*args, **options, out=out, lse=lse)
    return out, lse


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def ragged_splits_with_a_sink(combine, device, head_dim_v, counts):
    bounds = [0, *itertools.accumulate(counts)]
    out, lse = partials(bounds[-1] + 3, 24, head_dim_v, device=device)
    poison(out[bounds[-1] :])  # room that no sequence owns
    poison(lse[bounds[-1] :])
    sink = torch.randn(8, device=device)
    result = combine(out, lse, ints(bounds, device), sink, out_dtype=torch.float32)
    assert_close(*result, exact(out, lse, bounds, sink))


def skip_single(combine, device):
    out, lse = partials(5, 12, device=device)
    merged, total = combine(out, lse, ints([0, 1, 4, 5, 5], device), skip_single=True)
    assert_close(merged[1:2], total[1:2], exact(out, lse, [1, 4]))
    assert bool((merged[[0, 2]].view(torch.int16) == -1).all())
    assert bool((total[[0, 2]].view(torch.int32) == -1).all())
    assert not bool(merged[3].any())
    assert bool((total[3] == -INF).all())


def what_is_not_read_and_what_is_nan(combine, device, batch=1):
    """The rows of `special`, in the first sequence and in the last of a batch."""
    out, lse = special(device=device)
    merged, total = combine(out.repeat(batch, 1, 1), lse.repeat(batch, 1), num_splits=6, out_dtype=torch.float32)
    for sequence in {0, batch - 1}:
        found, sums = merged[sequence], total[sequence]
        nan = found.isnan()
        assert nan.all(dim=1).nonzero().flatten().tolist() == [1, 6]
        assert nan[4].nonzero().flatten().tolist() == [7]
        assert sums.isnan().nonzero().flatten().tolist() == [1]
        assert sums[6] == INF
        assert not bool(found[2].any())
        assert found[8, :2].tolist() == [INF, -INF]
        rest = [0, 3, 5, 7]
        assert_close(found[None, rest], sums[None, rest], exact(out[:, rest], lse[:, rest], [0, 6]))


def sinks(combine, device):
    out, lse = special(device=device)
    sink = torch.tensor([1.0, INF, INF, 400.0, -INF, 3.0, 2.0, -3.0, NAN], device=device)
    merged, total = combine(out, lse, None, sink, num_splits=6, out_dtype=torch.float32)
    plain, plain_total = combine(out, lse, num_splits=6, out_dtype=torch.float32)
    assert same_bits(total, plain_total), "no sink is ever in lse"
    assert merged[0, 1].isnan().all(), "an lse is NaN, sink +inf or not"
    assert not bool(merged[0, 2:4].any()), "nothing to attend to, and e^400 beside e^0"
    assert same_bits(merged[0, 4], plain[0, 4]), "-inf adds nothing"
    assert merged[0, 8].isnan().all()
    rest = [0, 5, 7]
    assert_close(merged[:, rest], total[:, rest], exact(out[:, rest], lse[:, rest], [0, 6], sink[rest]))
    out, lse = partials(6, 8, device=device)
    out[3] = NAN  # weight 0: counts for nothing
    merged, _ = combine(out, lse, None, torch.full((4,), INF, device=device), num_splits=3)
    assert not bool(merged.any())


def plus_infinity_beside_zeros_is_a_part_without_keys(combine, device, splits=6):
    out, lse = partials(splits, 5, device=device)
    out[1::2, :4], lse[1::2, :4] = 0.0, INF
    out[:, 1], lse[:, 1] = -0.0, INF
    out[-1, 2, 511] = 1e-30  # the last part of the row is marked, and not all zeros
    out[-1, 3] = NAN
    for sink in (None, torch.full((5,), 0.5, device=device)):
        merged, total = combine(out, lse, None, sink, num_splits=splits, out_dtype=torch.float32)
        assert merged[0, 2:4].isnan().all()
        assert total[0, 1:4].tolist() == [-INF, INF, INF]
        rest = [0, 1, 4]
        unmarked = torch.where(lse == INF, -INF, lse)
        sinks_of_rest = None if sink is None else sink[rest]
        assert_close(
            merged[:, rest], total[:, rest], exact(out[:, rest], unmarked[:, rest], [0, splits], sinks_of_rest)
        )


def partials_beyond_two_to_the_31_elements(combine, device):
    """By strides: of 8.6 GB of address space six pages are touched."""
    far = 2**30 + 512
    out = torch.empty(2 * far + 4 * 512, device=device).as_strided((3, 4, 512), (far, 512, 1))
    out.copy_(torch.randn(3, 4, 512, device=device))
    lse = torch.randn(3, 4, device=device)
    assert out[2].storage_offset() > 2**31
    assert_close(*combine(out, lse, num_splits=3), exact(out, lse, [0, 3]))


def strided_outputs_and_partials(device):
    wide, lse = torch.randn(6, 3, 12, 512, device=device), torch.randn(6, 20, device=device)[:, 4:16]
    merged = poison(torch.empty(2, 14, 1024, dtype=torch.bfloat16, device=device))
    totals = poison(torch.empty(2, 40, device=device))
    into = dict(out=merged[:, :12, 512:], lse=totals[:, 5:17])
    torch.ops.mla_suite.combine.out(wide[:, 1], lse, None, None, num_splits=3, out_dtype=torch.bfloat16, **into)
    assert_close(*into.values(), exact(wide[:, 1], lse, [0, 3, 6]))
    assert bool((merged[:, 12:].view(torch.int16) == -1).all())
    assert bool((merged[:, :, :512].view(torch.int16) == -1).all())
