"""Plans of other libraries: FlashMLA's tile scheduler metadata and AITER's work and reduce lists, to and from ours.

All of it is tensor code that reads nothing on the host, so it can be captured in a CUDA graph. A plan says where
sequences are split and which SM part reads which split; it never changes a result beyond rounding.

FlashMLA (blocks of 64 keys), of every part (a workgroup that persists):
    tile_scheduler_metadata  [parts, 8]   columns `FlashMlaColumn`, before January 2026 `OlderFlashMlaColumn`; a part
                                          without work begins at sequence `batch`
    num_splits               [batch + 1]  sequence b owns partial rows num_splits[b]..num_splits[b + 1], one if unsplit
AITER (pages of the cache), of every cluster:
    work_indptr              [clusters + 1]  works of cluster c: work_indptr[c]..work_indptr[c + 1]
    work_info_set            [works, 8]      columns `AiterColumn`
    reduce_indptr            [batch + 1]     entries of reduce_partial_map of sequence b, none if unsplit
    reduce_final_map         [batch, 2]      query tokens that the merged result goes to
    reduce_partial_map       [entries]       first row of each partial, in query tokens
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mla_suite.core import checks
from mla_suite.launch import current_arch
from mla_suite.ops.plan.dealing import candidates
from mla_suite.ops.plan.metadata import OPEN, WORK_TILE_WORDS, Layout, Word, WorkTile, assemble
from mla_suite.ops.plan.reference import work_tiles_between
from mla_suite.ops.plan.scheduler import Splits, balanced_splits, scheduler_costs

FLASH_MLA_BLOCK = 64
FLASH_MLA_WORDS = 8
_SPAN = 2**31  # more than any key, so sequence * _SPAN + key orders places on the line of all sequences


class FlashMlaColumn(IntEnum):
    BEGIN_SEQUENCE = 0
    END_SEQUENCE = 1  # inclusive
    BEGIN_BLOCK = 2
    END_BLOCK = 3  # exclusive
    BEGIN_SPLIT = 4
    FIRST_IS_SPLIT = 5
    LAST_IS_SPLIT = 6
    PAD = 7


class OlderFlashMlaColumn(IntEnum):
    """Columns of the versions whose get_mla_metadata returned the tensors themselves; the last three are not used."""

    BEGIN_SEQUENCE = 0
    BEGIN_BLOCK = 1
    END_SEQUENCE = 2  # inclusive
    END_BLOCK = 3  # exclusive
    BEGIN_SPLIT = 4


FlashMlaColumns: TypeAlias = type[FlashMlaColumn] | type[OlderFlashMlaColumn]


class AiterColumn(IntEnum):
    BATCH = 0
    PARTIAL_ROW = 1  # in query tokens; -1: the work writes the final rows
    Q_START = 2
    Q_END = 3
    KV_START = 4  # index into kv_indices
    KV_END = 5
    KV_OFFSET = 6  # tokens from KV_END to the end of the sequence
    PAD = 7


class FlashMlaPlan(NamedTuple):
    tile_scheduler_metadata: torch.Tensor
    num_splits: torch.Tensor


class AiterPlan(NamedTuple):
    work_indptr: torch.Tensor
    work_info_set: torch.Tensor
    reduce_indptr: torch.Tensor
    reduce_final_map: torch.Tensor
    reduce_partial_map: torch.Tensor


def to_flash_mla(
    plan: torch.Tensor, seq_lens: torch.Tensor, *, num_sm_parts: int, columns: FlashMlaColumns = FlashMlaColumn
) -> FlashMlaPlan:
    """The plan that `mla_suite.plan(seq_lens, ..., num_sm_parts=num_sm_parts)` made, as FlashMLA writes it.

    FlashMLA's format has sequences in order, so the plan must have them so, too: see `in_order`. Splits are rounded
    down to multiples of 64 keys. Neighbouring work tiles of one sequence in an SM part become one split. The lengths
    must be those the plan was made for: FlashMLA's records end where a sequence ended then.
    """
    batch = seq_lens.shape[0]
    parts = _parts(plan, batch, num_sm_parts)
    sequence, work_tiles = parts.sequence, parts.work_tiles.long()
    first, stop = parts.work_indptr[:-1], parts.work_indptr[1:]
    busy = stop > first
    rank = busy.cumsum(0) - 1
    bounds = torch.searchsorted(sequence, torch.arange(batch + 1, device=plan.device))
    first_part = rank[_owner(parts.work_indptr, bounds[:-1])]
    splits = rank[_owner(parts.work_indptr, bounds[1:] - 1)] - first_part + 1
    num_splits = torch.cat((splits.new_zeros(1), splits.cumsum(0)))

    blocks = (torch.cat((seq_lens.long(), seq_lens.new_zeros(1))) + FLASH_MLA_BLOCK - 1) // FLASH_MLA_BLOCK
    head, tail = first.clamp(max=len(work_tiles) - 1), (stop - 1).clamp(min=0)
    begins, ends = sequence[head].clamp(max=batch), sequence[tail].clamp(max=batch)
    begin_block = torch.minimum(work_tiles[head, WorkTile.FIRST_KEY] // FLASH_MLA_BLOCK, blocks[begins])
    end_key = work_tiles[tail, WorkTile.END_KEY]
    end_block = torch.where(end_key == OPEN, blocks[ends], torch.minimum(end_key // FLASH_MLA_BLOCK, blocks[ends]))
    splits, first_part = torch.cat((splits, splits.new_zeros(1))), torch.cat((first_part, first_part.new_zeros(1)))
    values = {
        "BEGIN_SEQUENCE": torch.where(busy, begins, batch),
        "END_SEQUENCE": torch.where(busy, ends, batch - 1),
        "BEGIN_BLOCK": torch.where(busy, begin_block, 0),
        "END_BLOCK": torch.where(busy, end_block, 0),
        "BEGIN_SPLIT": torch.where(busy, rank - first_part[begins], 0),
        "FIRST_IS_SPLIT": busy & (splits[begins] > 1),
        "LAST_IS_SPLIT": busy & (splits[ends] > 1),
    }
    metadata = torch.zeros((num_sm_parts, FLASH_MLA_WORDS), dtype=torch.int32, device=plan.device)
    for column in columns:
        if column.name in values:
            metadata[:, column] = values[column.name]
    return FlashMlaPlan(metadata, num_splits.int())


def in_order(plan: torch.Tensor, seq_lens: torch.Tensor, *, num_q_rows: int, num_sm_parts: int) -> torch.Tensor:
    """The plan; where plans of its device may deal sequences out of order, one for the same lengths that does not."""
    batch, costs = seq_lens.shape[0], scheduler_costs(current_arch(seq_lens), num_q_rows)
    if not candidates(costs, batch, num_sm_parts):
        return plan
    splits, _ = balanced_splits(seq_lens.long(), costs, num_sm_parts)
    return _assembled(splits, batch, num_sm_parts)


def from_flash_mla(
    tile_scheduler_metadata: torch.Tensor, batch: int, *, columns: FlashMlaColumns = FlashMlaColumn
) -> torch.Tensor:
    """A plan of ours that splits `batch` sequences where FlashMLA's parts begin, one SM part for each."""
    begins = tile_scheduler_metadata[:, columns.BEGIN_SEQUENCE].long()
    keys = tile_scheduler_metadata[:, columns.BEGIN_BLOCK].long() * FLASH_MLA_BLOCK
    return _split_at(torch.where(begins < batch, begins * _SPAN + keys, batch * _SPAN), batch)


def to_aiter(
    plan: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    num_sm_parts: int,
    page_size: int,
    max_seqlen_q: int | torch.Tensor,
    kv_last_page_lens: torch.Tensor | None = None,
    spans: torch.Tensor | None = None,
) -> AiterPlan:
    """The plan that `mla_suite.plan(..., num_sm_parts=num_sm_parts)` made, as AITER writes it.

    There is one query tile per sequence, and splits are rounded down to whole pages. Partial row r of ours begins at
    row r x max_seqlen_q of AITER's partial tensors. Works past work_indptr[-1] have batch -1.
    max_seqlen_q may be a tensor of no dimension, where the device alone knows it. kv_last_page_lens [batch], the tokens
    in the last page of each sequence, is needed with pages of several tokens. With spans, int64 [2, batch + 1],
    sequence b has pages spans[0][b]..spans[1][b] of kv_indices, whatever kv_indptr says.
    """
    if page_size > 1 and kv_last_page_lens is None:
        raise ValueError(f"to_aiter: page_size is {page_size}; give kv_last_page_lens, the tokens in the last pages")
    if spans is None:
        pages = (kv_indptr - kv_indptr[0]).long()
        spans = torch.stack((pages, torch.cat((pages[1:], pages[-1:]))))
    batch = qo_indptr.shape[0] - 1
    parts = _parts(plan, batch, num_sm_parts)
    work_tiles = parts.work_tiles.long()
    used = work_tiles[:, WorkTile.SEQUENCE] >= 0
    owner = torch.where(used, work_tiles[:, WorkTile.SEQUENCE], 0)
    kv_begin, kv_end = spans[0][owner], spans[1][owner]
    kv_start = torch.minimum(kv_begin + work_tiles[:, WorkTile.FIRST_KEY] // page_size, kv_end)
    split_end = torch.minimum(kv_begin + work_tiles[:, WorkTile.END_KEY] // page_size, kv_end)
    kv_stop = torch.where(work_tiles[:, WorkTile.END_KEY] == OPEN, kv_end, split_end)
    after = kv_end - kv_stop
    if kv_last_page_lens is not None and page_size > 1:
        last = torch.nn.functional.pad(kv_last_page_lens.long(), (0, 1))[owner]  # read of no sequence, too
        after = torch.where(after > 0, (after - 1) * page_size + last, 0)
    row, queries = work_tiles[:, WorkTile.PARTIAL_ROW], qo_indptr.long()
    works = torch.stack(
        (
            owner,
            torch.where(row >= 0, row * max_seqlen_q, -1),
            queries[owner],
            queries[(owner + 1).clamp(max=batch)],
            kv_start,
            kv_stop,
            after,
            torch.zeros_like(row),
        ),
        dim=1,
    )
    # In place: a row of constants would be a copy from host memory, which cannot be captured.
    works.masked_fill_(~used[:, None], 0)
    works[:, : AiterColumn.Q_START].masked_fill_(~used[:, None], -1)
    entries = torch.arange(len(work_tiles), dtype=torch.int32, device=plan.device) * max_seqlen_q
    return AiterPlan(
        parts.work_indptr.int(),
        works.int(),
        parts.split_indptr.int(),
        torch.stack((qo_indptr[:-1], qo_indptr[1:]), dim=1).int(),
        entries,
    )


def from_aiter(
    work_indptr: torch.Tensor, work_info_set: torch.Tensor, kv_indptr: torch.Tensor, *, page_size: int
) -> torch.Tensor:
    """A plan of ours that splits sequences where AITER's clusters begin, one SM part per cluster.

    Made for one query tile per sequence. Where AITER has more, its clusters return to the same keys; the plan is right
    then too, but less even.
    """
    batch = kv_indptr.shape[0] - 1
    works = work_info_set.long()
    first = work_indptr[:-1].long()
    inside = (first < work_indptr[-1]) & (first < works.shape[0])
    begins = works[first.clamp(0, works.shape[0] - 1)]
    # Clamped where it is used as an index: lists that nobody filled must not take a GPU down.
    sequence = torch.where(inside, begins[:, AiterColumn.BATCH], 0).clamp(0, max(batch - 1, 0))
    pages = begins[:, AiterColumn.KV_START] - (kv_indptr[sequence] - kv_indptr[0])
    return _split_at(torch.where(inside, sequence * _SPAN + pages * page_size, batch * _SPAN), batch)


class _Parts(NamedTuple):
    """The parts of a plan as views, found from sizes the host knows."""

    split_indptr: torch.Tensor
    work_indptr: torch.Tensor
    work_tiles: torch.Tensor  # [capacity, 4]
    sequence: torch.Tensor  # [capacity] of the work tiles, `batch` for unused ones, so that it rises


def _parts(plan: torch.Tensor, batch: int, num_sm_parts: int) -> _Parts:
    place = Layout(batch, num_sm_parts, 0)
    words = plan.shape[0] - int(place.work_tiles)
    if words < 0 or words % WORK_TILE_WORDS != 0:
        raise ValueError(
            f"plan has {plan.shape[0]} words, none that {batch} sequences and {num_sm_parts} SM parts can have; give "
            "the batch and num_sm_parts that mla_suite.plan was given"
        )
    if plan.is_cpu and checks.readable(plan):
        made = [plan[word].item() for word in (Word.BATCH, Word.NUM_SM_PARTS)]
        if made != [batch, num_sm_parts]:
            raise ValueError(
                f"plan is one of {made[0]} sequences and {made[1]} SM parts, and {batch} and {num_sm_parts} were "
                "given; give those that mla_suite.plan was given"
            )
    work_tiles = plan[place.work_tiles :].view(-1, WORK_TILE_WORDS)
    sequence = work_tiles[:, WorkTile.SEQUENCE].long()
    return _Parts(
        plan[place.split_indptr : place.work_indptr],
        plan[place.work_indptr : place.counters].long(),
        work_tiles,
        torch.where(sequence < 0, batch, sequence),
    )


def _owner(work_indptr: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """The SM part of each work tile."""
    return torch.searchsorted(work_indptr, tile, right=True) - 1


def _split_at(places: torch.Tensor, batch: int) -> torch.Tensor:
    """A plan whose SM part w begins at places[w] = sequence * _SPAN + key."""
    if batch < 1:
        raise ValueError("a plan of 0 sequences has nothing to convert; pass plan=None")
    num_sm_parts = places.shape[0]
    places = places.clamp(0, batch * _SPAN)  # whatever the lists hold, a plan gives every key to somebody
    places = torch.cat((places, places.new_full((1,), batch * _SPAN)))
    places = places.flip(0).cummin(0).values.flip(0)  # who has no work begins where the next one does
    places[0].fill_(0)  # whatever precedes the first SM part's position is still somebody's
    return _assembled(Splits(places // _SPAN, places % _SPAN), batch, num_sm_parts)


def _assembled(splits: Splits, batch: int, num_sm_parts: int) -> torch.Tensor:
    """The plan with these splits."""
    layout = Layout(batch, num_sm_parts, batch + num_sm_parts)
    plan = torch.empty(int(layout.words), dtype=torch.int32, device=splits.key.device)
    header = layout.header(num_splits=0, split_size=0, max_seqlen_kv=0)
    assemble(layout, header, *work_tiles_between(splits, batch), into=plan)
    return plan


class _Kept(NamedTuple):
    plan: torch.Tensor
    version: int | None  # of the tensor that was written from it


# Another library's tensor -> the plans it was written from, by their batch.
_remembered: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def version(tensor: torch.Tensor) -> int | None:
    """How often the tensor has been written; None for one of inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def store(key: torch.Tensor, plan: torch.Tensor, batch: int) -> None:
    """Keep the plan that another library's tensor `key` was written from, as long as that tensor lives.

    A second plan of the same batch and size is copied over the first, so a captured graph that reads it sees the new
    one. Plans of other batches stay where they are, since a server captures a graph for each over the same buffers.
    Traced code has no tensors to store a plan for, and reads the lists back.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    plans: dict[int, _Kept] = _remembered.setdefault(key, {})
    known = plans.get(batch)
    if known is not None and known.plan.shape == plan.shape:
        with torch.inference_mode():  # outside of it torch refuses to write a plan that was made inside
            plan = known.plan.copy_(plan)
    plans[batch] = _Kept(plan, version(key))


def lookup(key: torch.Tensor, batch: int) -> torch.Tensor | None:
    """The plan that `store` kept for this very tensor and batch, if nobody has written the tensor since; none in traced
    code."""
    if torch.compiler.is_dynamo_compiling():
        return None
    kept: dict[int, _Kept] = _remembered.get(key, {})
    known = kept.get(batch)
    return known.plan if known is not None and known.version == version(key) else None
