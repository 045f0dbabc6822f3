"""Rotary positions: the table, both pairings of elements, YaRN, and rounding."""

import dataclasses
import math

import pytest
import torch

from mla_suite.models import MLAConfig, Yarn, cos_sin_table, rotate
from mla_suite.models.rope import inverse_frequencies

PLAIN = dataclasses.replace(MLAConfig.tiny(), yarn=None)


def test_table_rows_are_cosines_then_sines():
    table = cos_sin_table(PLAIN, 300)
    assert table.shape == (300, 64)
    assert table.dtype == torch.float32
    for position in (0, 1, 299):
        for pair in (0, 7, 31):
            angle = position / PLAIN.rope_theta ** (pair / 32)
            assert table[position, pair].item() == pytest.approx(math.cos(angle), abs=3e-5)
            assert table[position, 32 + pair].item() == pytest.approx(math.sin(angle), abs=3e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_complex_multiplication(interleaved):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 64, dtype=torch.float64)
    table = cos_sin_table(PLAIN, 5)
    pairs = torch.view_as_complex(x.view(5, 3, 32, 2)) if interleaved else torch.complex(x[..., :32], x[..., 32:])
    turned = pairs * torch.complex(table[:, :32].double(), table[:, 32:].double())[:, None]
    expected = torch.view_as_real(turned).flatten(-2) if interleaved else torch.cat((turned.real, turned.imag), -1)
    got = rotate(x.float(), table[:, None], interleaved=interleaved)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain = dataclasses.replace(MLAConfig.deepseek_r1(), yarn=None)
    kept, stretched = inverse_frequencies(plain), inverse_frequencies(MLAConfig.deepseek_r1())
    ratio = stretched / kept
    # Pairs that turn 32 times and once within 4096 positions: floor(10.47) and ceil(22.51).
    torch.testing.assert_close(ratio[:11], torch.ones(11))
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40))
    assert (ratio[10:24].diff() < 0).all()
    assert ratio[11].item() == pytest.approx((12 / 13) + (1 / 13) / 40, rel=1e-5)


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
