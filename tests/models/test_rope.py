"""Rotary positions: what of YaRN no model of transformers shows, and rounding."""

import dataclasses
import math

import pytest
import torch

from mla_suite.models import MLAConfig, Yarn, cos_sin_table, rotate

PLAIN = dataclasses.replace(MLAConfig.tiny(), yarn=None)


def test_mscale_reaches_the_table_only_where_the_two_factors_differ():
    yarn = Yarn(factor=4.0, original_max_position=256, mscale=0.707, mscale_all_dim=0.0)
    factor = 0.1 * 0.707 * math.log(4) + 1
    assert yarn.table_factor == pytest.approx(factor)
    table = cos_sin_table(dataclasses.replace(PLAIN, yarn=yarn), 3)
    torch.testing.assert_close(table[0, :32], torch.full((32,), factor))
    assert MLAConfig.deepseek_r1().yarn.table_factor == 1.0


def test_bf16_vectors_are_rotated_in_fp32():
    torch.manual_seed(0)
    x, table = torch.randn(64).bfloat16(), cos_sin_table(PLAIN, 50)[49]
    for interleaved in (True, False):
        exact = rotate(x.float(), table, interleaved=interleaved)
        assert torch.equal(rotate(x, table, interleaved=interleaved), exact.bfloat16())
