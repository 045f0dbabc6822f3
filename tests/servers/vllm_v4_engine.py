"""A small DeepSeek V4 with random weights in vLLM's offline engine on a CPU, vLLM's attention or ours behind it.

Its layers are vLLM's for CPUs. Their metadata is made by vLLM's builders for CUDA, whose fields our class reads; those
for CPUs lack keys that vLLM's own code asks for. Stand-ins: Triton's interpreter, FlashMLA's holder and the memory to
gather into (`vllm_v4_cpu`), and here vLLM's kernel that zeroes blocks, which would take the interpreter a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
import vllm_v4_cpu as v4
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.models.deepseek_v4.cpu import model as model_code
from vllm.v1.worker import utils as worker

from mla_suite.integrations import plugins, vllm_v4
from mla_suite.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata

RATIOS = [1, 4, 128, 4]
KINDS = {1: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
VOCAB, HIDDEN, MAX_LEN = 256, 256, 3072
CONFIG = {
    **{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "dtype": "bfloat16"},
    **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 128},
    **{"o_groups": 4, "o_lora_rank": 64, "sliding_window": v4.WINDOW, "max_position_embeddings": MAX_LEN},
    # 0.32 reads ratios, 0.33 the kinds of the layers
    **{"compress_ratios": [0, *RATIOS[1:]], "layer_types": [KINDS[ratio] for ratio in RATIOS]},
    **{"compress_rates": {KINDS[4]: 4, KINDS[128]: 128}, "rope_theta": 10000.0, "compress_rope_theta": 160000.0},
    # kernels for CPUs: one width of a selection, and routing of 6 in 256 experts
    **{"index_topk": v4.TOPK, "index_n_heads": 64, "index_head_dim": 128},
    **{"n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 64},
    **{"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True},
    **{"routed_scaling_factor": 1.5, "num_hash_layers": 0, "expert_dtype": "bf16", "swiglu_limit": 10.0},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6},
    **{"num_nextn_predict_layers": 0, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0},
        **{"original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
    },
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": v4.DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

_KERNELS = v4.kernels_of(v4.V4)
_THEIRS: Any = model_code.DeepseekV4CPUAttention
_OURS: Any = vllm_v4.attention_class(_KERNELS)


class Call(NamedTuple):
    """What one layer of one step gave, ours and vLLM's, and its tokens."""

    ratio: int
    prompt_tokens: int
    decodes: int  # sequences
    decode_tokens: int  # their last tokens and their drafts
    ours: torch.Tensor  # bf16 [tokens, heads, 512]
    theirs: torch.Tensor


class Attention(_THEIRS):
    """vLLM's layer for CPUs, whose result is vLLM's or that of one of our two ways in. Both are computed."""

    backend_cls, swa_backend_cls = _OURS.backend_cls, _OURS.swa_backend_cls
    _forward_decode, _forward_prefill = _OURS._forward_decode, _OURS._forward_prefill
    way = "theirs"
    calls: ClassVar[list[Call]] = []  # one list for the layers of an engine

    def forward_mqa(self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        super().forward_mqa(q, kv, positions, output)
        metadata = _KERNELS.get_forward_context().attn_metadata
        if metadata is None or Attention.way == "theirs":
            return
        theirs = output.clone()
        output.fill_(torch.nan)
        if Attention.way == "class":
            _OURS.forward_mqa(self, q, kv, positions, output)
        else:
            with mock.patch.object(torch.ops._C, "flash_mla_with_kvcache_cpu", operator):
                super().forward_mqa(q, kv, positions, output)
        step = metadata[self.swa_cache_layer.prefix]
        counts = step.num_prefill_tokens, step.num_decodes, step.num_decode_tokens
        Attention.calls.append(Call(self.compress_ratio, *counts, output.clone(), theirs))


def operator(
    out: torch.Tensor,
    q: torch.Tensor,
    window: torch.Tensor,
    window_slots: torch.Tensor,
    window_page: int,
    compressed: torch.Tensor,
    compressed_slots: torch.Tensor,
    compressed_page: int,
    sink: torch.Tensor,
    scale: float,
) -> None:
    """vLLM's operator for CPUs by ours: caches are [pages, bytes of a page], and slots of -1 select nothing."""
    extra: dict[str, Any] = {}
    if compressed_slots.shape[1]:
        pool = compressed.view(compressed.shape[0], compressed_page, 1, -1)
        extra = dict(extra_k_cache=pool, extra_indices_in_kvcache=compressed_slots.int()[:, None])
    flash_mla_with_kvcache(
        *(q[:, None], window.view(window.shape[0], window_page, 1, -1), None, None, 512, *get_mla_metadata()),
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=window_slots.int()[:, None],
        attn_sink=sink,
        out=out[:, None],
        **extra,
    )


def set_weights(_: Any, model: torch.nn.Module, __: Any) -> None:
    """Random weights with which values stay of the order of 1.

    Logits are bf16 and of the order of 1/2: 0.05 is a few roundings of the larger ones. The router's bias decides which
    experts are chosen more than a value's last bit does.
    """
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            values = 1 + values / 10
        elif name.startswith("lm_head"):
            values /= 2 * HIDDEN**0.5
        elif name.endswith("correction_bias"):
            values *= 4
        elif weight.dim() > 1 and "embed" not in name:
            values /= weight.shape[-1] ** 0.5
        weight.data.copy_(values)


class _Zero:
    """vLLM's kernel that zeroes the blocks that a sequence is given, of every layer."""

    def __getitem__(self, grid: Any) -> Any:
        return self._run

    def _run(self, addresses: torch.Tensor, strides: torch.Tensor, sizes: torch.Tensor, blocks: torch.Tensor, **_: Any):
        for address, stride, size in zip(addresses.tolist(), strides.tolist(), sizes.tolist(), strict=True):
            for block in blocks.tolist():
                ctypes.memset(address + 4 * stride * block, 0, 4 * size)


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[LLM]:
    """An engine that drafts by n-grams."""
    plugins.vllm()  # as vLLM does where this package is installed
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (
        mock.patch.object(model_code, "DeepseekV4CPUAttention", Attention),
        mock.patch.object(DummyModelLoader, "load_weights", set_weights),
        mock.patch.object(_KERNELS, "current_workspace_manager", v4._Workspace),
        mock.patch.object(worker, "_zero_kv_blocks_kernel", _Zero()),
    ):
        llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=MAX_LEN,
            max_num_batched_tokens=MAX_LEN,
            max_num_seqs=8,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
            speculative_config=DRAFTS,
        )
        yield llm
        llm.llm_engine.engine_core.shutdown()


def generate(llm: LLM, batch: list[list[int]], new_tokens: int, way: str) -> tuple[Any, list[Call]]:
    """Of each prompt the (greedy token, distance of the first two logits) that follow, and the calls that gave them."""
    Attention.way, Attention.calls = way, []
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=2)
    done = llm.generate([{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False)
    answers = []
    for request in done:
        found = request.outputs[0]
        first_two = [sorted(place.values(), key=lambda one: one.rank)[:2] for place in found.logprobs]
        answers.append([(i, a.logprob - b.logprob) for i, (a, b) in zip(found.token_ids, first_two, strict=True)])
    return answers, Attention.calls
