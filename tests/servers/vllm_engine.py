"""A tiny DeepSeek-V3 with random weights in vLLM's offline engine on a CPU, with our backend or vLLM's own."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

VOCAB, NEW_TOKENS, MAX_LEN = 256, 12, 256
OURS = "mla_suite.integrations.vllm.MLASuiteBackend"
COMPILATION = {"custom_ops": ["all", "-rotary_embedding"]}
"""vLLM's rotary kernel for CPUs is wrong on the strided views that MLA gives it."""
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
    "topk_method": "noaux_tc",  # vLLM asks for the names of the routing, which transformers implies
    "scoring_func": "sigmoid",
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.1,  # ten times the usual, so that logits differ by more than rounding
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def save_model(folder: Path) -> transformers.PreTrainedModel:
    """Write a checkpoint with random weights and return its model."""
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SHAPE)).float().eval()
    model.save_pretrained(folder)
    return model


def greedy(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """The tokens with which transformers goes on."""
    ids = torch.tensor([prompt])
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@contextlib.contextmanager
def engine(folder: Path, *, ours: bool, chunks: int = 0, **settings: Any):
    """An engine on the checkpoint. chunks > 0: prefix caching, and prompts computed `chunks` tokens at a time."""
    if ours:
        register_backend(AttentionBackendEnum.CPU_MLA, OURS)
    selector._cached_get_attn_backend.cache_clear()
    check = CpuPlatform.check_and_update_config

    def with_chunks(config: Any) -> None:
        # vLLM switches both off for MLA on a CPU, although its gather of the context runs there.
        check(config)
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = chunks
        config.cache_config.enable_prefix_caching = True

    patched = mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(with_chunks))
    llm = None
    try:
        with patched if chunks else contextlib.nullcontext():
            llm = LLM(
                str(folder),
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=MAX_LEN,
                max_num_seqs=8,
                enforce_eager=True,
                attention_backend="CPU_MLA",
                disable_log_stats=True,
                seed=0,
                compilation_config=COMPILATION,
                **settings,
            )
        yield llm
    finally:
        if ours:
            AttentionBackendEnum.CPU_MLA.clear_override()
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def sampling(new_tokens: int = NEW_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=0)


def generate(llm: LLM, batch: list[list[int]], new_tokens: int = NEW_TOKENS) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of each prompt, and their log-probabilities."""
    done = llm.generate([{"prompt_token_ids": ids} for ids in batch], sampling(new_tokens), use_tqdm=False)
    tokens = [list(request.outputs[0].token_ids) for request in done]
    logprobs = [
        [place[token].logprob for place, token in zip(request.outputs[0].logprobs, ids, strict=True)]
        for request, ids in zip(done, tokens, strict=True)
    ]
    return tokens, torch.tensor(logprobs)
