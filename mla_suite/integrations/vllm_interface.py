"""Whether this vLLM has the interface that our two backends were made for; asked when it asks for their classes.

The names are those of vLLM 0.25 to 0.33. A release that takes another one could mean by it what our classes would not
do, so it is refused.
"""

from __future__ import annotations

from typing import Any

from vllm import __version__

from mla_suite.integrations.interface import Interface

TESTED = ("0.25", "0.33")
LAYER = (
    *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"),
    *("logits_soft_cap", "attn_type"),
)
MLA = {
    *("kv_sharing_target_layer_name", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("qk_head_dim", "v_head_dim", "kv_b_proj", "indexer", "q_pad_num_heads", "topk_indices_buffer"),
    "index_group_builder",
}
WRITE = ("kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "k_scale")
FORWARD = ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")
BUILDER = ("kv_cache_spec", "layer_names", "vllm_config", "device")
BUILD = ("common_prefix_len", "common_attn_metadata", "fast_build")
BUILD_DECODE = {
    *("block_table_tensor", "seq_lens_device", "max_seq_len", "query_start_loc_cpu", "query_start_loc_device"),
    *("num_decode_tokens", "dcp_tot_seq_lens_device"),
}
REORDER = ("reorder_batch_threshold", "supports_spec_as_decode", "supports_dcp_with_varlen")
READ = ("scale", "kv_lora_rank", "kv_cache_dtype", "dcp_world_size", "dcp_rank")
DECODE = {"block_table", "seq_lens", "dcp_tot_seq_lens"}
SPARSE = {"block_table", "block_size", "req_id_per_token", "cp_kv_cache_interleave_size"}


def installed(integration: str) -> Interface:
    return Interface(integration, "vLLM", __version__, TESTED, "choose another attention backend")


def check_layer(interface: Interface, own: type, base: Any) -> None:
    """TypeError where vLLM's class `base`, from which ours is derived, is made or called in another way."""
    name = base.__name__
    interface.has(name, base, ("forward_mqa", "do_kv_cache_update"))
    interface.takes(name, base.__init__, LAYER, MLA)
    interface.takes(f"{name}.forward_mqa", base.forward_mqa, FORWARD, ())
    interface.takes(f"{name}.do_kv_cache_update", base.do_kv_cache_update, WRITE, {"skip_scale"})
    interface.implemented(name, own)


def check_builder(interface: Interface, own: type, base: Any) -> None:
    """TypeError where vLLM's builder of metadata for dense layers is made or calls ours in another way."""
    name = base.__name__
    interface.has(name, base, ("build", "_build_decode"))
    interface.takes(name, base.__init__, (*BUILDER, "metadata_cls", "supports_dcp_with_varlen"))
    interface.takes(f"{name}.build", base.build, BUILD)
    interface.takes(f"{name}._build_decode", base._build_decode, BUILD_DECODE, {"max_query_len"})
    interface.implemented(name, own)


def check_sparse_builder(interface: Interface, own: type, base: Any) -> None:
    """The same for sparse layers, whose metadata vLLM's own builder makes."""
    name = base.__name__
    interface.has(name, base, ("_init_reorder_batch_threshold", "_build_req_id_per_token"))
    interface.takes(name, base.__init__, BUILDER)
    interface.takes(f"{name}._init_reorder_batch_threshold", base._init_reorder_batch_threshold, REORDER)
    interface.implemented(name, own)
