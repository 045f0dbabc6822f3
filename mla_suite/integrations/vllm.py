"""A vLLM attention backend for MLA models on our decode. Importable only where vLLM is installed.

    # vllm serve <model> --attention-backend CUSTOM

docs/vllm_sglang.md says what goes to `mla_suite.decode`, what stays vLLM's and what is refused.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch

import mla_suite
from mla_suite.integrations import (
    FP8,
    KV_FORMATS,
    PRECISION,
    absorbed_prompt,
    by_token,
    capturing,
    fp8_query_rows,
    joined_queries,
    needs,
    refuse,
    takes_query_parts,
)

with needs("vLLM with its V1 MLA backend interface of 2026", __name__, "decode from a backend of your own"):
    from vllm import envs
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonBackend,
        MLACommonDecodeMetadata,
        MLACommonImpl,
        MLACommonMetadata,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MLAAttentionImpl, MultipleOf

    from mla_suite.integrations import vllm_interface
    from mla_suite.integrations.vllm_step import MLASuiteDecodeMetadata, divided, prompts_gain, query_lengths

PAGE_SIZE = 64  # native kernels read whole pages of 64 keys by TMA; smaller pages are gathered row by row
JOIN = "concat_mla_q"  # vLLM's operator, of CUDA and ROCm, that joins the parts of 16-bit queries of 512 + 64


class MLASuiteAnswers:
    """Holds the answers that the dense and the sparse backend share; both name it before vLLM's own class."""

    # float32 reaches attention only on a CPU: vLLM's prefill kernels for GPUs take 16-bit types.
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PAGE_SIZE

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_pcp(cls) -> bool:
        # Prefill context parallelism deals queries out in a way that the dense backend has not been tested with, and
        # gathers the sparse one's keys in a workspace of vLLM's, which is not read here.
        return False

    @classmethod
    def supports_dcp(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # With adaptive verification the dense builder passes the device's query lengths on. Sparse layers recognise
        # tokens by their request ids, which vLLM makes on the device.
        return True


class MLASuiteBackend(MLASuiteAnswers, MLACommonBackend):
    """The class that vLLM selects: it says what is supported and names the other two classes."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the entry of vLLM's registry that is kept for backends from outside

    @staticmethod
    def get_impl_cls() -> type[MLASuiteImpl]:
        _check_interface()
        return MLASuiteImpl

    @staticmethod
    def get_builder_cls() -> type[MLASuiteMetadataBuilder]:
        return MLASuiteMetadataBuilder


class MLASuiteMetadataBuilder(MLACommonMetadataBuilder):
    """Says how many query tokens the sequences of a step have; everything else is vLLM's."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.VARLEN
    # Prompts of at most this length go to decode with the others in one call, and longer ones, if it gains, in another.
    reorder_batch_threshold: int = 8

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        if envs.VLLM_BATCH_INVARIANT:
            # The kernel depends on max_seqlen_q, which must be the same in every batch; a higher one would make steps
            # of one token pay for rows that they do not have. vLLM raises it to what speculation needs.
            self.reorder_batch_threshold = 1
        # With decode context parallelism vLLM prefills steps of several query tokens unless a builder takes them.
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, MLACommonMetadata, supports_dcp_with_varlen=True
        )
        vllm_interface.installed(type(self).__name__).has(
            "MLACommonMetadataBuilder", self, ("cp_kv_cache_interleave_size", "reorder_batch_threshold")
        )
        speculation = getattr(vllm_config, "speculative_config", None)
        self._adaptive = bool(getattr(speculation, "enable_adaptive_verification", False))
        self._most_drafts = self.reorder_batch_threshold
        # One call serves a batch-invariant step, one whose drafts move and one of several ranks. Of two microbatches
        # vLLM knows only of prompts above the threshold that they may read what the other one writes.
        parallel = vllm_config.parallel_config
        as_one = envs.VLLM_BATCH_INVARIANT or self._adaptive or self.dcp_world_size > 1 or parallel.use_ubatching
        fp8 = vllm_config.cache_config.cache_dtype.startswith("fp8")
        here = torch.empty(0, device=device)
        longest = 0 if as_one else absorbed_prompt(here, kv_cache_spec.head_size, fp8)
        self.reorder_batch_threshold = self._longest_prompt = max(self._most_drafts, longest)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLACommonMetadata:
        """vLLM's metadata of a step, whose short prompts are absorbed if that takes less time for all of them."""
        gain = prompts_gain(common_attn_metadata, self._most_drafts, self._longest_prompt)
        self.reorder_batch_threshold = self._longest_prompt if gain else self._most_drafts
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        max_query_len: int = 0,
    ) -> MLASuiteDecodeMetadata:
        """vLLM calls this with keywords; it gives `max_query_len`, the bound on query lengths, from 0.31 on."""
        q_len, uniform = query_lengths(query_start_loc_cpu, num_decode_tokens, max_query_len)
        if envs.VLLM_BATCH_INVARIANT:
            q_len = self.reorder_batch_threshold
            uniform = uniform and q_len == 1  # the same kernel for packed queries whatever their lengths
        elif self._adaptive and q_len > 1:
            # The device may have moved drafts from one sequence to another since the host counted them.
            q_len, uniform = max(max_query_len, q_len) if max_query_len else self.reorder_batch_threshold, False
        step = MLASuiteDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            max_seqlen_kv=max_seq_len,
            max_seqlen_q=q_len,
            cu_seqlens_q=None if uniform else query_start_loc_device,
            cp_interleave=self.cp_kv_cache_interleave_size,
        )
        if q_len <= self._most_drafts:
            return step
        return divided(step, self._most_drafts, query_start_loc_cpu, query_start_loc_device, num_decode_tokens)


def _longest(decode: MLASuiteDecodeMetadata, page_size: int) -> int:
    """Returns the length for which a batch-invariant plan has room, and with it decode's partial results.

    The splits lie at the same keys whatever it is. A captured step serves every length that fits the table.
    """
    width = decode.block_table.shape[1] * page_size
    return width if capturing(decode.seq_lens) else max(1, min(decode.max_seqlen_kv, width))


class MLASuiteLayer(MLAAttentionImpl):
    """Shared by the dense and the sparse layer, which name it before vLLM's own class among their bases."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True  # our operators return natural logarithms
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True  # keys dealt in runs, and drafts
    supports_pcp: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(vllm_interface.LAYER, args, strict=False), **kwargs)
        name, possible = type(self).__name__, "choose another attention backend"
        for option in ("alibi_slopes", "sliding_window", "logits_soft_cap", "sinks"):
            value = given.get(option)
            if value is not None and (option == "sinks" or value):
                refuse(name, f"{option} is set", possible, NotImplementedError)
        if given["attn_type"] != AttentionType.DECODER:
            why = f"attn_type is {given['attn_type']!r}, and it serves decoder self-attention only"
            refuse(name, why, possible, NotImplementedError)
        super().__init__(*args, **kwargs)
        vllm_interface.installed(name).has("MLAAttentionImpl", self, vllm_interface.READ)
        self.supports_quant_query_input = False

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write new latents. Where vLLM has no kernel for it, as on a CPU, `mla_suite.append_kv` does.

        skip_scale  from vLLM 0.33 on: fp8 rows are stored undivided, since the layer's scale is 1; k_scale is not read
        """
        if self._theirs_writes(kv_cache):
            given = (skip_scale,) if skip_scale else ()  # releases before 0.33 do not take it
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *given)
        elif kv_cache.numel():
            cache, kv_format = self._as_stored(kv_cache)
            descale = k_scale.reshape(1).float() if kv_format in FP8.values() and not skip_scale else None
            slots = slot_mapping.flatten()
            rows = kv_c_normed[: len(slots)], k_pe.squeeze(1)[: len(slots)]  # rows that pad a batch have no slot
            mla_suite.append_kv(*rows, cache, slots, descale, kv_format=kv_format)

    def _theirs_writes(self, kv_cache: torch.Tensor) -> bool:
        """Returns whether vLLM's kernel writes such caches."""
        return not kv_cache.is_cpu

    def _as_stored(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Returns the cache in the dtype of its values, and its KV format."""
        # vLLM allocates an fp8 cache as bytes.
        cache = kv_cache.view(current_platform.fp8_dtype()) if self.kv_cache_dtype.startswith("fp8") else kv_cache
        return cache, KV_FORMATS[cache.dtype]


class MLASuiteImpl(MLASuiteLayer, MLACommonImpl):
    """One layer's attention: decode through `mla_suite.decode`, all else vLLM's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM asks for it beside an fp8 cache alone, and then quantises queries as it joins their two parts.
        self.supports_quant_query_input = _fp8_queries_are_faster(self.num_heads * self.dcp_world_size)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [tokens, heads, 576] or its two parts; cache [pages, page, 576]; -> out [tokens, heads, 512], lse."""
        parts = q if isinstance(q, tuple) else (q,)
        cache, kv_format = self._as_stored(kv_c_and_k_pe_cache)
        step = attn_metadata.decode
        if step.prompts is None:
            return self._attended(parts, cache, kv_format, step, layer)
        ahead, behind = zip(*(part.tensor_split([step.prompts.first_token]) for part in parts), strict=True)
        out, lse = self._attended(ahead, cache, kv_format, step, layer)
        prompts_out, prompts_lse = self._attended(behind, cache, kv_format, step.prompts, layer)
        return torch.cat((out, prompts_out)), torch.cat((lse, prompts_lse))

    def _attended(
        self,
        parts: tuple[torch.Tensor, ...],
        cache: torch.Tensor,
        kv_format: str,
        decode: MLASuiteDecodeMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse of the queries of a step, or of one of its two calls, in one or in two parts."""
        queries = parts[0]
        several_ranks = decode.dcp_tot_seq_lens is not None
        split_size = 0
        if decode.batch_invariant:
            split_size = mla_suite.batch_invariant_split_size(queries.shape[-2], decode.max_seqlen_q)
        if decode.planned and decode.plan is None:
            if not (several_ranks or split_size):
                given = by_token.Batch(decode.seq_lens, decode.block_table, decode.cu_seqlens_q, decode.max_seqlen_q)
                taken = by_token.arranged(given, *queries.shape[:2])
                decode.seq_lens, decode.block_table, decode.cu_seqlens_q, decode.max_seqlen_q = taken
            decode.plan = mla_suite.plan(
                decode.seq_lens,
                num_heads=queries.shape[-2],
                max_seqlen_q=decode.max_seqlen_q,
                max_seqlen_kv=_longest(decode, cache.shape[1]) if split_size else 0,
                split_size=split_size,
            )
        heads, packed = queries.shape[-2], decode.cu_seqlens_q is not None
        if len(parts) > 1 and (cache.dtype in FP8 or not takes_query_parts(queries, heads, decode.max_seqlen_q)):
            parts = (joined(*parts),)
        if not packed:
            parts = tuple(part.unflatten(0, (decode.seq_lens.shape[0], -1)) for part in parts)
        out, lse = mla_suite.decode(
            parts[0],
            cache,
            decode.seq_lens,
            decode.block_table,
            cu_seqlens_q=decode.cu_seqlens_q,
            q_descale=layer._q_scale.reshape(1) if queries.dtype in FP8 else None,
            kv_descale=layer._k_scale.reshape(1) if kv_format in FP8.values() else None,
            plan=decode.plan,
            q_rope=parts[1] if len(parts) > 1 else None,
            # Also for one query token: vLLM's lengths of a rank may count drafts that were rejected since.
            cp_tot_seq_lens=decode.dcp_tot_seq_lens,
            softmax_scale=self.scale,
            max_seqlen_q=decode.max_seqlen_q,
            max_seqlen_kv=0 if decode.planned else decode.max_seqlen_kv,
            head_dim_v=self.kv_lora_rank,
            kv_format=kv_format,
            split_size=split_size,
            cp_world_size=self.dcp_world_size if several_ranks else 1,
            cp_rank=self.dcp_rank if several_ranks else 0,
            cp_interleave=decode.cp_interleave,
            precision=PRECISION,
        )
        return (out, lse) if packed else (out.flatten(0, 1), lse.flatten(0, 1))


def joined(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """`joined_queries` with vLLM's kernel, where this release and GPU have it."""
    known = current_platform.is_cuda_alike() and hasattr(torch.ops._C_cache_ops, JOIN)
    return joined_queries(latent, rope, _join if known else None)


def _join(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    made = latent.new_empty((*latent.shape[:2], latent.shape[-1] + rope.shape[-1]))
    getattr(torch.ops._C_cache_ops, JOIN)(latent, rope, made)
    return made


def _fp8_queries_are_faster(heads: int) -> bool:
    """Whether it is so for a token, with as many drafts as the server verifies, on the device where models are made."""
    here = torch.empty(0)
    if fp8_query_rows(here, PAGE_SIZE) is None:
        return False
    config = get_current_vllm_config()
    # Where the user gives no page size, vLLM enters the preferred one only after it has made the layers.
    given = getattr(config.cache_config, "user_specified_block_size", False)
    rows = fp8_query_rows(here, config.cache_config.block_size if given else PAGE_SIZE)
    drafts = getattr(config.speculative_config, "num_speculative_tokens", 0) or 0
    # Results for fp8 queries are bfloat16, which vLLM goes on with in the model's own type.
    return config.model_config.dtype == torch.bfloat16 and rows is not None and heads * (1 + drafts) >= rows


@cache
def _check_interface() -> None:
    """TypeError where this vLLM is not one that the classes above were made for; cheap, and once in a process."""
    interface = vllm_interface.installed("MLASuiteBackend")
    vllm_interface.check_layer(interface, MLASuiteImpl, MLACommonImpl)
    vllm_interface.check_builder(interface, MLASuiteMetadataBuilder, MLACommonMetadataBuilder)
    interface.takes("MLACommonDecodeMetadata", MLACommonDecodeMetadata, vllm_interface.DECODE, ())
    interface.takes("MLACommonMetadata", MLACommonMetadata, {"num_decodes", "decode"})
    interface.warn_if_newer(stacklevel=3)
