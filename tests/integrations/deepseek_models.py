"""Small Hugging Face DeepSeek models with random weights, and prompts for them."""

import torch
import transformers
from latent_models import MISTRAL4_ROPE, TINY, VOCAB

PROMPT = 11
YARN = {name: MISTRAL4_ROPE[name] for name in list(MISTRAL4_ROPE)[:8]}
YARN |= {"factor": 4.0, "original_max_position_embeddings": 64}
SMALL = TINY | {"num_hidden_layers": 3, "v_head_dim": 32}
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
