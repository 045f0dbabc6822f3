"""A vLLM attention backend for MLA models on our decode. Importable only where vLLM is installed.

    from mla_suite.integrations import plugins
    plugins.vllm()                          # in every process of the server: as an entry point, see the serving guide
    # vllm serve <model> --attention-backend CUSTOM

Prefill, the cache and its writes stay vLLM's; steps of one or a few tokens per sequence (speculative decoding) go to
`mla_suite.decode`, at any page size. Written against vLLM's V1 interface of 2026 (MLACommonBackend and its parts); not
run in a server by this repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import mla_suite
from mla_suite.integrations.dense import KV_FORMATS
from mla_suite.ops.plan import sm_parts

try:
    from vllm import envs  # type: ignore[import-not-found]  # optional
    from vllm.model_executor.layers.attention.mla_attention import (  # type: ignore[import-not-found]  # optional
        MLACommonBackend,
        MLACommonDecodeMetadata,
        MLACommonImpl,
        MLACommonMetadata,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.platforms import current_platform  # type: ignore[import-not-found]  # optional
    from vllm.v1.attention.backend import (  # type: ignore[import-not-found]  # optional
        AttentionCGSupport,
        AttentionType,
        MultipleOf,
    )
except ImportError as error:
    raise ImportError(
        f"mla_suite.integrations.vllm needs vLLM with its V1 MLA backend interface of 2026 ({error}); install vllm, or "
        "call mla_suite.decode from a backend of your own"
    ) from error

INVARIANT_SPLIT = 1024  # keys per split when vLLM asks for batch-invariant results


class MLASuiteBackend(MLACommonBackend):
    """What vLLM asks of a backend's class."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the entry of vLLM's registry that is kept for backends from outside

    @staticmethod
    def get_impl_cls() -> type[MLASuiteImpl]:
        return MLASuiteImpl

    @staticmethod
    def get_builder_cls() -> type[MLASuiteMetadataBuilder]:
        return MLASuiteMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True


@dataclass
class MLASuiteDecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's decode metadata and the step's plan, which all layers share; None in batch-invariant mode."""

    plan: torch.Tensor | None = None


class MLASuiteMetadataBuilder(MLACommonMetadataBuilder):
    """Makes one plan per step, on the device, into a tensor that stays where a captured graph reads it."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.UNIFORM
    # Short prefills decode absorbed. 8 is a choice, not a measurement: longer ones do less work un-absorbed.
    reorder_batch_threshold: int = 8

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, MLACommonMetadata)
        self._plans: dict[tuple[int, int], torch.Tensor] = {}

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> MLASuiteDecodeMetadata:
        batch = seq_lens_device.shape[0]
        if dcp_tot_seq_lens_device is not None and num_decode_tokens > batch:
            raise NotImplementedError(
                f"MLASuiteMetadataBuilder: {num_decode_tokens} query tokens of {batch} sequences with decode context "
                "parallel; a rank's keys carry no positions to mask by: decode one token per sequence"
            )
        plan = None
        if not envs.VLLM_BATCH_INVARIANT:
            rows = self.num_heads * max(num_decode_tokens // batch, 1)
            workers = sm_parts(seq_lens_device, rows)
            made = mla_suite.plan(seq_lens_device, num_heads=rows, num_sm_parts=workers)
            plan = self._plans.setdefault((batch, workers), made)
            if plan is not made:
                plan.copy_(made)
        return MLASuiteDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            plan=plan,
        )


class MLASuiteImpl(MLACommonImpl):
    """One layer's attention: decode through `mla_suite.decode`, all else vLLM's own."""

    can_return_lse_for_decode: bool = True
    # Natural log, as `mla_suite.decode` returns it.
    lse_base_on_e: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        refused = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        given = [name for name, value in refused.items() if value]
        if given:
            raise NotImplementedError(f"MLASuiteImpl: {given[0]} is set; it has none: choose another attention backend")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"MLASuiteImpl: attn_type is {attn_type!r}; it serves decoder self-attention only"
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        # Queries stay in 16 bits beside an fp8 cache: quantising them costs a launch and accuracy.
        self.supports_quant_query_input = False

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [tokens, heads, 576] or its two parts; cache [pages, page, 576]; -> out [tokens, heads, 512], lse."""
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        cache = kv_c_and_k_pe_cache
        fp8 = self.kv_cache_dtype.startswith("fp8")
        if fp8:
            cache = cache.view(current_platform.fp8_dtype())
        decode = attn_metadata.decode
        # Every sequence of a decode batch has as many tokens: QueryLenSupport.UNIFORM.
        batched = queries.unflatten(0, (attn_metadata.num_decodes, -1))
        plan = decode.plan
        out, lse = mla_suite.decode(
            batched,
            cache,
            decode.seq_lens,
            decode.block_table,
            kv_descale=layer._k_scale.reshape(1) if fp8 else None,
            plan=plan,
            softmax_scale=self.scale,
            max_seqlen_q=batched.shape[1],
            head_dim_v=self.kv_lora_rank,
            kv_format=KV_FORMATS[cache.dtype],
            split_size=INVARIANT_SPLIT if plan is None else 0,
        )
        return out.flatten(0, 1), lse.flatten(0, 1)

    _forward_decode = forward_mqa  # its name before 2026
