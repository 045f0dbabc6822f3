"""One DeepSeek-style attention layer: prefill ragged prompts, then decode through torch.compile.

python examples/layer.py        on a GPU if there is one, else on the CPU
"""

import torch

from mla_suite.models import MLA, MLAConfig, PagedLatentCache, cos_sin_table

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
config = MLAConfig.tiny()  # MLAConfig.deepseek_r1().for_rank(8) is one of eight tensor-parallel ranks
layer = MLA(config, kv_format="bf16", dtype=torch.bfloat16, device=device).requires_grad_(False)
for parameter in layer.parameters():
    parameter.normal_(std=parameter.shape[-1] ** -0.5)  # in a real program: layer.load_weights(checkpoint)

cache = PagedLatentCache(num_layers=1, num_pages=32, page_size=64, device=device)
cos_sin = cos_sin_table(config, 1024, device)
sequences = [cache.allocate(), cache.allocate(), cache.allocate()]

prompts = [70, 3, 129]  # tokens per sequence
step = cache.append(sequences, prompts)
x = torch.randn(sum(prompts), config.hidden_size, device=device).bfloat16()
layer.prefill(x, cos_sin, cache.layers[0], step, q_lens=prompts)

decode = torch.compile(layer.decode, fullgraph=True)
with torch.inference_mode():
    for _ in range(4):
        step = cache.append(sequences, [1, 1, 1], width=4)
        x = torch.randn(3, 1, config.hidden_size, device=device).bfloat16()
        out = decode(x, cache.layers[0], step, cos_sin)
print("decoded to lengths", step.seq_lens.tolist(), "with outputs of shape", tuple(out.shape))
