"""Verification of drafted tokens: four query tokens per sequence in one decode call, then rejected ones are dropped.

python examples/speculative_step.py
"""

import torch

from mla_suite.models import MLA, MLAConfig, PagedLatentCache, cos_sin_table

DRAFT = 4
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
config = MLAConfig.tiny()
layer = MLA(config, kv_format="bf16", dtype=torch.bfloat16, device=device).requires_grad_(False)
for parameter in layer.parameters():
    parameter.normal_(std=parameter.shape[-1] ** -0.5)
cache = PagedLatentCache(num_layers=1, num_pages=16, page_size=64, device=device)
cos_sin = cos_sin_table(config, 256, device)
sequences = [cache.allocate(), cache.allocate()]
prompts = [40, 9]
x = torch.randn(sum(prompts), config.hidden_size, device=device).bfloat16()
layer.prefill(x, cos_sin, cache.layers[0], cache.append(sequences, prompts), q_lens=prompts)

with torch.inference_mode():
    # The drafts are written and verified together: query token i sees the keys up to and including its own.
    drafts = torch.randn(2, DRAFT, config.hidden_size, device=device).bfloat16()
    step = cache.append(sequences, [DRAFT, DRAFT])
    together = layer.decode(drafts, cache.layers[0], step, cos_sin)

    accepted = [2, 4]  # a sampler decides; the other drafts leave the cache again
    for sequence, prompt, count in zip(sequences, prompts, accepted, strict=True):
        cache.truncate(sequence, prompt + count)

    # The same tokens one by one give the same outputs.
    for sequence, prompt in zip(sequences, prompts, strict=True):
        cache.truncate(sequence, prompt)
    for index in range(DRAFT):
        step = cache.append(sequences, [1, 1])
        alone = layer.decode(drafts[:, index : index + 1], cache.layers[0], step, cos_sin)
        difference = (alone - together[:, index : index + 1]).abs().max() / together.abs().max()
        assert difference < 2e-2, difference
print("four drafts verified at once, equal to one by one; lengths now", step.seq_lens.tolist())
