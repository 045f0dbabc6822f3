"""decode with sliding windows and trees of drafts on the GPU's native kernels, against fp64.

Memory that no query token sees holds NaN, and the table entries of pages before a window are absurd.
"""

from __future__ import annotations

import random

import decode_calls as calls
import decode_grid
import hostile_inputs
import pytest
import torch

from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import Exact, exact_decode

pytestmark = pytest.mark.usefixtures("sm_90_decode")

KINDS = (
    {},
    {"kv_format": "fp16", "dtype": torch.float16},
    {"kv_format": "fp8"},
    {"kv_format": "fp8", "dtype": torch.float8_e4m3fn},
)


def drawn(draw, **mask):
    """A problem of any kind of cache, split and shape."""
    q_len = draw.choice((1, 2, 4, 9, draw.randint(1, 64)))
    heads = draw.choice((1, 8, 16, 20, 128) if q_len < 9 else (1, 2, 16))
    longest = draw.choice((70, 300, 1500, 5000))
    lens = [draw.randint(0, longest) for _ in range(draw.choice((1, 2, 5, 33) if longest < 1000 else (1, 2, 5)))]
    lens[0] = max(lens[0], 1)
    split = draw.choice(
        ({}, {}, {"planned": True}, {"num_splits": draw.randint(1, 9)}, {"split_size": draw.choice((32, 64, 256))})
    )
    options = dict(page=draw.choice((1, 16, 32, 64, 48, 96, 256)), sink=draw.random() < 0.3, varlen=draw.random() < 0.3)
    options["ragged_pages"] = draw.random() < 0.3
    return decode_sample(
        lens, heads=heads, q_len=q_len, seed=draw.randint(0, 999), **options, **split, **draw.choice(KINDS), **mask
    )


def check(sample):
    args, kwargs = sample.make(torch.device("cpu"))
    given = hostile_inputs.hostile(args, kwargs.get("window_left", -1))
    calls.assert_right(*calls.decode(calls.on_gpu(given), kwargs), exact_decode(*args, **kwargs))


@pytest.mark.parametrize("seed", range(40))
def test_windows(seed):
    draw = random.Random(seed)
    window = draw.choice((0, 1, 31, 63, 64, 127, 500, draw.randint(0, 3000)))
    check(drawn(draw, window_left=window, causal=draw.random() < 0.9))


@pytest.mark.parametrize("seed", range(40))
def test_trees(seed):
    check(drawn(random.Random(1000 + seed), tree=True))


def test_three_hundred_random_masks():
    """Words of any bits: what a tree's drafts see need not be their ancestors."""
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        q_len = 1 + seed % 16
        args, kwargs = decode_sample([40 + q_len, q_len, 200, 95, 64], heads=8, q_len=q_len, tree=True, seed=seed).make(
            torch.device("cpu")
        )
        args = list(args)
        args[13] = torch.randint(-(2**63), 2**63 - 1, args[13].shape, generator=generator)
        calls.check_arguments(args, kwargs)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("how", [{"num_splits": 1}, {"num_splits": 3}, {"planned": True}, {"split_size": 64}], ids=str)
def test_a_row_tile_reads_no_key_that_none_of_its_rows_sees(how, options, page):
    """Forty query tokens behind 60 keys: a NaN that is read is in all rows of a tile. The first tokens see none of the
    last keys; in a window of 20 the last tokens see none of the first."""
    for window_left, spoiled, whole in ((-1, (68, 100), (0, 8)), (20, (68, 100), (0, 8)), (20, (40, 72), (32, 40))):
        sample = decode_sample((100,) * 14, q_len=40, page=page, window_left=window_left, **how, **options)
        args, kwargs = sample.make(torch.device("cpu"))
        exact = exact_decode(*args, **kwargs)
        keys = torch.arange(*spoiled)
        nan = 0x7F if args[1].dtype == torch.uint8 else torch.nan
        args[1].view(-1, 576)[(args[3][:, keys // page] * page + keys % page).long()] = nan
        out, lse = calls.decode(calls.on_gpu(args), kwargs)
        seen = slice(None), slice(*whole)
        calls.assert_right(out[seen], lse[seen], Exact(*(part[seen] for part in exact)))


@pytest.mark.parametrize("page", [1, 64])
def test_a_windowed_sequence_has_the_same_bits_in_any_batch(page):
    sample = decode_sample([3000, 700, 64, 2049], page=page, split_size=128, window_left=500, q_len=2)
    args, kwargs = sample.make(torch.device("cuda"))
    out, lse = calls.decode(args, kwargs)
    for b in range(4):
        own = calls.decode(decode_grid.sequences(args, [b]), kwargs)
        assert torch.equal(out[b], own[0][0])
        assert torch.equal(lse[b], own[1][0])
