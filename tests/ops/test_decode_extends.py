"""In which row tiles decode takes many query tokens on CDNA."""

from __future__ import annotations

import pytest
import torch

from mla_suite import archs
from mla_suite.archs.cdna.extends import START, clocks, workgroup_keys
from mla_suite.archs.gfx942 import Gfx942Config
from mla_suite.core.dispatch import Supported
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample

KIND = ("16bit", "16bit")


def rows_of(arch_name, lens, **options):
    """Rows of the tiles that a call takes where no argument says it."""
    args, kwargs = decode_sample(lens, **options).make(torch.device("cpu"))
    answer = archs.kernels(archs.get(arch_name)).decode(DECODE.problem(*args, **kwargs))
    if not isinstance(answer, Supported):
        pytest.skip(f"{arch_name} is not built: {answer.reason}")
    return answer.config.rows


def test_a_row_tile_has_the_keys_that_its_last_row_sees():
    """64 tokens of 16 heads behind 100 keys are eight tiles of eight tokens."""
    assert workgroup_keys(16, 64, 164, 128, 1).tolist() == list(range(164, 100, -8))


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(("heads", "q_len", "keys", "rows"), [(16, 100, 100, 64), (128, 33, 500, 128), (7, 90, 50, 32)])
def test_splits_divide_the_keys_of_row_tiles(heads, q_len, keys, rows, splits):
    whole, parts = (workgroup_keys(heads, q_len, keys, rows, count) for count in (1, splits))
    assert parts.sum() == whole.sum()
    assert len(parts) == splits * len(whole)
    assert parts.max() < keys / splits + 64


def test_clocks_by_hand():
    """304 compute units run up to 608 equal workgroups in two turns, and more of them in three."""
    arch, cost = archs.get("gfx942"), Gfx942Config.costs
    sizes = dict(heads=128, q_len=64, keys=10_000, width=576, head_dim_v=512)
    two, three = (clocks(cost, arch, KIND, 128, 1, batch, **sizes) for batch in (9, 10))  # 576 and 640 workgroups
    assert two / 2 == pytest.approx(three / 3, rel=0.01)
    key = cost.key_clocks(arch, KIND, 128, 64, 304)
    own = cost.own_bytes(KIND, 128, False) / cost.rate(304) + START
    assert two == pytest.approx(2 * 9_968 * key + 2 * own, rel=0.01)


@pytest.mark.parametrize("arch_name", ["gfx942", "gfx950"])
def test_few_row_tiles_are_smaller_ones(arch_name):
    """256 tokens of 16 heads are 32 tiles of 128 rows, and 4,096 fill the chip with them."""
    assert rows_of(arch_name, (256,), q_len=256) < 128
    assert rows_of(arch_name, (512,) * 64, q_len=512) == 128


@pytest.mark.parametrize(
    "options",
    [{"planned": True}, {"num_splits": 1}, {"split_size": 64}, {"window_left": 50}, {"q_len": 32, "heads": 128}],
    ids=str,
)
def test_calls_that_keep_the_largest_tiles(options):
    """Splits of the caller's, so that a choice of tiles has no part in them; windows; and too few tokens to differ."""
    assert rows_of("gfx942", (256,), **{"q_len": 64, **options}) == 128
