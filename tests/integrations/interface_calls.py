"""A right call of each function of another library's interface, by what is particular about it."""

import torch
from aiter_steps import MADE, Step
from flash_mla_calls import paged

from mla_suite.integrations import aiter, flash_mla, vllm_rocm
from mla_suite.integrations.aiter_metadata import TOPK_MARK
from mla_suite.kv_formats import cache as caches


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense(kv_heads=1):
    cache, table, lens = paged([70, 33], 16, kv_heads=kv_heads)
    given = dict(q=torch.randn(2, 1, 16, 576).bfloat16(), k_cache=cache, block_table=table, cache_seqlens=lens)
    return given | dict(head_dim_v=512, tile_scheduler_metadata=flash_mla.get_mla_metadata()[0], softmax_scale=0.05)


def dense_fp8():
    given = dense()
    given["q"], given["k_cache"] = (given[name].to(torch.float8_e4m3fn) for name in ("q", "k_cache"))
    return given | dict(descale_q=torch.ones(1), descale_k=torch.ones(1), attn_sink=torch.ones(16))


def dense_older():
    given = dense()
    made = flash_mla.get_mla_metadata(given["cache_seqlens"], 16, 1)
    return given | dict(zip(("tile_scheduler_metadata", "num_splits"), made, strict=True))


def dense_again():
    """The arguments of a call that the eager fast path knows."""
    given = dense()
    for _ in range(2):
        flash_mla.flash_mla_with_kvcache(**given)
    return given


def sparse():
    given = dense() | dict(block_table=None, cache_seqlens=None, attn_sink=torch.ones(16))
    extra = dict(extra_k_cache=torch.randn(3, 8, 1, 576).bfloat16(), extra_indices_in_kvcache=chosen(2, 1, 5))
    lengths = dict(topk_length=ints(9, 4), extra_topk_length=ints(5, 0))
    return given | extra | lengths | dict(indices=chosen(2, 1, 9))


def chosen(*shape):
    return torch.randint(0, 24, shape, dtype=torch.int32)


def metadata():
    return dict(cache_seqlens=ints(70, 33), num_q_tokens_per_head_k=16, num_heads_k=1)


def decoding_metadata():
    return dict(seqlens_k=ints(70, 33), num_q_tokens_per_head_k=16, h_k=1)


def prefill():
    given = dict(q=torch.randn(5, 16, 576).bfloat16(), kv=torch.randn(24, 1, 576).bfloat16(), indices=chosen(5, 1, 9))
    return given | dict(sm_scale=0.05, attn_sink=torch.ones(16), topk_length=ints(9, 1, 2, 0, 4), d_v=512)


def step(page_size=1, **options):
    made = Step([40, 23], [1, 1], page_size=page_size, **options)
    return made.named | dict(page_size=page_size, sm_scale=0.05), made


def aiter_planned():
    given, made = step(page_size=16)
    return given | made.metadata()


def aiter_fp8():
    given, _ = step(dtype=torch.float8_e4m3fn, q_dtype=torch.float8_e4m3fn)
    return given | dict(q_scale=torch.ones(1), kv_scale=torch.ones(1), num_kv_splits=2)


def aiter_selected():
    given, made = step()
    given |= dict(kv_indices=chosen(2 * 7), **made.metadata())
    given["work_info_set"][:, 7] = TOPK_MARK + 7
    return given


def aiter_metadata():
    _, made = step(page_size=16)
    sizes = aiter.get_mla_metadata_info_v1(2, 1, 16, torch.bfloat16, torch.bfloat16, is_sparse=False)
    buffers = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]
    given = dict(zip(("work_metadata_ptrs", *MADE[1:]), buffers, strict=True))
    given |= dict(seqlens_qo_indptr=made.qo_indptr, seqlens_kv_indptr=made.kv_indptr, num_heads_per_head_k=16)
    given |= dict(kv_last_page_lens=made.kv_last_page_lens, num_heads_k=1, is_causal=True, page_size=16)
    return given | dict(max_seqlen_qo=1)


def reduce():
    given = dict(partial_output=torch.randn(4, 16, 512), partial_lse=torch.randn(4, 16), reduce_indptr=ints(0, 2, 4))
    given |= dict(reduce_final_map=ints(0, 1, 1, 2).view(2, 2), reduce_partial_map=ints(0, 1, 2, 3), max_seqlen_q=1)
    final = dict(final_output=torch.empty(2, 16, 512).bfloat16(), final_lse=torch.empty(2, 16))
    return given | dict(num_kv_splits=2) | final


def decode_reduce():
    given = dict(partial_output=torch.randn(2, 4, 16, 512), partial_lse=torch.randn(2, 4, 16))
    return given | dict(reduced=torch.empty(2, 16, 512).bfloat16(), kv_indptr=ints(0, 3, 9), T=2, num_splits=4)


def rocm(ragged=False):
    """A step of three tokens, of which the last has no keys; the sinks are more than the rank's heads, as vLLM's."""
    given = dict(q=torch.randn(3, 16, 512).bfloat16(), swa_only=False, scale=0.05, attn_sink=torch.randn(64))
    records = [caches.pack("dsv4", torch.randn(6, page, 512)) for page in (4, 16)]
    given |= dict(kv_cache=records[0], swa_k_cache=records[1], output=torch.full((3, 16, 512), torch.nan).bfloat16())
    given |= dict(head_dim=512, nope_head_dim=448, rope_head_dim=64)
    for pool in ("swa", "topk"):
        pairs = dict(ragged_indices=chosen(9), ragged_indptr=ints(0, 4, 9, 9), indices=None, lens=None)
        rows = dict(ragged_indices=None, ragged_indptr=None, indices=chosen(3, 7), lens=ints(7, 3, 0))
        given |= {f"{pool}_{name}": value for name, value in (pairs if ragged else rows).items()}
    return given


CALLS = {
    "dense": (flash_mla.flash_mla_with_kvcache, dense),
    "dense fp8": (flash_mla.flash_mla_with_kvcache, dense_fp8),
    "dense older": (flash_mla.flash_mla_with_kvcache, dense_older),
    "dense several heads": (flash_mla.flash_mla_with_kvcache, lambda: dense(kv_heads=2)),
    "dense again": (flash_mla.flash_mla_with_kvcache, dense_again),
    "sparse": (flash_mla.flash_mla_with_kvcache, sparse),
    "metadata": (flash_mla.get_mla_metadata, metadata),
    "decoding metadata": (flash_mla.get_mla_decoding_metadata, decoding_metadata),
    "prefill": (flash_mla.flash_mla_sparse_fwd, prefill),
    "aiter": (aiter.mla_decode_fwd, lambda: step()[0]),
    "aiter pages": (aiter.mla_decode_fwd, lambda: step(page_size=16)[0]),
    "aiter planned": (aiter.mla_decode_fwd, aiter_planned),
    "aiter fp8": (aiter.mla_decode_fwd, aiter_fp8),
    "aiter selected": (aiter.mla_decode_fwd, aiter_selected),
    "aiter reduces": (aiter.mla_reduce_decode, lambda: step()[0]),
    "aiter metadata": (aiter.get_mla_metadata_v1, aiter_metadata),
    "reduce": (aiter.mla_reduce_v1, reduce),
    "decode reduce": (aiter.mla_decode_reduce, decode_reduce),
    "rocm": (vllm_rocm.rocm_sparse_attn_decode, rocm),
    "rocm ragged": (vllm_rocm.rocm_sparse_attn_decode, lambda: rocm(ragged=True)),
}
