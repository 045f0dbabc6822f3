"""Merges to be made, and their exact results: what combine's tests on emulated and real GPUs share."""

from __future__ import annotations

import itertools

import torch

from mla_suite.archs.combine import CombineConfig
from mla_suite.testing import Exact, ulp

INF, NAN = torch.inf, torch.nan
SPLITS = (1, 2, 3, 4, 7, 16, 33, 64, 66, 132, 160, 161, 512)
HEADS = (1, 8, 12, 16, 24, 32, 40, 96, 128)
TOKENS = (1, 2, 3, 8, 128)


def a_row_by_eight_waves(arch):
    return CombineConfig(arch, 512, rows=1, vec=4, waves=8, slices=1)


def four_rows(arch):
    return CombineConfig(arch, 512, rows=4, vec=4, waves=4, slices=1)


def partials(splits, rows, head_dim_v=512, spread=3.0, device=None):
    partial_out = torch.randn(splits, rows, head_dim_v, device=device)
    return partial_out, torch.randn(splits, rows, device=device) * spread


def exact(partial_out, partial_lse, bounds, sink=None):
    """fp64 merge of each sequence by the formula."""
    outs, lses, sizes = [], [], []
    rows = partial_lse.shape[1]
    logits = partial_lse.new_full((rows,), -INF) if sink is None else sink.repeat(rows // sink.shape[0])
    for first, end in itertools.pairwise(bounds):
        lse = partial_lse[first:end].double()
        total = torch.logsumexp(lse, dim=0)
        weight = torch.exp(lse - torch.logaddexp(total, logits.double()))
        weight = torch.where((lse == -INF) | (weight < 2.0**-150), 0.0, weight).unsqueeze(-1)
        values = torch.where(weight == 0, 0.0, partial_out[first:end].double())
        outs.append((weight * values).sum(0))
        sizes.append((weight * values.abs()).sum(0))
        lses.append(total)
    if not outs:
        return Exact(partial_out[:0].double(), partial_lse[:0].double(), partial_out[:0].double())
    return Exact(torch.stack(outs), torch.stack(lses), torch.stack(sizes))


def pairs(case):
    """(position, position, value, value) of every two values of a case."""
    return {(i, j, case[i], case[j]) for i, j in ((0, 1), (0, 2), (1, 2))}


def cover(most_work):
    """Cases of at most `most_work` splits x rows in which every pair of values of two of the three occurs."""
    fits = [c for c in itertools.product(SPLITS, HEADS, TOKENS) if c[0] * c[1] * c[2] <= most_work]
    missing = set().union(*map(pairs, fits))
    while missing:
        best = max(fits, key=lambda c: (len(pairs(c) & missing), -c[0] * c[1] * c[2]))
        missing -= pairs(best)
        yield best


def special(rows=9, splits=6, device=None):
    """Rows in which a split must not be read, or its NaN must be seen."""
    out, lse = partials(splits, rows, spread=0.5, device=device)
    lse[0, 0], out[0, 0] = -INF, NAN  # not read
    lse[1, 1] = NAN  # NaN
    lse[:, 2], out[:, 2] = -INF, NAN  # nothing: 0 and -inf
    lse[2, 3], out[2, 3] = -300.0, NAN  # weight 0: not read
    out[1, 4, 7] = NAN  # one NaN value
    lse[:, 5] = torch.arange(splits, device=device) * 20.0 - 300.0  # far from 0, apart
    lse[1, 6] = INF  # lse inf, out NaN
    lse[0, 7], out[0, 7] = lse[1, 7] - 100.0, 1e38  # weight below the smallest normal number, and counts
    out[3, 8, :4] = torch.tensor([INF, -INF, 3e38, -0.0], device=device)
    return out, lse


def hard_to_round(device=None):
    """Two sequences of two splits: NaN of either sign and any payload, and what is too large for 16 bits."""
    out, lse = partials(4, 3, device=device)
    patterns = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001 - 2**32, -1], dtype=torch.int32)
    out[1, 0, 100:105] = patterns.view(torch.float32).to(out.device)
    out[:2, 1, 7], out[:2, 2, 9] = 3e38, -INF
    return out, lse


def assert_rounded(merged, total):
    """The merge of `hard_to_round` in any out dtype."""
    assert merged[0, 0].isnan().nonzero().flatten().tolist() == [100, 101, 102, 103, 104]
    assert not merged[0, 1:].isnan().any()
    assert not merged[1].isnan().any()
    assert not total.isnan().any()
    assert merged[0, 2, 9] == -INF
    large, got = torch.tensor(3e38), merged[0, 1, 7].cpu()
    if got.dtype == torch.float16:
        assert got == INF
    else:  # two weights that sum to 1, times 3e38
        assert (got.double() - large.double()).abs() <= ulp(large, got.dtype) + 2.0**-18 * 3e38
