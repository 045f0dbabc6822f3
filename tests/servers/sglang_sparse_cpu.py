"""Stand-ins with which SGLang's server runs a model with an indexer on a CPU, beside those of sglang_cpu.py.

Torch code stands for kernels that exist for GPUs alone: the indexer's Hadamard transform and its quantisation to fp8,
and FlashMLA's kernel in prefill. For the indexer's logits and its top-k SGLang has torch code of its own. What follows
the indexer in a decode has no stand-in.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import installed_plugins
import torch

VARIABLES = {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1", "SGLANG_DSA_FUSE_TOPK": "0"}
"""The environment of a server's processes: logits and top-k are SGLang's torch code."""
OPTIONS = {
    "attention_backend": "dsa",  # the default on a GPU
    "dsa_decode_backend": "mla_suite",
    "dsa_prefill_backend": "flashmla_sparse",
    "dsa_topk_backend": "torch",
    "kv_cache_dtype": "bfloat16",
}
PLUGINS = {"indexer": "sglang_sparse_cpu:use_torch", "counting_sparse": "sglang_sparse_cpu:count_calls"}


def rotate_activation(x: torch.Tensor) -> torch.Tensor:
    """Rows times an orthogonal Hadamard matrix."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return x @ matrix * x.shape[-1] ** -0.5


def act_quant(x: torch.Tensor, block_size: int = 128, scale_fmt: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and a scale for each block. SGLang's is in Triton, whose interpreter rounds to e4m3 wrongly."""
    blocks = x.float().unflatten(-1, (-1, block_size))
    scale = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    if scale_fmt is not None:
        scale = scale.log2().ceil().exp2()
    return (blocks / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn), scale


def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int, **rest: Any
) -> tuple[torch.Tensor, None, None]:
    """Attention of each token of a prompt over the rows that are selected for it."""
    outs = []
    for query, row in zip(q.float(), indices[:, 0], strict=True):
        keys = kv[row[row >= 0].long(), 0].float()
        outs.append(torch.softmax(query @ keys.T * sm_scale, -1) @ keys[:, :d_v])
    return torch.stack(outs).to(q.dtype), None, None


class Rope(torch.nn.Module):
    """SGLang's rotary embedding, whose code for CPUs wants a batch of sequences where the indexer gives it tokens."""

    def __init__(self, rope: torch.nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = self.rope(positions[None], *(x.view(1, len(x), -1, x.shape[-1]) for x in (q, k)))
        return queries.view_as(q), keys.view_as(k)


def use_torch() -> None:
    """Entry point: SGLang's indexer and prefill run on this CPU, which passes for a GPU of CUDA's sm_90."""
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    module = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_indexer")
    logits = importlib.import_module("sglang.srt.layers.attention.dsa.utils").resolve_fp8_paged_mqa_logits_fn
    get_rope, indexer = module.get_rope_wrapper, module.Indexer
    module._is_xpu = True  # with which SGLang goes the way of CUDA without CUDA's fused kernels
    module.sgl_fp8_paged_mqa_logits = lambda q, *args, **options: logits()(q.unsqueeze(1), *args, **options)
    module.rotate_activation = rotate_activation
    module.get_rope_wrapper = lambda *args, **options: Rope(get_rope(*args, **options))
    indexer.forward_native = indexer.forward_cuda
    # The indexer's gate is in bf16 whatever the model's dtype is, and torch multiplies no fp32 by it.
    indexer._weights_proj_bf16_in_fp32_out = lambda self, x: x.float() @ self.weights_proj.weight.float().T
    importlib.import_module("sglang.kernels.ops.quantization.act_quant_triton").act_quant = act_quant
    flash_mla = ModuleType("sglang.kernels.ops.attention.flash_mla_interface")  # which imports a library for GPUs
    flash_mla.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    sys.modules[flash_mla.__name__] = flash_mla


def count_calls() -> None:
    """Entry point: write how many keys each token of each call of our sparse decode has, to a file of the process."""
    import mla_suite

    decode = mla_suite.sparse_decode

    def counted(q: torch.Tensor, kv_caches: Any, indices: Any, *args: Any, **options: Any) -> Any:
        keys = (indices[0] >= 0).sum(-1)
        installed_plugins.write_call(keys=keys.tolist(), kv_formats=options["kv_formats"])
        return decode(q, kv_caches, indices, *args, **options)

    mla_suite.sparse_decode = counted
