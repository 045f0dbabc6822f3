"""Which tile and how many splits decode in Triton takes, from metadata alone."""

import pytest
import torch

from mla_suite import archs as arch
from mla_suite.core import register
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.ops.decode import triton as decode
from mla_suite.ops.decode.samples import decode_sample

H200 = arch.get("sm_90")


@pytest.mark.parametrize(
    ("lens", "heads", "q_len", "options", "rows"),
    [
        ([64], 128, 1, {}, 16),  # 8 tiles of 16 rows in eight splits each are 64 blocks of 132
        ([64], 128, 1, {"planned": True}, 64),  # a plan has an SM part for every compute unit as it is
        ([64], 128, 1, {"split_size": 256}, 64),  # batch-invariant: it may not see that the batch is small
        ([64] * 2, 128, 1, {}, 16),
        ([64] * 3, 128, 1, {}, 64),
        ([64], 32, 4, {}, 16),
        ([64] * 16, 32, 1, {}, 32),
        ([64] * 128, 16, 1, {}, 16),
    ],
)
def test_small_tiles_where_compute_units_would_be_idle(lens, heads, q_len, options, rows):
    args, kwargs = decode_sample(lens, heads=heads, q_len=q_len, **options).make(torch.device("cpu"))
    answer = decode.supports(register.get("decode").problem(*args, **kwargs), H200)
    assert isinstance(answer, Supported)
    assert answer.config.rows == rows


@pytest.mark.parametrize(
    ("blocks", "bound", "splits"),
    [
        (1, 8192, 32),  # the best of 16, 32 and 64 on an H200
        (32, 1024, 4),  # likewise
        (8, 4096, 16),  # likewise
        (128, 4096, 1),
        (1, 64, 1),
        (1, 0, 1),
        (1, 1024, 8),
        (200, 1024, 1),
    ],
)
def test_splits(blocks, bound, splits):
    assert decode._splits(blocks, bound, 132) == splits


@pytest.mark.parametrize(("latent", "rope"), [(8, 32), (64, 16), (48, 32), (64, 48)])
def test_widths_that_it_does_not_read_are_said(latent, rope):
    args, kwargs = decode_sample([64], heads=16, latent=latent, rope=rope).make(torch.device("cpu"))
    answer = decode.supports(register.get("decode").problem(*args, **kwargs), H200)
    given = f"head_dim_v {latent} and {rope} further values; both must be powers of two, at least 16 and 32"
    assert answer == Unsupported(given)


def test_every_cut_has_keys():
    for bound in range(1, 5000, 37):
        for blocks in (1, 3, 8):
            splits = decode._splits(blocks, bound, 132)
            granules = -(-bound // 64)
            assert (splits - 1) * -(-granules // splits) < granules
