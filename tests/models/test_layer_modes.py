"""The layer under autocast and over fakes."""

import pytest
import torch
from test_mla import make_layer
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_suite.models import MLAConfig, PagedLatentCache, cos_sin_table


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_autocast_changes_results_by_rounding_alone(kept, cast):
    config = MLAConfig.tiny()
    layer = make_layer(config, kept).requires_grad_(False)
    x, cos_sin = torch.randn(5, config.hidden_size, dtype=kept), cos_sin_table(config, 16)

    def attended(lower):
        cache = PagedLatentCache(1, num_pages=4, page_size=4, kv_format="fp32")
        sequences = [cache.allocate(), cache.allocate()]
        with torch.autocast("cpu", cast, enabled=lower):
            step = cache.append(sequences, [3, 0])
            first = layer.prefill(x[:3], cos_sin, cache.layers[0], step, q_lens=[3, 0])
            step = cache.append(sequences, [1, 1])
            return first, layer.decode(x[3:, None], cache.layers[0], step, cos_sin)

    for found, expected in zip(attended(True), attended(False), strict=True):
        bound = 0.03 * float(expected.float().abs().max())
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=bound)


def test_shapes_follow_from_fakes():
    with FakeTensorMode():
        config = MLAConfig.tiny()
        layer, cos_sin = make_layer(config), cos_sin_table(config, 16)
        cache = PagedLatentCache(1, num_pages=4, page_size=4, kv_format="fp32")
        sequences = [cache.allocate(), cache.allocate()]
        x = torch.empty(5, config.hidden_size)
        step = cache.append(sequences, [3, 2])
        assert layer.prefill(x, cos_sin, cache.layers[0], step, q_lens=[3, 2], prefix=True).shape == x.shape
        step = cache.append(sequences, [1, 1])
        assert layer.decode(x[:2, None], cache.layers[0], step, cos_sin).shape == (2, 1, config.hidden_size)
