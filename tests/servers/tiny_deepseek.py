"""A tiny DeepSeek-V3 with random weights, as a checkpoint for a server and as transformers' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, NEW_TOKENS, MAX_LEN = 256, 12, 256
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
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
    "topk_method": "noaux_tc",  # servers ask for the names of the routing, which transformers implies
    "scoring_func": "sigmoid",
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.1,  # ten times the usual, so that logits differ by more than rounding
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LAYERS = SHAPE["num_hidden_layers"]
V32 = SHAPE | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "q_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 128,
}
"""The configuration of a layer with an indexer, of which nothing is computed; index_topk comes on top."""


def save_model(folder: Path, family: str = "V3", **changes: Any) -> transformers.PreTrainedModel:
    """Write a checkpoint with random weights and return its model."""
    torch.manual_seed(0)
    config = getattr(transformers, f"Deepseek{family}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"Deepseek{family}ForCausalLM")(config).float().eval()
    model.save_pretrained(folder)
    return model


def greedy(model: transformers.PreTrainedModel, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """The tokens with which transformers goes on."""
    ids = torch.tensor([prompt])
    options = dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]
