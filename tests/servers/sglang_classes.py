"""SGLang's own backend and pool on a CPU, without its server: what they read of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sglang_cpu  # noqa: F401  # before SGLang
import torch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from mla_suite.models.config import LATENT, ROPE

HEADS = 4
WIDTH = LATENT + ROPE


def runner(page: int, dtype: torch.dtype, *, layers: int = 2, slots: int = 2048, requests: int = 6, **changes: Any):
    """Returns a model runner as far as the backend's constructor reads it, with SGLang's real pool of latents."""
    pool = memory_pool.MLATokenToKVPool(
        size=slots,
        page_size=page,
        dtype=dtype,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    config = SimpleNamespace(
        attention_arch=triton_backend.AttentionArch.MLA,
        context_len=512,
        head_dim=WIDTH,
        v_head_dim=LATENT,
        swa_v_head_dim=LATENT,
        qk_nope_head_dim=128,
        qk_rope_head_dim=ROPE,
        kv_lora_rank=LATENT,
        is_encoder_decoder=False,
        hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3"),
        get_max_num_attention_heads=lambda: HEADS,
        get_num_kv_heads=lambda *sizes: 1,
    )
    return SimpleNamespace(
        use_mla_backend=True,
        page_size=page,
        sliding_window_size=None,
        req_to_token_pool=SimpleNamespace(size=requests, req_to_token=torch.zeros(requests, 512, dtype=torch.int32)),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=None,
        kv_index_translator=changes.pop("translator", SimpleNamespace(reads_are_translated=False)),
        decode_num_tokens_per_req=lambda: 4,
        is_draft_worker=False,
        spec_algorithm=SpeculativeAlgorithm.from_string(changes.pop("algorithm", "EAGLE")),
        model_config=config,
        kv_cache_dtype=dtype,
        dtype=torch.bfloat16,
        device="cpu",
        gpu_id=0,
        **changes,
    )


def settings(
    monkeypatch: Any, *, deterministic: bool = False, dcp_size: int = 1, topk: int = 1, draft_tokens: int = 4
) -> None:
    """The parts of the server's configuration that the backend's constructor asks for."""
    kernel = SimpleNamespace(
        enable_lean_attention=None, triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None
    )
    parts = dict(
        get_spec=SimpleNamespace(
            speculative_num_draft_tokens=draft_tokens, speculative_num_steps=3, speculative_eagle_topk=topk
        ),
        get_exec=SimpleNamespace(
            kernel=kernel,
            dllm=SimpleNamespace(dllm_algorithm=None),
            deterministic=SimpleNamespace(enable_deterministic_inference=deterministic),
        ),
        get_parallel=SimpleNamespace(attn_tp_size=1, attn_dcp_size=dcp_size, attn_dcp_rank=0, dcp_enabled=False),
        get_schedule=SimpleNamespace(chunked_prefill_size=-1),
    )
    for name, part in parts.items():
        monkeypatch.setattr(triton_backend, name, lambda part=part: part)
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: parts["get_parallel"])
    monkeypatch.setattr(triton_backend, "mambaish_config", lambda config: None)
    monkeypatch.setattr(triton_backend, "cuda_graph_fully_disabled", lambda: True)
    monkeypatch.setattr(triton_backend, "get_device_core_count", lambda gpu: 8)


def layer(layer_id: int, k_scale: float | None = None) -> SimpleNamespace:
    """Returns an absorbed RadixAttention as far as the backend reads it."""
    scale = None if k_scale is None else torch.tensor(k_scale)
    return SimpleNamespace(
        layer_id=layer_id,
        tp_q_head_num=HEADS,
        tp_k_head_num=1,
        head_dim=WIDTH,
        qk_head_dim=WIDTH,
        v_head_dim=LATENT,
        scaling=0.07,
        logit_cap=0.0,
        logit_capping_method=None,
        sliding_window_size=-1,
        xai_temperature_len=-1,
        k_scale=scale,
        v_scale=scale,
    )


def drafts(topk: int = 1) -> EagleVerifyInput:
    """Returns SGLang's description of 4 draft tokens per sequence, as far as the backend reads it."""
    unread = dict.fromkeys(
        ("draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    )
    return EagleVerifyInput(
        **unread,
        retrieve_cum_len=None,
        spec_steps=3,
        topk=topk,
        draft_token_num=4,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def batch(
    mode: ForwardMode, lengths: list[int], rows: list[int], slots: torch.Tensor, new: list[int] | None = None
) -> SimpleNamespace:
    """A ForwardBatch's parts: `lengths` as SGLang counts them, of which a prompt has `new` tokens; `slots` where the
    new tokens are written."""
    return SimpleNamespace(
        forward_mode=mode,
        spec_info=drafts() if mode.is_target_verify() else None,
        batch_size=len(lengths),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        req_pool_indices=torch.tensor(rows),
        out_cache_loc=slots,
        out_cache_loc_is_physical=False,
        extend_seq_lens=None if new is None else torch.tensor(new),
        extend_seq_lens_cpu=new,
    )
