"""A Hugging Face DeepSeek model on the latent cache: patch, generate, compare with the unpatched model.

python examples/huggingface.py        needs transformers; a tiny random model, on the CPU in fp32
"""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from mla_suite.integrations.transformers import LatentCache, patch, unpatch

config = DeepseekV3Config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    first_k_dense_replace=2,
    max_position_embeddings=256,
)
torch.manual_seed(0)
model = DeepseekV3ForCausalLM(config).eval()
prompt = torch.randint(256, (2, 12))
options = dict(attention_mask=torch.ones_like(prompt), pad_token_id=0, max_new_tokens=16, do_sample=False)
with torch.inference_mode():
    expected = model.generate(prompt, **options)
    patch(model)
    cache = LatentCache(model, batch=2, max_len=64)
    tokens = model.generate(prompt, past_key_values=cache, **options)
unpatch(model)
assert torch.equal(tokens, expected)
print("16 greedy tokens per prompt, equal to the unpatched model's:", tokens[0, 12:].tolist())
