"""Calls of other libraries' functions that are refused: each in a sentence of its own and before a write."""

import pytest
import torch
from interface_calls import CALLS, ints

WORKS = dict(work_meta_data=torch.zeros(2, dtype=torch.int64), work_indptr=ints(*[0] * 9))
WORKS |= dict(work_info_set=torch.zeros(11, 8, dtype=torch.int32))
INDICES = torch.zeros(2, 1, 4, dtype=torch.int32)
FIRST_OF_TWO = "tile_scheduler_metadata is a {}; it takes the first of the two"
SEVERAL = "dense several heads"
QUANTISED = torch.empty(0), torch.empty(0)
NO_SPLITS = dict(partial_output=torch.zeros(2, 0, 16, 512), partial_lse=torch.zeros(2, 0, 16), num_splits=0)
# The call, what is changed in it, and what is said.
REFUSED = [
    ("aiter", dict(logit_cap=30.0), "scores are not capped"),
    ("aiter", dict(nhead_kv=2), "1 KV head"),
    ("aiter", dict(cp_world_size=2, cp_rank=1), "context parallel is not supported"),
    ("aiter", dict(return_logits=True), "leave no partial results"),
    ("aiter", dict(page_size=16), "page_size is 16"),
    ("aiter", dict(kv_buffer=torch.zeros(9, 2, 1, 576), page_size=2, kv_last_page_lens=None), "kv_last_page_lens is"),
    ("aiter", dict(work_meta_data=torch.zeros(2, dtype=torch.int64)), "all that get_mla_metadata_v1 filled"),
    ("aiter", WORKS | dict(work_info_set=WORKS["work_info_set"][:0]), r"work_info_set has shape \(0, 8\) and work"),
    ("aiter", WORKS | dict(work_indptr=ints(0)), r"\(1,\); they take what get_mla_metadata_v1 filled"),
    ("aiter", WORKS | dict(work_info_set=torch.zeros(11, 8)), "work_info_set is torch.float32; it takes int32"),
    ("aiter", WORKS | dict(work_indptr=ints(0).long()), "work_indptr is torch.int64; it takes int32"),
    ("aiter", dict(kv_buffer=torch.zeros(9, 64, 1, 656).byte(), page_size=64), "three-buffer and packed"),
    ("aiter", dict(o=torch.full((2, 16, 512), torch.nan).half()), "mla_decode_fwd: o is torch.float16"),
    ("aiter", dict(kv_indptr=torch.tensor(3)), "kv_indptr has no dimension"),
    ("aiter", dict(q=torch.tensor(3)), "q has no dimension"),
    ("aiter", dict(logit_cap=None), "logit_cap is None; scores are not capped: pass 0"),
    ("aiter", dict(cp_world_size=None), "cp_world_size is None; it takes an int"),
    ("aiter", dict(page_size=torch.ones(2)), r"page_size is tensor\(\[1., 1.\]\); it takes an int"),
    ("aiter selected", dict(kv_indices=ints(*[0] * 13)), "2 query tokens and topk 7 need 14"),
    ("aiter selected", dict(kv_buffer=torch.zeros(9, 1, 1, 576).to(torch.float8_e4m3fn)), "bf16, fp16 or fp32 pages"),
    ("aiter selected", dict(qo_indptr=ints(0, 1)), r"qo_indptr has shape \(2,\); it takes \[batch \+ 1\] = \(3,\)"),
    ("aiter selected", dict(qo_indptr=ints(0, 1, 2).long()), "qo_indptr is int64; it takes int32"),
    ("aiter metadata", dict(topk=2048), "topk is 2048 and page_size 16"),
    ("aiter metadata", dict(topk=65536, page_size=1), r"topk is 65536; it takes 0\.\.65535"),
    ("aiter metadata", dict(is_cp_round_robin=True), "round-robin"),
    ("aiter metadata", dict(topk=4, page_size=1, reduce_final_map=torch.zeros(3, 2).int()), "3 sequences and 8 SM"),
    ("aiter metadata", dict(work_info_set=torch.zeros(9, 8).int()), "2 sequences and 8 SM parts need 10"),
    ("aiter metadata", dict(kv_last_page_lens=16), "kv_last_page_lens is 16; it is the third argument, a tensor"),
    ("decode reduce", dict(batch=3), "batch is 3"),
    ("decode reduce", dict(batch=2, vec=8), "vec is 8"),
    ("decode reduce", dict(T=3), "with T = 3"),
    ("decode reduce", dict(num_splits=5), r"\(2, 5, 16, 512\)"),
    ("decode reduce", dict(partial_lse=torch.zeros(2, 16, 4)), r"\(2, 16, 4\); they take .* and the same without"),
    ("decode reduce", NO_SPLITS, "num_splits is 0; a query token has 1 or more"),
    ("decode reduce", dict(partial_output=torch.zeros(4, 2, 16, 512).transpose(0, 1)), "has strides .* side by side"),
    ("dense", dict(block_table=None), "dense attention needs both"),
    ("dense", dict(indices=INDICES, causal=True), "pass causal=False"),
    ("dense", dict(is_fp8_kvcache=True), "the two must agree"),
    ("dense", dict(k_cache=torch.zeros(2, 64, 1, 576).byte()), "1-byte records of 656"),
    ("dense", dict(k_cache=torch.zeros(2, 64, 576).bfloat16()), r"\[num_pages, page_size, 1, width\]"),
    ("dense", dict(topk_length=ints(1, 1)), "sparse argument is given without indices"),
    ("dense", dict(extra_k_cache=torch.zeros(2, 64, 1, 576)), "pass both or neither"),
    ("dense", dict(indices=INDICES, extra_topk_length=ints(1, 1)), "without an extra pool"),
    ("dense", dict(num_splits=ints(0, 0, 0)), "the holder has the splits"),
    ("dense", dict(tile_scheduler_metadata=torch.zeros(4, 7).int()), r"int32 \[parts, 8\]"),
    ("dense", dict(tile_scheduler_metadata=None), FIRST_OF_TWO.format("NoneType")),
    ("dense", dict(indices=INDICES, num_splits=ints(0, 0, 0)), "the holder has the splits"),
    ("dense", dict(indices=INDICES, tile_scheduler_metadata=7), FIRST_OF_TWO.format("int")),
    ("dense", dict(indices=INDICES, num_splits=ints(0), tile_scheduler_metadata=None), FIRST_OF_TWO.format("NoneType")),
    ("dense", dict(indices=INDICES, tile_scheduler_metadata=torch.zeros(4, 8)), r"int32 \[parts, 8\]"),
    ("dense", dict(indices=INDICES, precision="FP8"), "precision is 'FP8'; it takes 'full' or 'fp8'"),
    ("dense", dict(q=torch.zeros(2, 4, 576)), r"\[batch, q_len, heads, head_dim\]"),
    ("dense", dict(k_cache=torch.zeros(2, 64, 1, 576).to_sparse()), "k_cache is sparse_coo; it takes a dense tensor"),
    ("dense", dict(kv_format=["V32"]), r"kv_format is \['V32'\] and k_cache holds bf16; it takes V32 for"),
    ("dense", dict(use_legacy=None), "use_legacy is None; it takes True or False"),
    ("dense", dict(causal=[]), r"causal is \[\]; it takes True or False"),
    ("dense", dict(enable_batch_invariant="no"), "enable_batch_invariant is 'no'; it takes True or False"),
    ("dense", dict(enable_batch_invariant=True), "pass indices, or call mla_suite.decode with split_size"),
    ("dense", dict(is_fp8_kvcache=2), "is_fp8_kvcache is 2; it takes True or False"),
    ("dense", dict(head_dim_v=10**30), "head_dim_v is an int of 100 bits; it takes an int of 64 bits"),
    ("dense", dict(descale_q=1.0), "descale_q is a float; it takes a tensor"),
    (SEVERAL, dict(q=torch.zeros(2, 1, 5, 576).bfloat16()), "5 query heads with 2 KV heads; the first is a multiple"),
    (SEVERAL, dict(k_cache=torch.zeros(3, 2, 64, 576).bfloat16().transpose(1, 2)), "it takes a contiguous cache"),
    (SEVERAL, dict(k_cache=torch.zeros(3, 64, 2, 656).byte(), is_fp8_kvcache=True), "go with 1 KV head"),
    (SEVERAL, dict(block_table=None, indices=INDICES), "go with 1 KV head"),
    (SEVERAL, dict(attn_sink=torch.zeros(16)), "go with 1 KV head"),
    (SEVERAL, dict(block_table=None), "dense attention needs both"),
    (SEVERAL, dict(block_table=ints(0, 0)), r"it takes \[batch, columns\]"),
    (SEVERAL, dict(is_fp8_kvcache=True), "the two must agree"),
    (SEVERAL, dict(cache_seqlens=ints(900, 1)), r"cache_seqlens\[0\] is 900"),
    ("metadata", dict(num_heads_k=2, is_fp8_kvcache=True), "it takes 1 KV head, or several in dense calls"),
    ("metadata", dict(num_heads_k=2, topk=64), "it takes 1 KV head, or several in dense calls"),
    ("metadata", dict(num_heads_k=0), "it takes 1 KV head, or several in dense calls"),
    ("rocm", dict(output_mxfp8=QUANTISED), "both are given; pass output, or output_mxfp8"),
    ("rocm", dict(output=None), "neither output nor output_mxfp8 is given"),
    ("rocm", dict(output=None, output_mxfp8=QUANTISED), "output_mxfp8 is given without what turns the results"),
    ("rocm", dict(head_dim=576, nope_head_dim=512), "head_dim 576 of nope 512 and rope 64; records hold 448"),
    ("rocm", dict(kv_cache=None), "swa_only is False without kv_cache"),
    ("rocm", dict(topk_indices=None), "topk selects nothing; pass topk_indices, or topk_ragged_indices"),
]


@pytest.mark.parametrize(("call", "changes", "message"), REFUSED)
def test_a_refusal_says_why_before_anything_is_written(call, changes, message):
    function, make = CALLS[call]
    given = make() | changes
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        function(**given)
    assert str(raised.value).startswith(f"{function.__name__}: ")
    for name in ("o", "output"):
        written = given.get(name)
        assert written is None or bool(written.isnan().all()), "written although refused"
