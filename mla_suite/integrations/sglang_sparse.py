"""An SGLang backend for models whose indexer selects keys (DeepSeek V3.2, GLM-5, GLM-5.3), on our sparse decode.

    # sglang serve --model-path <model> --dsa-decode-backend mla_suite

SGLang's backend for these models stays in place, up to the kernel that `--dsa-decode-backend` names, which is here
`mla_suite.sparse_decode`; docs/vllm_sglang.md says what ends there.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import mla_suite
from mla_suite.integrations import KV_FORMATS, needs, refuse
from mla_suite.integrations.interface import Interface
from mla_suite.integrations.sglang import CALL, TESTED, is_chain

with needs("SGLang 0.5.20 or newer", __name__, "sparse_decode from a backend of your own"):
    from sglang import __version__
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

NAME = "MLASuiteSparseAttnBackend"
READ = ("device", "token_to_kv_pool", "kv_lora_rank", "qk_rope_head_dim", "dsa_kv_cache_store_fp8", "dsa_decode_impl")
ROUTE = "flashmla_sparse"  # the decode backend of SGLang whose calls reach `_forward_flashmla_sparse`
KERNEL = {"q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale"}
KERNEL_OPTIONS = {"topk_length", "attn_sink"}
LOG2_E = math.log2(math.e)  # SGLang merges what the ranks of this backend return as powers of two
RECORDS = {64: "v32", 0: "v32_nope"}  # rope values -> kv_format
OTHERWISE = "choose another --dsa-decode-backend"


class MLASuiteSparseAttnBackend(DeepseekSparseAttnBackend):
    """SGLang's backend with `mla_suite.sparse_decode` in the place of FlashMLA's kernel for 16-bit rows.

    That kernel's arguments are ours: slots of single tokens, -1 for none, and how many slots a token has. Prefill may
    end in it as well, and then stays there. A call reads no tensor on the host, so SGLang's CUDA graphs hold it.

    With decode context parallelism every call, of a prompt too, is of all heads over the keys of this rank, and returns
    (out, lse). Slots are then SGLang's, of all ranks in turns: `localize_dcp_page_table` picks the rank's own.
    """

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        interface = _check_interface()
        super().__init__(model_runner, *args, **kwargs)
        interface.has("DeepseekSparseAttnBackend", self, READ)
        self._kv_format = _kv_format(self)
        self._ranks = getattr(self, "dcp_size", 1)
        if self._ranks > 1:
            interface.has("dsa_backend", dsa_backend, ("localize_dcp_page_table",))
        # SGLang's prefill returns no lse on an H100, and none reads records where pools of keys are selected.
        self._prefills = self._ranks > 1 or (self._pools and self.dsa_kv_cache_store_fp8)
        self._decodes = False
        self._now: tuple[Any, Any] = (None, None)  # the layer that is called, and its selections
        self.dsa_decode_impl = ROUTE
        if self._prefills:
            self.dsa_prefill_impl, self.enable_auto_select_prefill_impl = ROUTE, False

    @property
    def _pools(self) -> bool:
        """Whether the indexer selects pools of keys, and the keys behind the last whole one (GLM-5.3)."""
        return getattr(self, "dsa_index_kpool", 1) > 1

    def forward_decode(self, q: torch.Tensor, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang's own, up to the kernel."""
        self._decodes, self._now = True, (layer, kwargs.get("topk_indices"))
        return super().forward_decode(q, k, v, layer, *args, **kwargs)

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Verification of drafts and draft layers as `forward_decode`; prefill is SGLang's to its end, or as well."""
        mode = forward_batch.forward_mode
        if mode.is_target_verify() and not is_chain(forward_batch.spec_info):
            given = "the drafts are a tree, or sequences have different numbers of them"
            refuse(NAME, given, f"serve with --speculative-eagle-topk 1 and without n-gram drafts, or {OTHERWISE}")
        self._decodes = self._prefills or mode.is_target_verify() or mode.is_draft_extend_v2()
        self._now = layer, kwargs.get("topk_indices")
        return super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)

    def get_topk_transform_method(self, *args: Any, **kwargs: Any) -> Any:
        """How prompts' selections are stated: as slots of the pool where prefill is ours, not of gathered keys."""
        theirs = super().get_topk_transform_method(*args, **kwargs)
        return type(theirs).PAGED if self._prefills else theirs

    def _resolve_kpool_tail_backend(self, topk_indices: Any, dsa_impl: str) -> Any:
        """SGLang sends pools' selections on this route to another kernel; ours counts the keys behind the pools too."""
        return dsa_impl if self._decodes else super()._resolve_kpool_tail_backend(topk_indices, dsa_impl)

    def _check_kpool_tail_backend(self, *args: Any, **kwargs: Any) -> None:
        if not self._decodes:
            super()._check_kpool_tail_backend(*args, **kwargs)

    def _forward_flashmla_sparse(
        self,
        *,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        page_table_1: torch.Tensor,
        sm_scale: float,
        **options: Any,
    ) -> Any:
        """One layer's call; SGLang gives all by keyword.

        q_all [tokens, heads, 576 or 512]; kv_cache [slots, 1, width]
        page_table_1 int32 [tokens, topk]: slots, -1 for none
        topk_length int32 [tokens]: slots after as many count for nothing; attn_sink fp32 [heads] logits.
        -> [tokens, heads, 512]; with several ranks a pair of it and the log2 [tokens, heads] of the sum of exponentials
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
        if self._ranks > 1:
            layer, selected = self._now
            page_table_1, lengths = dsa_backend.localize_dcp_page_table(
                self._dcp_page_table_cache,
                metadata=self.forward_metadata,
                layer_id=layer.layer_id,
                topk_indices=selected,
                page_table=page_table_1,
                dcp_size=self._ranks,
                dcp_rank=self.dcp_rank,
            )
        out, lse = mla_suite.sparse_decode(
            q_all,
            [kv_cache.view(-1, self.token_to_kv_pool.page_size, kv_cache.shape[-1])],
            [page_table_1],
            topk_lengths=[lengths],
            attn_sink=sink,
            kv_formats=[self._kv_format],
            softmax_scale=sm_scale,
            head_dim_v=v_head_dim,
        )
        return (out, lse * LOG2_E) if self._ranks > 1 else out


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
    rope = backend.qk_rope_head_dim
    if backend.kv_lora_rank != 512 or rope not in RECORDS:
        given = f"rows are of {backend.kv_lora_rank} latent and {rope} rope values"
        refuse(NAME, given, f"it takes 512 and 64, or 512 alone: {OTHERWISE}")
    if backend.dsa_kv_cache_store_fp8:
        return RECORDS[rope]
    return KV_FORMATS[backend.token_to_kv_pool.dtype]  # plain fp8 where prefill is TRT-LLM's, or on ROCm, undivided
