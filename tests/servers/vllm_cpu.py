"""A tiny DeepSeek-V3 with random weights in vLLM's offline engine on a CPU, with our backend or vLLM's own."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tiny_deepseek import MAX_LEN, NEW_TOKENS
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

OURS = "mla_suite.integrations.vllm.MLASuiteBackend"
COMPILATION = {"custom_ops": ["all", "-rotary_embedding"]}
"""vLLM's rotary kernel for CPUs is wrong on the strided views that MLA gives it."""

# What vLLM's selector asks of a backend, beside its kind of cache and of attention: all that ours support.
ASKED = dict(
    head_size=576,
    dtype=torch.bfloat16,
    use_mla=True,
    has_sink=False,
    use_mm_prefix=False,
    use_per_head_quant_scales=False,
    device_capability=None,
    attn_type="decoder",
    use_batch_invariant=True,
    use_adaptive_verification=True,
    use_dcp=True,
)


@contextlib.contextmanager
def engine(folder: Path, *, ours: bool, chunks: int = 0, **settings: Any):
    """An engine on the checkpoint. chunks > 0: prefix caching, and prompts computed `chunks` tokens at a time."""
    patches = contextlib.ExitStack()
    if ours:
        register_backend(AttentionBackendEnum.CPU_MLA, OURS)
    if ours and "kv_cache_dtype" in settings:
        # vLLM 0.33 refuses an fp8 cache with MLA on a CPU before it asks whose backend it is.
        patches.enter_context(
            mock.patch.object(CpuPlatform, "get_attn_backend_cls", classmethod(lambda *_, **__: OURS))
        )
    selector._cached_get_attn_backend.cache_clear()
    check = CpuPlatform.check_and_update_config

    def with_chunks(config: Any) -> None:
        # vLLM switches both off for MLA on a CPU, although its gather of the context runs there.
        check(config)
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = chunks
        config.cache_config.enable_prefix_caching = True

    if chunks:
        patches.enter_context(mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(with_chunks)))
    llm = None
    try:
        with patches:
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
