"""Small Hugging Face DeepSeek models with random weights, and prompts for them."""

import torch
import transformers

PROMPT, VOCAB = 11, 96
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
KINDS = {
    "v3": ("V3", {"rope_parameters": YARN}),
    "v3 half rope, direct q, bias": ("V3", {"rope_interleave": False, "q_lora_rank": None, "attention_bias": True}),
    "v2": ("V2", {}),
    "v2 yarn": ("V2", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
}


def make_model(kind, dtype=torch.float32, **changes):
    family, own = KINDS[kind]
    config = getattr(transformers, f"Deepseek{family}Config")(**(SMALL | own | changes))
    torch.manual_seed(0)
    model = getattr(transformers, f"Deepseek{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name and name.endswith(("bias", "norm.weight")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def left_padded():
    """Three prompts of different lengths in one batch."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (3, PROMPT))
    mask = (torch.arange(PROMPT) >= PROMPT - torch.tensor([[PROMPT], [4], [9]])).long()
    return ids * mask, mask
