"""FlashMLA's metadata on plans of ours: the holder that calls share, and the older pair of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

import mla_suite
from mla_suite.core import checks
from mla_suite.integrations import check_kinds, flash_mla_kv_heads, in_words, metadata_convert
from mla_suite.integrations import refuse as _refuse
from mla_suite.ops.plan import sm_parts

_METADATA_WORDS = {"seq_lens": "cache_seqlens", "num_heads x max_seqlen_q": "num_q_tokens_per_head_k"}
_DECODING_WORDS = {"cache_seqlens": "seqlens_k", "num_heads_k": "h_k"}
_OURS = "_mla_suite"  # the attribute of another library's holder that keeps ours


class Config(NamedTuple):
    """The values that calls which share a FlashMLASchedMeta must have in common: those of the operator's problem, so a
    call with several KV heads has batch x KV heads sequences, heads / KV heads, and pages of 1 token."""

    batch: int
    q_len: int
    heads: int
    page_size: int
    causal: bool
    is_fp8_kvcache: bool
    topk: int | None
    extra_page_size: int | None
    extra_topk: int | None
    enable_batch_invariant: bool


@dataclass
class FlashMLASchedMeta:
    """Filled by the first call that it is passed to.

    tile_scheduler_metadata is a plan of ours, or, before the first call that finds them, what
    `get_mla_decoding_metadata` returned and the caller assigned. Lengths may change between calls: the plan then shares
    the work out less evenly, and the result stays right.
    """

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta | torch.Tensor, torch.Tensor | None]:
    """Without arguments, an empty holder and None, as FlashMLA returns today.

    With the older arguments, `get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None,
    is_fp8_kvcache=False, topk=None)`, the older pair (tile_scheduler_metadata int32 [parts, 8], num_splits int32
    [batch x num_heads_k + 1]), written from a plan of ours with the columns of that time (`OlderFlashMlaColumn`).
    Passed on as they are they cost nothing per call; a copy of them, and a pair that was written since, is read back
    with some twenty small tensor operations per call, so prefer the holder.
    """
    return _older(*args, **kwargs) if args or kwargs else (FlashMLASchedMeta(), None)


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The older pair of `get_mla_metadata`, to be assigned to tile_scheduler_metadata and num_splits of a
    FlashMLASchedMeta before a step's first call. use_legacy is not read."""
    given = seqlens_k, num_q_tokens_per_head_k, h_k, h_q, is_fp8_kvcache, topk
    made: tuple[torch.Tensor, torch.Tensor] = in_words("get_mla_decoding_metadata", _DECODING_WORDS, _older, *given)
    return made


def _older(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`num_heads_per_head_k` is the name the second argument had first."""
    rows = num_q_tokens_per_head_k if num_q_tokens_per_head_k is not None else num_heads_per_head_k
    if rows is None:
        _refuse("get_mla_metadata", "num_q_tokens_per_head_k is missing", "give q_len x heads / kv heads, or nothing")
    sizes = dict(num_q_tokens_per_head_k=rows, num_heads_k=num_heads_k)
    check_kinds("get_mla_metadata", dict(cache_seqlens=cache_seqlens), {}, sizes)
    if num_heads_k < 1 or (num_heads_k > 1 and (is_fp8_kvcache or topk is not None)):
        given = f"num_heads_k is {num_heads_k}, is_fp8_kvcache {is_fp8_kvcache} and topk {topk}"
        _refuse("get_mla_metadata", given, "it takes 1 KV head, or several in dense calls without records")
    lengths = cache_seqlens if topk is None else torch.full_like(cache_seqlens, topk)
    if num_heads_k > 1:
        lengths = flash_mla_kv_heads.of_each_head(lengths, num_heads_k)
    checked = partial(in_words, "get_mla_metadata", _METADATA_WORDS)
    num_sm_parts = checked(sm_parts, lengths, rows)
    plan = checked(mla_suite.plan, lengths, num_heads=rows, num_sm_parts=num_sm_parts)
    in_order = metadata_convert.in_order(plan, lengths, num_q_rows=rows, num_sm_parts=num_sm_parts)
    made = metadata_convert.to_flash_mla(
        in_order, lengths, num_sm_parts=num_sm_parts, columns=metadata_convert.OlderFlashMlaColumn
    )
    metadata_convert.store(made.tile_scheduler_metadata, plan, lengths.shape[0])
    return made.tile_scheduler_metadata, made.num_splits


def holder_of(metadata: Any) -> FlashMLASchedMeta | None:
    """The holder itself, or the one kept in another library's FlashMLASchedMeta; None for the older tensors.

    Of another library's object nothing else is read or written, so its own kernels may be given it as well.
    """
    if isinstance(metadata, FlashMLASchedMeta):
        return metadata
    if not hasattr(metadata, "have_initialized"):
        return None
    holder: FlashMLASchedMeta = vars(metadata).setdefault(_OURS, FlashMLASchedMeta())
    return holder


def forget_trace(holder: FlashMLASchedMeta, like: torch.Tensor) -> None:
    """Empties a holder that was filled while fake tensors were traced, where the call is about a real one: a non-strict
    torch.export, for instance, leaves a plan without data in it, with which an operator would compute nothing."""
    plan, sizes = holder.tile_scheduler_metadata, holder.config or ()
    traced = type(plan) not in (torch.Tensor, type(None)) or any(isinstance(size, torch.SymInt) for size in sizes)
    if traced and checks.readable(like):
        holder.have_initialized, holder.config = False, None
        holder.tile_scheduler_metadata = holder.num_splits = None


def check_config(name: str, holder: FlashMLASchedMeta, config: Config) -> None:
    """Refuses a call unlike the first with this holder. A holder whose have_initialized was set back has none yet."""
    if holder.config is None or not holder.have_initialized:
        return
    for field, first, now in zip(Config._fields, holder.config, config, strict=True):
        if first != now:
            given = f"{field} is {now} and was {first} in the first call with this FlashMLASchedMeta"
            _refuse(name, given, "take a new one from get_mla_metadata() for other shapes")


def plan_of(
    name: str,
    words: Mapping[str, str],
    metadata: FlashMLASchedMeta | torch.Tensor,
    num_splits: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    rows: int,
) -> torch.Tensor | None:
    """The plan a dense call runs with: the holder's, made now if it has none, or the older tensors'."""
    batch = cache_seqlens.shape[0]
    if isinstance(metadata, FlashMLASchedMeta):
        holder, assigned = metadata, metadata.tile_scheduler_metadata
        if assigned is None:
            made: torch.Tensor = in_words(name, words, mla_suite.plan, cache_seqlens, num_heads=rows)
            return made
        if assigned.dim() == 1:  # a plan
            return assigned
        metadata, num_splits = assigned, holder.num_splits
    check_pair(name, metadata, num_splits, batch)
    if batch == 0:
        return None
    plan = metadata_convert.lookup(metadata, batch)
    return (
        metadata_convert.from_flash_mla(metadata, batch, columns=metadata_convert.OlderFlashMlaColumn)
        if plan is None
        else plan
    )


def check_pair(name: str, metadata: Any, num_splits: torch.Tensor | None, batch: int) -> None:
    """Refuses what is not the older pair of `get_mla_metadata`."""
    if not isinstance(metadata, torch.Tensor):
        given = f"tile_scheduler_metadata is a {type(metadata).__name__}"
        _refuse(name, given, "it takes the first of the two that get_mla_metadata returned", TypeError)
    if metadata.dim() != 2 or metadata.shape[1] != metadata_convert.FLASH_MLA_WORDS or metadata.dtype != torch.int32:
        given = f"tile_scheduler_metadata is {metadata.dtype} {tuple(metadata.shape)}"
        _refuse(name, given, "it takes what get_mla_metadata returned: a FlashMLASchedMeta or int32 [parts, 8]")
    if num_splits is not None and tuple(num_splits.shape) != (batch + 1,):
        _refuse(name, f"num_splits has shape {tuple(num_splits.shape)}", f"it takes [batch + 1] = ({batch + 1},)")
