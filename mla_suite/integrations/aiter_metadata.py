"""AITER's plan of a step on `plan`, and the topk that it says; `mla_suite.integrations.aiter` passes them on."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import mla_suite
from mla_suite.core import checks
from mla_suite.integrations import capturing, check_kinds, in_words, metadata_convert, refuse
from mla_suite.ops.plan import sm_parts

_WORDS = {
    **{"seq_lens": "by seqlens_kv_indptr and kv_last_page_lens, length", "cu_seqlens_q": "seqlens_qo_indptr"},
    **{"num_heads x max_seqlen_q": "num_heads_per_head_k x max_seqlen_qo", "num_heads": "num_heads_per_head_k"},
    **{"max_seqlen_q": "max_seqlen_qo", "num_sm_parts": "the length of work_indptr less 1"},
}
"""Arguments of plan -> those of `get_mla_metadata_v1`."""
# The last column of work_info_set, which AITER does not use, holds this plus topk where the metadata selects keys. An
# int32 that memory nobody wrote is unlikely to hold; topk takes the lower 16 bits.
TOPK_MARK = 0x4D4C0000
MAX_TOPK = 0xFFFF
DENSE_MARK = TOPK_MARK - 1  # and this where it does not; AITER's own planner writes 0 either way
DENSE = -1
# work_info_set -> (topk or DENSE, version of the tensor when that was so): saves reading the mark on the host.
_topk_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def get_mla_metadata_info_v1(
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: bool,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
    max_split_per_batch: int = -1,
) -> tuple[tuple[Any, torch.dtype], ...]:
    """(shape, dtype) of the buffers that get_mla_metadata_v1 fills, in AITER's order.

    work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map; a shape of one
    dimension is a number. Sized for the current GPU, or 8 SM parts without one. Only batch_size, and with is_sparse
    max_seqlen_qo, are read: one plan serves any heads, query length and dtype, and a selection is planned per token.
    """
    checks.whole("get_mla_metadata_info_v1", "batch_size", batch_size)
    checks.whole("get_mla_metadata_info_v1", "max_seqlen_qo", max_seqlen_qo)
    tiles = batch_size * max_seqlen_qo if is_sparse else batch_size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_sm_parts = sm_parts(torch.empty(0, device=device), 1)
    works = tiles + num_sm_parts
    return (
        (2, torch.uint64),
        (num_sm_parts + 1, torch.int32),
        ((works, 8), torch.int32),
        (tiles + 1, torch.int32),
        ((tiles, 2), torch.int32),
        (works, torch.int32),
    )


def get_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    is_cp_round_robin: bool = False,
    mla_version: Any = None,
    dtype_q_nope: torch.dtype | None = None,
    dtype_q_rope: torch.dtype | None = None,
    dtype_kv_nope: torch.dtype | None = None,
    dtype_kv_rope: torch.dtype | None = None,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
) -> None:
    """Plan one step and write the plan into the six buffers, in AITER's format (`metadata_convert.to_aiter`), in place.

    work_indptr says how many SM parts share the work: one fewer than its words. The lists are true to the plan that
    mla_decode_fwd then runs with, so other kernels may read them too, for one query tile per sequence.
    work_metadata_ptrs [2] gets the addresses of work_indptr and work_info_set. Nothing is read on the host, and no
    plan is wrong for other lengths, only less even.

    With topk each query token is planned for itself, up to as many as reduce_final_map has rows; sequences may have
    different numbers of them. Works name the sequence, `batch` for tokens of none. The last column of work_info_set,
    which AITER leaves unused, then says topk to mla_decode_fwd. That reads it on the host for a tensor that it has not
    seen, once; a captured or compiled step cannot wait for it, and checks on the device that the metadata is of the
    kind that it was captured with.

    max_seqlen_qo is the most query tokens of a sequence, uni_seqlen_qo those of every one. Where neither is given, the
    device finds the number for the lists, and work is shared out as for one query token.

    Not read, since they tune AITER's planner: is_causal, kv_granularity, fast_mode, max_split_per_batch,
    intra_batch_mode, mla_version and the dtypes.
    """
    name = "get_mla_metadata_v1"
    if not isinstance(kv_last_page_lens, torch.Tensor):
        given = f"kv_last_page_lens is {kv_last_page_lens!r}"
        refuse(name, given, "it is the third argument, a tensor [batch], which AITER's first signature did not have")
    buffers = dict(work_metadata_ptrs=work_metadata_ptrs, work_info_set=work_info_set, work_indptr=work_indptr)
    buffers |= dict(reduce_indptr=reduce_indptr, reduce_final_map=reduce_final_map)
    buffers |= dict(reduce_partial_map=reduce_partial_map)
    indptrs = dict(seqlens_qo_indptr=seqlens_qo_indptr, seqlens_kv_indptr=seqlens_kv_indptr)
    sizes = dict(num_heads_per_head_k=num_heads_per_head_k, num_heads_k=num_heads_k, page_size=page_size)
    sizes |= dict(max_seqlen_qo=max_seqlen_qo, uni_seqlen_qo=uni_seqlen_qo, topk=topk)
    check_kinds(name, buffers | indptrs, {}, sizes)
    for argument, value in indptrs.items():
        checks.tensor(name, argument, value, rank=1, dtypes=checks.INDEX)
    if num_heads_k != 1:
        refuse(name, f"num_heads_k is {num_heads_k}", "latent attention has 1 KV head")
    if is_cp_round_robin:
        refuse(name, "is_cp_round_robin is True", "round-robin context parallel is not supported: pass False")
    if page_size < 1:
        refuse(name, f"page_size is {page_size}", "a page holds 1 token or more")
    wide = dict(
        work_info_set=(work_info_set, len(metadata_convert.AiterColumn)), reduce_final_map=(reduce_final_map, 2)
    )
    for argument, (buffer, width) in wide.items():
        if buffer.dim() != 2 or buffer.shape[1] != width:
            refuse(name, f"{argument} has shape {tuple(buffer.shape)}", f"it takes rows of {width}: see *_info_v1")
    for argument in ("work_indptr", "reduce_indptr", "reduce_partial_map"):
        if buffers[argument].dim() != 1:
            given = f"{argument} has shape {tuple(buffers[argument].shape)}"
            refuse(name, given, "it takes one dimension: see *_info_v1")
    if work_metadata_ptrs.nbytes != 16 or work_metadata_ptrs.dim() != 1:
        given = f"work_metadata_ptrs is {work_metadata_ptrs.dtype} {tuple(work_metadata_ptrs.shape)}"
        refuse(name, given, "it takes two addresses, uint64 [2]")
    seq_lens, queries = lengths(name, seqlens_kv_indptr, kv_last_page_lens, page_size), seqlens_qo_indptr
    q_len, spans = max(max_seqlen_qo, uni_seqlen_qo, 1), None
    if topk >= 0:
        if page_size != 1:
            refuse(name, f"topk is {topk} and page_size {page_size}", "selections are of tokens: page_size 1")
        if topk > MAX_TOPK:
            refuse(name, f"topk is {topk}", f"it takes 0..{MAX_TOPK}")
        tokens = reduce_final_map.shape[0]
        seq_lens, sequences = selected(name, "seqlens_qo_indptr", seqlens_qo_indptr, seqlens_kv_indptr, tokens, topk)
        q_len, queries = 1, torch.arange(tokens + 1, dtype=torch.int32, device=seq_lens.device)
        begin = queries.long() * topk
        spans = torch.stack((begin, begin + torch.nn.functional.pad(seq_lens, (0, 1))))
    batch, num_sm_parts = seq_lens.shape[0], work_indptr.shape[0] - 1
    if work_info_set.shape[0] < batch + num_sm_parts or reduce_partial_map.shape[0] < batch + num_sm_parts:
        given = f"work_info_set has {work_info_set.shape[0]} rows, reduce_partial_map {reduce_partial_map.shape[0]}"
        refuse(name, given, f"{batch} sequences and {num_sm_parts} SM parts need {batch + num_sm_parts}: see *_info_v1")
    if reduce_indptr.shape[0] < batch + 1 or reduce_final_map.shape[0] < batch:
        given = f"reduce_indptr has {reduce_indptr.shape[0]} words, reduce_final_map {reduce_final_map.shape[0]} rows"
        refuse(name, given, f"{batch} sequences need {batch + 1} and {batch}: see *_info_v1")
    sizes = dict(num_heads=num_heads_per_head_k, max_seqlen_q=q_len, num_sm_parts=num_sm_parts)
    plan = in_words(name, _WORDS, mla_suite.plan, seq_lens, queries, **sizes)
    longest: int | torch.Tensor = q_len
    if spans is None and max(max_seqlen_qo, uni_seqlen_qo) < 1:
        longest = torch.nn.functional.pad(queries.diff(), (0, 1), value=1).amax()  # 1 where there is no sequence
    made = metadata_convert.to_aiter(
        plan,
        queries,
        seqlens_kv_indptr,
        num_sm_parts=num_sm_parts,
        page_size=page_size,
        max_seqlen_q=longest,
        kv_last_page_lens=kv_last_page_lens,
        spans=spans,
    )
    if spans is not None:
        _name_sequences(made.work_info_set, sequences, seqlens_qo_indptr)
    filled = (work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map)
    for buffer, part in zip(filled, made, strict=True):
        buffer[: part.shape[0]].copy_(part)
    # Every row is marked, so that a slice of them still says what they are.
    work_info_set[:, metadata_convert.AiterColumn.PAD].fill_(DENSE_MARK if spans is None else TOPK_MARK + topk)
    _remember_topk(work_info_set, DENSE if spans is None else topk)
    if spans is None:
        metadata_convert.store(work_info_set, plan, batch)
    reduce_indptr[batch + 1 :] = made.reduce_indptr[-1]  # tiles past the batch merge nothing
    pointers = work_metadata_ptrs.view(torch.int64)
    # Assigned, a number would be copied from host memory, which cannot be captured.
    pointers[0].fill_(work_indptr.data_ptr())
    pointers[1].fill_(work_info_set.data_ptr())


def _remember_topk(work_info_set: torch.Tensor, topk: int) -> None:
    """Keep what the tensor says as long as nobody writes it; traced code has no tensors to keep it for."""
    if not torch.compiler.is_dynamo_compiling():
        _topk_known[work_info_set] = (topk, metadata_convert.version(work_info_set))


def topk_of(name: str, work_indptr: torch.Tensor, work_info_set: torch.Tensor, kv_indptr: torch.Tensor) -> int:
    """The topk that metadata was made with, or DENSE, from its own data. ValueError for AITER's own that selects."""
    mark = work_info_set[:1, metadata_convert.AiterColumn.PAD]
    guess = DENSE
    if not torch.compiler.is_dynamo_compiling():
        inference = work_info_set.is_inference()  # such tensors do not count their writes
        guess, version = _topk_known.get(work_info_set, (DENSE, None))
        if version is not None and not inference and version == work_info_set._version:
            return guess
        if not work_info_set.is_meta and not capturing(work_info_set):
            word = int(mark) if mark.numel() else DENSE_MARK
            topk = word - TOPK_MARK if word & ~MAX_TOPK == TOPK_MARK else DENSE
            certain = topk != DENSE or word == DENSE_MARK or _filled(name, work_indptr, work_info_set, kv_indptr)
            if certain and not inference:
                _remember_topk(work_info_set, topk)
            return topk
    # The host cannot wait here, so the metadata is taken for what it was, and the device stops where it is not.
    same = mark == TOPK_MARK + guess if guess != DENSE else (mark & ~MAX_TOPK) != TOPK_MARK
    torch._assert_async(
        same.all(),
        f"{name}: work_info_set was made with another topk than the captured or compiled step; pass the tensor that "
        "get_mla_metadata_v1 filled when it was captured, or do not compile this call",
    )
    return guess


def _filled(name: str, work_indptr: torch.Tensor, work_info_set: torch.Tensor, kv_indptr: torch.Tensor) -> bool:
    """Whether AITER's planner may have filled these lists, which nobody has where an engine warms up. ValueError for
    works of single query tokens that do not end with the keys: of a selection they end with the last token's."""
    bounds = work_indptr.tolist()
    if sorted(bounds) != bounds or bounds[0] != 0 or not 0 < bounds[-1] <= work_info_set.shape[0]:
        return False
    _, _, first, after, begin, stop, _, _ = work_info_set[: bounds[-1]].long().T
    filled = ((first < after) & (begin >= 0) & (begin <= stop)).all()
    words = filled, (after - first == 1).all(), stop.amax(), kv_indptr[-1] - kv_indptr[0]
    filled, single, last, end = torch.stack([word.long() for word in words]).tolist()
    if filled and single and last != end:
        given = f"work_info_set ends at page {last} and kv_indptr at {end}"
        possible = "it selects keys or is of another step: fill it with this module's get_mla_metadata_v1"
        refuse(name, given, possible)
    return bool(filled)


def selected(
    name: str, argument: str, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, tokens: int, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of each query token, those of its sequence and at most topk, and its sequence; none past the last one's."""
    checks.tensor(name, argument, qo_indptr, rank=1, dtypes=checks.INDEX, like=kv_indptr)
    checks.shape(name, argument, qo_indptr, tuple(kv_indptr.shape), "[batch + 1]")
    numbers = torch.arange(tokens, dtype=torch.int32, device=kv_indptr.device)
    sequences = torch.searchsorted(qo_indptr[1:], numbers, right=True)
    lens = torch.nn.functional.pad(kv_indptr.diff().clamp(max=topk), (0, 1))
    return lens[sequences], sequences


def _name_sequences(works: torch.Tensor, sequences: torch.Tensor, qo_indptr: torch.Tensor) -> None:
    """Write works of single query tokens as AITER does: with the sequence, and later tokens counted as keys behind."""
    token = works[:, metadata_convert.AiterColumn.BATCH]
    used, row = token >= 0, token.clamp(min=0).long()
    sequence = sequences[row]
    end = torch.nn.functional.pad(qo_indptr[1:], (0, 1))[sequence]
    works[:, metadata_convert.AiterColumn.KV_OFFSET] += torch.where(used, (end - 1 - row).clamp(min=0), 0)
    works[:, metadata_convert.AiterColumn.BATCH] = torch.where(used, sequence, token)


def lengths(name: str, kv_indptr: torch.Tensor, kv_last_page_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """int32 [batch]: keys of each sequence."""
    pages = kv_indptr.diff()
    if page_size == 1:
        return pages
    if not isinstance(kv_last_page_lens, torch.Tensor):
        given = f"kv_last_page_lens is {kv_last_page_lens!r} and page_size is {page_size}"
        refuse(name, given, "give the tokens in the last page of each sequence, a tensor [batch]")
    if kv_last_page_lens.shape != pages.shape or kv_last_page_lens.device != pages.device:
        given = f"kv_last_page_lens has shape {tuple(kv_last_page_lens.shape)} on {kv_last_page_lens.device}"
        refuse(name, given, f"it takes [batch] = {tuple(pages.shape)} on {pages.device}, as the pages are counted")
    return torch.where(pages > 0, torch.add(kv_last_page_lens, pages - 1, alpha=page_size), 0).int()
