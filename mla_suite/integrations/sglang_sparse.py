"""An SGLang attention backend for models whose indexer selects keys (DeepSeek V3.2, GLM-5), on our sparse decode.

    # sglang serve --model-path <model> --dsa-decode-backend mla_suite

Installing mla_suite registers it. SGLang's backend for these models stays in place: the indexer, its page tables, the
cache and prefill are SGLang's own, and single tokens, chains of drafts and draft layers end in the kernel that
`--dsa-decode-backend` names. Here that is `mla_suite.sparse_decode`, over 16-bit rows and over the 656-byte records of
`--kv-cache-dtype fp8_e4m3`. Tested with the classes of SGLang 0.5.23, on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch

import mla_suite
from mla_suite.integrations import WIDE, refuse
from mla_suite.integrations.interface import Interface
from mla_suite.integrations.sglang import CALL, TESTED, is_chain

try:
    from sglang import __version__  # type: ignore[import-not-found]  # optional
    from sglang.srt.layers.attention.dsa_backend import (  # type: ignore[import-not-found]  # optional
        DeepseekSparseAttnBackend,
    )
except ImportError as error:
    raise ImportError(
        f"mla_suite.integrations.sglang_sparse needs SGLang 0.5.20 or newer ({error}); install it, or call "
        "mla_suite.sparse_decode from a backend of your own"
    ) from error

NAME = "MLASuiteSparseAttnBackend"
READ = ("device", "token_to_kv_pool", "kv_lora_rank", "qk_rope_head_dim", "dsa_kv_cache_store_fp8", "dsa_decode_impl")
ROUTE = "flashmla_sparse"  # the decode backend of SGLang whose calls reach `_forward_flashmla_sparse`
KERNEL = {"q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale"}
KERNEL_OPTIONS = {"topk_length", "attn_sink"}
OTHERWISE = "choose another --dsa-decode-backend"


class MLASuiteSparseAttnBackend(DeepseekSparseAttnBackend):
    """SGLang's backend with `mla_suite.sparse_decode` in the place of FlashMLA's kernel for 16-bit rows.

    That kernel's arguments are ours: slots of single tokens, -1 for none, and how many slots a token has. Prefill may
    end in it as well, and then stays there. A call reads no tensor on the host, so SGLang's CUDA graphs hold it.
    """

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        interface = _check_interface()
        super().__init__(model_runner, *args, **kwargs)
        interface.has("DeepseekSparseAttnBackend", self, READ)
        self._kv_format = _kv_format(self)
        self._decodes = False
        self.dsa_decode_impl = ROUTE

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """SGLang's own, up to the kernel."""
        self._decodes = True
        return super().forward_decode(*args, **kwargs)

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Verification of drafts and draft layers as `forward_decode`; prefill is SGLang's to its end."""
        mode = forward_batch.forward_mode
        if mode.is_target_verify() and not is_chain(forward_batch.spec_info):
            given = "the drafts are a tree, or sequences have different numbers of them"
            refuse(NAME, given, f"serve with --speculative-eagle-topk 1 and without n-gram drafts, or {OTHERWISE}")
        self._decodes = mode.is_target_verify() or mode.is_draft_extend_v2()
        return super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)

    def _forward_flashmla_sparse(
        self,
        *,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        page_table_1: torch.Tensor,
        sm_scale: float,
        **options: Any,
    ) -> torch.Tensor:
        """q_all [tokens, heads, 576]; kv_cache [slots, 1, width]; page_table_1 int32 [tokens, topk] slots, -1 for none.

        topk_length int32 [tokens]: slots after as many count for nothing; attn_sink fp32 [heads] logits.
        -> [tokens, heads, 512]
        """
        if not self._decodes:
            return super()._forward_flashmla_sparse(
                q_all=q_all,
                kv_cache=kv_cache,
                v_head_dim=v_head_dim,
                page_table_1=page_table_1,
                sm_scale=sm_scale,
                **options,
            )
        lengths, sink = options.pop("topk_length", None), options.pop("attn_sink", None)
        for name, value in options.items():
            if value is not None:
                refuse(NAME, f"{name} is given, which it does not know", OTHERWISE)
        if lengths is not None and len(lengths) != len(q_all):
            lengths = None  # tokens that pad a data-parallel rank have slots, all -1, and no length
        out, _ = mla_suite.sparse_decode(
            q_all,
            [kv_cache.view(-1, self.token_to_kv_pool.page_size, kv_cache.shape[-1])],
            [page_table_1],
            topk_lengths=[lengths],
            attn_sink=sink,
            kv_formats=[self._kv_format],
            softmax_scale=sm_scale,
            head_dim_v=v_head_dim,
        )
        return out


def _check_interface() -> Interface:
    """The installed SGLang; TypeError where it is not one that the class above was made for. Cheap."""
    interface = Interface(NAME, "SGLang", __version__, TESTED, OTHERWISE)
    name, base = "DeepseekSparseAttnBackend", DeepseekSparseAttnBackend
    interface.has(name, base, ("forward_decode", "forward_extend", "_forward_flashmla_sparse"))
    interface.takes(name, base.__init__, ("model_runner",))
    interface.takes(f"{name}.forward_decode", base.forward_decode, CALL)
    interface.takes(f"{name}.forward_extend", base.forward_extend, CALL)
    interface.takes(f"{name}._forward_flashmla_sparse", base._forward_flashmla_sparse, KERNEL, KERNEL_OPTIONS)
    interface.warn_if_newer(stacklevel=3)
    return interface


def _kv_format(backend: Any) -> str:
    """Returns the kv_format of the pool's rows, or refuses a server that sparse_decode does not serve."""
    device = torch.device(backend.device).type
    if device not in ("cuda", "cpu"):
        refuse(NAME, f"the device is {device}", f"it takes GPUs of CUDA and ROCm: {OTHERWISE}")
    ranks = getattr(backend, "dcp_size", 1)
    if ranks > 1:
        given = f"decode context parallelism over {ranks} ranks is not supported"
        refuse(NAME, given, f"serve with --dcp-size 1, or {OTHERWISE}")
    keys = getattr(backend, "dsa_index_kpool", 1)
    if keys > 1:
        refuse(NAME, f"the indexer selects pools of {keys} keys, not single keys", OTHERWISE)
    if (backend.kv_lora_rank, backend.qk_rope_head_dim) != (512, 64):
        given = f"rows are of {backend.kv_lora_rank} latent and {backend.qk_rope_head_dim} rope values"
        refuse(NAME, given, f"it takes 512 and 64: {OTHERWISE}")
    if backend.dsa_kv_cache_store_fp8:
        return "v32"
    dtype = backend.token_to_kv_pool.dtype
    if dtype not in WIDE:  # SGLang stores such rows where prefill is TRT-LLM's, or on ROCm
        possible = "it takes 656-byte records, which follow from --dsa-prefill-backend flashmla_kv, and 16-bit rows"
        refuse(NAME, f"rows are plain {str(dtype).removeprefix('torch.')}", possible)
    return WIDE[dtype]
