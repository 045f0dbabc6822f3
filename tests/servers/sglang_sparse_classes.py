"""SGLang's own backend and pool for models with an indexer, on a CPU that passes for a GPU of CUDA's sm_90.

Its configuration is published as SGLang's own tests publish one, and its Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import sglang_classes  # before SGLang
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache import memory_pool
from sglang.srt.runtime_context import get_context, get_parallel

from mla_suite.models.config import LATENT, ROPE

HEADS, PAGE, LAYERS = 4, 64, 2
WIDTH = LATENT + ROPE
RECORDS = {64: ("v32", 656), 0: ("v32_nope", 528)}  # rope values -> our name of a row of an fp8 cache, and its bytes
CONTEXT, REQUESTS, SLOTS, DRAFTS, TOPK = 512, 6, 2048, 4, 16
SERVER = {
    "dsa_decode_backend": "mla_suite",
    "dsa_prefill_backend": "flashmla_sparse",
    "speculative_num_draft_tokens": DRAFTS,
    "speculative_eagle_topk": 1,
}


@contextlib.contextmanager
def server(monkeypatch: Any, *, fused: bool = True, ranks: int = 1, rank: int = 0, **options: Any) -> Iterator[Any]:
    """The configuration of a server that was started with `options`, in one of `ranks` that share every context.

    `fused`: the indexer's top-k gives slots, as it does on GPUs, and not positions. Its plan has a CUDA kernel alone.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", visible)
    with (
        get_context().override_server_args(**{**SERVER, **options}) as server_args,
        get_parallel().override(attn_dcp_rank=rank, attn_dcp_size=ranks),
        envs.SGLANG_DSA_FUSE_TOPK.override(fused),
        envs.SGLANG_OPT_USE_TOPK_V2.override(False),
    ):
        yield server_args


def visible(q_lens: torch.Tensor, lengths: torch.Tensor, tokens: int, bound: int) -> torch.Tensor:
    """SGLang's kernel that refuses tensors of a CPU: how many keys each of a sequence's last tokens sees."""
    seen = [torch.arange(n - q, n) + 1 for n, q in zip(lengths.tolist(), q_lens.tolist(), strict=True)]
    return torch.cat(seen).int()


def runner(dtype: torch.dtype, *, device: str = "cpu", **model: Any) -> SimpleNamespace:
    """Returns a model runner as far as the backend reads it, with SGLang's pool: rows of `dtype`, or fp8 records.

    `model` changes the model's configuration; kv_cache_dim is the pool's.
    """
    fp8 = dtype == torch.float8_e4m3fn
    sizes = dict(kv_lora_rank=LATENT, qk_rope_head_dim=model.pop("qk_rope_head_dim", ROPE))
    rope, keys = sizes["qk_rope_head_dim"], model.pop("index_kpool", 1)
    width = RECORDS[rope][1] if fp8 and rope in RECORDS else LATENT + rope
    pool = memory_pool.DSATokenToKVPool(
        **sizes,
        size=SLOTS,
        page_size=PAGE * keys,
        index_kpool=keys,
        dtype=dtype,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=model.pop("kv_cache_dim", width),
    )
    hf_config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=TOPK, index_kpool=keys)
    config = dict(hf_config=hf_config, context_len=CONTEXT, num_attention_heads=HEADS, qk_nope_head_dim=128, **sizes)
    return SimpleNamespace(
        device=device,
        page_size=PAGE * keys,
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(
            size=REQUESTS, req_to_token=torch.zeros(REQUESTS, CONTEXT, dtype=torch.int32)
        ),
        model_config=SimpleNamespace(**{**config, **model}),
        is_draft_worker=False,
        hisparse_coordinator=None,
        kv_cache_dtype=dtype,
        max_running_requests=REQUESTS,
    )


def backend(model_runner: Any) -> Any:
    """Returns what SGLang makes of `--attention-backend dsa`."""
    return ATTENTION_BACKENDS["dsa"](model_runner)


def layer(layer_id: int, width: int = WIDTH) -> SimpleNamespace:
    """Returns an absorbed RadixAttention as far as the backend reads it."""
    made = sglang_classes.layer(layer_id)
    made.head_dim, made.is_cross_attention = width, False
    return made


def batch(mode: Any, lengths: list[int], q_lens: list[int], rows: list[int], slots: torch.Tensor, drafts: Any) -> Any:
    """A ForwardBatch's parts: `lengths` as SGLang counts them, `slots` where the new tokens are written."""
    made = sglang_classes.batch(mode, lengths, rows, slots)
    made.__dict__.update(
        spec_info=drafts if mode.is_target_verify() else None,
        seq_lens_sum=sum(lengths),
        global_num_tokens_cpu=None,
        attn_cp_metadata=None,
        extend_seq_lens=torch.tensor(q_lens, dtype=torch.int32),
        extend_seq_lens_cpu=q_lens,
        extend_num_tokens=sum(q_lens),
        extend_prefix_lens_cpu=[n - q for n, q in zip(lengths, q_lens, strict=True)],
        get_max_chunk_capacity=lambda: 0,
    )
    return made
