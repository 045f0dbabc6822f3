"""A vLLM attention backend for models whose indexer selects keys (DeepSeek V3.2, GLM-5, GLM-5.3), on our sparse decode.

    # vllm serve <model> --attention-backend MLA_SUITE_SPARSE

The interface is that of vLLM's FlashMLA-sparse and ROCm-AITER-sparse backends: the indexer leaves positions in a buffer
that layers share, and every token, of a prompt or not, goes to `forward_mqa`. vLLM's own builder makes the metadata.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch

import mla_suite
from mla_suite.integrations import FP8, WIDE, needs, refuse, takes_query_parts, widened_rows
from mla_suite.integrations.vllm import MLASuiteAnswers, MLASuiteLayer, joined
from mla_suite.kv_formats import get_kv_format

with needs("vLLM 0.32 or newer", __name__, "sparse_decode from a backend of your own"):
    from vllm import envs
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention.sparse_mla_attention import (
        SparseMLACommonImpl,
        SparseMLACommonMetadata,
        SparseMLACommonMetadataBuilder,
    )
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
    from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

    from mla_suite.integrations import vllm_interface, vllm_widened

RECORDS = "fp8_ds_mla"  # vLLM's name of records, which are our kv_formats v32 and, without rope values, v32_nope
NOPE = get_kv_format("v32_nope")
INVARIANT_SPLIT = 1024  # of a token's selected keys, where vLLM asks for batch-invariant results
LATENT, ROPE = 512, (64, 0)
TILE, LEAST_TILE = 128, 16  # columns of a selection that a program of vLLM's Triton kernel turns into slots


class MLASuiteSparseBackend(MLASuiteAnswers, AttentionBackend):
    """The class that vLLM selects: it says what is supported and names the other two classes."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", RECORDS]

    @staticmethod
    def get_name() -> str:
        return "MLA_SUITE_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[MLASuiteSparseImpl]:
        _check_interface()
        return MLASuiteSparseImpl

    @staticmethod
    def get_builder_cls() -> type[MLASuiteSparseMetadataBuilder]:
        return MLASuiteSparseMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT + rope for rope in ROPE]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """vLLM's description of a layer's cache; it has every record of 656 bytes."""
        spec = super().customize_spec(spec)
        if spec.cache_dtype_str == RECORDS and spec.head_size == NOPE.head_dim:
            return replace(spec, state_content_bytes=NOPE.token_bytes)
        return spec

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class MLASuiteSparseMetadataBuilder(SparseMLACommonMetadataBuilder):
    """vLLM's builder for sparse layers; the class adds what vLLM does with a Triton kernel alone."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls = vllm_widened.MLASuiteSparseMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
            possible = "keys are read from the GPU's cache alone: serve without it, or choose another attention backend"
            refuse("MLASuiteSparseMetadataBuilder", "hisparse_config is set", possible, NotImplementedError)
        # Which keys a token sees is in its selection, so tokens of one request need no order among ranks.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        may = kv_cache_spec.cache_dtype_str == RECORDS and kv_cache_spec.block_size <= vllm_widened.LARGEST_PAGE
        here = torch.empty(0, device=device)
        self._rows_per_token = _rows_per_token(vllm_config, here, heads, self.dcp_world_size) if may else 0
        self._most_rows = vllm_widened.most_rows(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> vllm_widened.MLASuiteSparseMetadata:
        """vLLM's metadata, and the prompts whose keys are widened where vLLM does not prefill them densely."""
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        dense = made.prefill is not None and made.prefill.use_dense_mha
        if self._rows_per_token and made.num_prefills and not dense:
            lens, starts = common_attn_metadata.seq_lens_cpu_upper_bound, common_attn_metadata.query_start_loc_cpu
            made.widened = vllm_widened.prompts_of(made, lens, starts, self._most_rows, self._rows_per_token)
        return made

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> torch.Tensor:
        if self.device.type != "cpu":
            return super()._build_req_id_per_token(common_attn_metadata)
        tokens, ends = common_attn_metadata.num_actual_tokens, common_attn_metadata.query_start_loc[1:]
        owner = torch.searchsorted(ends, torch.arange(tokens, dtype=ends.dtype), right=True)
        made = self.req_id_per_token_buffer[:tokens]
        return made.copy_(owner.clamp(max=ends.shape[0] - 1))


class MLASuiteSparseImpl(MLASuiteLayer, SparseMLACommonImpl):
    """One layer's attention: all tokens that vLLM does not prefill densely go through `mla_suite.sparse_decode`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_lora_rank != LATENT or self.qk_rope_head_dim not in ROPE:
            given = f"rows are of {self.kv_lora_rank} latent and {self.qk_rope_head_dim} rope values"
            possible = "it takes 512 and 64, or 512 alone: choose another attention backend"
            refuse("MLASuiteSparseImpl", given, possible, NotImplementedError)
        if self._stores_nope_records:
            self.supports_dense_mha_prefill = False  # vLLM's gather of a prompt's earlier keys reads 656-byte records
        here = torch.empty(0)  # on the device where models are made
        config = get_current_vllm_config()
        if self.kv_cache_dtype == RECORDS and _rows_per_token(config, here, self.num_heads, self.dcp_world_size):
            self._most_rows = vllm_widened.most_rows(config)
            # Before vLLM counts the memory that is left for the cache.
            vllm_widened.workspace(self._most_rows, self.kv_lora_rank + self.qk_rope_head_dim)

    @property
    def _stores_nope_records(self) -> bool:
        return self.kv_cache_dtype == RECORDS and self.qk_rope_head_dim == 0

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [tokens, heads, 576 or 512] or its two parts; cache [pages, page, width].

        -> out [tokens, heads, 512], lse [tokens, heads]
        """
        cache, kv_format = self._as_stored(kv_c_and_k_pe_cache)
        q_rope = None
        if isinstance(q, tuple):
            rows = cache.dtype in WIDE or attn_metadata.widened  # 16-bit ones, which are gathered
            in_parts = q[1].shape[-1] > 0 and not rows and takes_query_parts(q[0], q[0].shape[1], 1)
            q, q_rope = q if in_parts else (joined(*q), None)
        descale = layer._k_scale.reshape(1) if kv_format in FP8.values() else None
        options: dict[str, Any] = dict(
            kv_descale=descale,
            softmax_scale=self.scale,
            head_dim_v=self.kv_lora_rank,
            split_size=INVARIANT_SPLIT if envs.VLLM_BATCH_INVARIANT else 0,
        )
        if not attn_metadata.widened:
            slots = self._slots(attn_metadata, slice(0, q.shape[0]))
            return mla_suite.sparse_decode(q, [cache], [slots], q_rope=q_rope, kv_formats=[kv_format], **options)
        out = q.new_empty((*q.shape[:2], self.kv_lora_rank))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)

        def attend(tokens: slice, cache: torch.Tensor, kv_format: str, slots: torch.Tensor) -> None:
            into = {"out": out[tokens], "lse": lse[tokens]}
            selected = q[tokens], [cache], [slots], [None], [None]
            torch.ops.mla_suite.sparse_decode.out(*selected, kv_formats=[kv_format], **options, **into)

        for tokens, prompts in vllm_widened.parts(attn_metadata.widened, q.shape[0]):
            slots = self._slots(attn_metadata, tokens, prompts)
            if prompts is None:
                attend(tokens, cache, kv_format, slots)
            else:
                wide = vllm_widened.widen(prompts, cache, kv_format, q.shape[-1], self._most_rows)
                attend(tokens, wide, vllm_widened.FORMAT, slots)
        return out, lse

    def _slots(self, step: Any, tokens: slice, prompts: vllm_widened.Prompts | None = None) -> torch.Tensor:
        """Where the cache, or what some prompts are widened to, has the keys that tokens of a step select."""
        assert self.topk_indices_buffer is not None
        owners, table = step.req_id_per_token[tokens], step.block_table
        if prompts is not None:
            owners, table = owners - prompts.sequences.start, prompts.table
        return selected_slots(
            self.topk_indices_buffer[tokens],
            owners,
            table,
            step.block_size,
            max(self.dcp_world_size, 1),
            self.dcp_rank,
            step.cp_kv_cache_interleave_size,
        )

    def _as_stored(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, str]:
        if self.kv_cache_dtype == RECORDS:
            return kv_cache, NOPE.name if self._stores_nope_records else "v32"
        return super()._as_stored(kv_cache)

    def _theirs_writes(self, kv_cache: torch.Tensor) -> bool:
        return super()._theirs_writes(kv_cache) and not self._stores_nope_records


def _rows_per_token(config: Any, here: torch.Tensor, num_heads: int, ranks: int) -> int:
    """As `widened_rows`; 0 where prompts stay with their records.

    That is where the kernel may not depend on what is in the batch, where a rank has some of the keys, where queries
    are not bf16, and in microbatches: the second one has a workspace of its own, which nobody has asked for when vLLM
    counts its memory.
    """
    if envs.VLLM_BATCH_INVARIANT or ranks > 1 or config.parallel_config.use_ubatching:
        return 0
    return widened_rows(here, num_heads) if config.model_config.dtype == vllm_widened.DTYPE else 0


def selected_slots(
    indices: torch.Tensor,
    req_ids: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    ranks: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> torch.Tensor:
    """int32 [tokens, topk] slots, page x page_size + offset, of the positions that a sequence's tokens select.

    indices     int32 [tokens, topk] positions in the token's sequence; negative selects nothing
    req_ids     int32 [tokens] row of block_table of each token
    block_table int32 [sequences, width]
    ranks, rank, interleave: with decode context parallelism `interleave` positions in a row lie on one of `ranks`
                ranks by turns; a position of another rank, and one past the table, selects nothing here.

    On a GPU it is one Triton kernel of vLLM's, which its own sparse backends launch as well. The dozen kernels of the
    lines in torch below take some 10 us more a layer on an H200.
    """
    tile = math.gcd(indices.shape[1], TILE)
    if current_platform.is_cuda_alike() and tile >= LEAST_TILE:
        slots: torch.Tensor = triton_convert_req_index_to_global_index(
            *(req_ids, block_table, indices),
            BLOCK_SIZE=page_size,
            NUM_TOPK_TOKENS=indices.shape[1],
            BLOCK_N=tile,
            dcp_size=ranks,
            dcp_rank=rank,
            cp_kv_cache_interleave_size=interleave,
        )
        return slots
    own, local = indices >= 0, indices
    if ranks > 1:
        own = own & (indices // interleave % ranks == rank)
        local = indices // (interleave * ranks) * interleave + indices % interleave
    columns = local // page_size
    own = own & (columns < block_table.shape[1])
    pages = block_table[req_ids.long()[:, None], torch.where(own, columns, 0).long()]
    return torch.where(own, pages * page_size + local % page_size, -1).int()


@cache
def _check_interface() -> None:
    """TypeError where this vLLM is not one that the classes above were made for; cheap, and once in a process."""
    interface = vllm_interface.installed("MLASuiteSparseBackend")
    vllm_interface.check_layer(interface, MLASuiteSparseImpl, SparseMLACommonImpl)
    interface.has("AttentionBackend", AttentionBackend, ("customize_spec",))
    vllm_interface.check_sparse_builder(interface, MLASuiteSparseMetadataBuilder, SparseMLACommonMetadataBuilder)
    interface.takes("SparseMLACommonMetadata", SparseMLACommonMetadata, vllm_interface.SPARSE)
    interface.warn_if_newer(stacklevel=3)
