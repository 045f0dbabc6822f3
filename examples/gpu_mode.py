"""GPU MODE's `amd-mla-decode` (2025): one decode step of a DeepSeek-R1 layer over a pre-filled, un-rotated cache.

python examples/gpu_mode.py [PREFILL]        batch 128 on a GPU, 2 on a CPU; prefill 512 if none is given

Input x [batch, 1, 7168] and cache [batch, 8192, 576]; results y [batch, 1, 7168] and the cache with the new token.
"""

import sys

import torch

from mla_suite.models import MLA, MLAConfig, PagedLatentCache, cos_sin_table

prefill = int(sys.argv[1]) if len(sys.argv) > 1 else 512
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
batch = 128 if device.type == "cuda" else 2
generator = torch.Generator(device).manual_seed(97)
draw = dict(generator=generator, device=device, dtype=torch.bfloat16)

config = MLAConfig.gpu_mode_2025()
layer = MLA(config, kv_format="bf16", dtype=torch.bfloat16, device=device).requires_grad_(False)
for parameter in layer.parameters():
    parameter.copy_(torch.randn(parameter.shape, **draw) / parameter.shape[-1] ** 0.5)
layer.o_proj.weight.mul_((layer.o_proj.in_features / config.hidden_size) ** 0.5)  # the task divides by sqrt(7168)
cos_sin = cos_sin_table(config, device=device, dtype=torch.bfloat16)

cache, sequences = PagedLatentCache.contiguous(1, batch, config.max_position, device=device)
kv_cache = cache.layers[0]  # [batch, 8192, 576]: a page per sequence
cache.append(sequences, [prefill] * batch)
kv_cache[:, :prefill] = torch.randn(batch, prefill, 576, **draw)

x = torch.randn(batch, 1, config.hidden_size, **draw)
with torch.inference_mode():
    y = layer.decode(x, kv_cache, cache.append(sequences, [1] * batch), cos_sin)
assert kv_cache[:, prefill].any()
print("y", tuple(y.shape), "of a cache", tuple(kv_cache.shape), "filled to", prefill + 1)
