"""Configurations of layers: published numbers, heads of a rank, and sizes that are refused."""

import dataclasses
import math

import pytest

from mla_suite.models import PRESETS, MLAConfig, Yarn


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_heads_split_over_ranks(name, tp_size):
    config = PRESETS[name]()
    rank = config.for_rank(tp_size)
    assert rank.num_heads * tp_size == config.num_heads
    assert dataclasses.replace(rank, num_heads=config.num_heads) == config


def test_presets_have_the_published_scales():
    yarn_factor = (0.1 * math.log(40) + 1) ** 2
    assert MLAConfig.deepseek_r1().softmax_scale == pytest.approx(192**-0.5 * yarn_factor, rel=1e-12)
    assert MLAConfig.kimi_k2().softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2, rel=1e-12)
    assert dataclasses.replace(MLAConfig.deepseek_r1(), yarn=None).softmax_scale == pytest.approx(192**-0.5)


def test_configs_are_hashable():
    assert hash(MLAConfig.tiny()) == hash(MLAConfig.tiny())


def test_any_number_of_ranks_that_divides_the_heads():
    assert MLAConfig.deepseek_r1().for_rank(16).num_heads == 8
    assert dataclasses.replace(MLAConfig.kimi_k2(), num_heads=96).for_rank(6).num_heads == 16


@pytest.mark.parametrize("tp_size", [0, -1, 8])
def test_heads_that_do_not_split_are_refused(tp_size):
    with pytest.raises(ValueError, match=f"12 heads do not split over {tp_size} ranks"):
        dataclasses.replace(MLAConfig.tiny(), num_heads=12).for_rank(tp_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 384}, r"kv_lora_rank 384 and qk_rope_head_dim 64; a cached token is 512 \+ 64, 512 \+ 0"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim 32; a cached token is"),
        ({"num_heads": 0}, "num_heads 0; it must be 1 or more"),
        ({"q_lora_rank": 0}, "q_lora_rank 0; give a positive rank"),
        ({"cache_rotated": False}, "set rope_interleaved=False"),
    ],
)
def test_sizes_outside_the_cached_token_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MLAConfig.tiny(), **changes)


def test_impossible_yarn_is_refused():
    with pytest.raises(ValueError, match=r"factor 0\.5; a stretch is 1 or more"):
        Yarn(factor=0.5, original_max_position=4096)
