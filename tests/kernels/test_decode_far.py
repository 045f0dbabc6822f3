"""decode on AMD reads pages that lie further apart than 32 bits of bytes or elements reach."""

from __future__ import annotations

import decode_grid as grid
import pytest
import torch
from built import require_built

import mla_suite
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

PAGES = 140_000  # of 64 x 576 values: 10.3 GB of address space, or 5.2 GB of fp8, of which a few pages are touched


@pytest.mark.parametrize("heads", [16, 48])
@pytest.mark.parametrize(
    ("arch", "kv_format"), [(arch, name) for arch, fp8 in grid.FP8_FORMATS.items() for name in ("bf16", fp8)]
)
def test_pages_that_lie_far_apart(arch, kv_format, heads):
    require_built(arch)
    args, kwargs = decode_sample((150, 70), heads=heads, kv_format=kv_format, num_splits=1).make(torch.device("cpu"))
    exact = exact_decode(*args, **kwargs)
    near, table = args[1], args[3].clone()
    far = torch.empty(PAGES, *near.shape[1:], dtype=near.dtype)
    places = torch.linspace(0, PAGES - 1, near.shape[0]).long().flip(0)
    far[places] = near
    used = (table >= 0) & (table < near.shape[0])
    table[used] = places[table[used].long()].int()
    with mla_suite.emulate(arch):
        out, lse = grid.decode(arch, [args[0], far, args[2], table, *args[4:]], kwargs)
    grid.assert_within_bound(out, lse, exact)
