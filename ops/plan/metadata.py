"""The words of a plan: one int32 tensor that says which keys of which sequence each SM part reads.

    header        [16]                      the words of `Word`
    split_indptr  [batch + 1]               partial rows of sequence b: split_indptr[b]..split_indptr[b + 1]
    work_indptr   [num_sm_parts + 1]        work tiles of SM part w: work_indptr[w]..work_indptr[w + 1]
    counters      [batch][COUNTERS]         arrival counters, zeroed by plan and reset by the last arriver
    padding       to a multiple of 4 words
    work_tiles    [work_tile_capacity][4]   the words of `WorkTile`; 16-byte aligned

Rules a kernel may rely on:

- A work tile covers keys first_key <= key < min(end_key, seq_lens[sequence]), with seq_lens as the kernel reads it. It
  is empty when first_key is past the end. The last work tile of a sequence has end_key OPEN, so every key below
  seq_lens[b] is in exactly one work tile of b, whatever the lengths were when the plan was made.
- Every sequence has at least one work tile, and its work tiles are in the order of first_key. The work tiles of all
  sequences are in order, too, unless an arch's plans deal sequences to SM parts (`dealing.py`). Work tiles from the
  used count up to work_tile_capacity have sequence -1 and belong to no SM part; work_indptr[num_sm_parts] is the used
  count.
- A sequence with one work tile owns no partial row: the work tile has partial_row -1 and writes `out` and `lse` itself.
  A sequence with n > 1 work tiles owns n rows, in the order of its work tiles; an empty work tile stores lse -inf in
  its row.
- A launch may have any number of blocks: `for w = block; w < num_sm_parts; w += blocks`. Only the last arriver at a
  counter may do more work for it, so no block waits for another.
- The header, and every work tile, begins a multiple of 16 bytes from the tensor's start: one load of 16 bytes reads a
  work tile where the tensor itself is so aligned. Where split_indptr and work_indptr lie follows from the batch alone,
  so a kernel need not read it from the header first.
- Counter (b, tile) belongs to row tile `tile` of sequence b. A launch with more than COUNTERS tiles combines in a
  second kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import torch

from mla_suite.core import checks

Size: TypeAlias = int | torch.SymInt

MAGIC = 0x4D4C4150
VERSION = 1
OPEN = 2**31 - 1  # end_key of a sequence's last work tile
HEADER_WORDS = 16
WORK_TILE_WORDS = 4
COUNTERS = 16  # row tiles per sequence: 2048 rows in tiles of 128, 1024 in tiles of 64
BYTE_LIMIT = 64 * 2**20


class Word(IntEnum):
    """Header words. Offsets count words from the start of the tensor."""

    MAGIC = 0
    VERSION = 1
    BATCH = 2
    NUM_SM_PARTS = 3
    WORK_TILE_CAPACITY = 4
    SPLIT_INDPTR = 5  # offset
    WORK_INDPTR = 6  # offset
    COUNTERS = 7  # offset
    WORK_TILES = 8  # offset
    WORK_TILE_WORDS = 9
    NUM_SPLITS = 10  # per sequence when forced, else 0
    SPLIT_SIZE = 11  # keys per split in batch-invariant mode, else 0
    COUNTERS_PER_SEQUENCE = 12
    WORK_TILES_USED = 13
    PARTIAL_ROWS = 14  # = split_indptr[batch]; 0 when nothing is split
    MAX_SEQLEN_KV = 15


class WorkTile(IntEnum):
    """Words of a work tile."""

    SEQUENCE = 0
    FIRST_KEY = 1
    END_KEY = 2  # exclusive
    PARTIAL_ROW = 3


@dataclass(frozen=True)
class Layout:
    """Where the parts of a plan lie, known from sizes alone (also symbolic ones)."""

    batch: Size
    num_sm_parts: Size
    work_tile_capacity: Size

    @property
    def split_indptr(self) -> Size:
        return HEADER_WORDS

    @property
    def work_indptr(self) -> Size:
        return self.split_indptr + self.batch + 1

    @property
    def counters(self) -> Size:
        return self.work_indptr + self.num_sm_parts + 1

    @property
    def work_tiles(self) -> Size:
        return (self.counters + self.batch * COUNTERS + 3) // 4 * 4

    @property
    def words(self) -> Size:
        return self.work_tiles + self.work_tile_capacity * WORK_TILE_WORDS

    def header(self, *, num_splits: int, split_size: int, max_seqlen_kv: int) -> list[int]:
        """The header words that sizes and arguments determine; WORK_TILES_USED and PARTIAL_ROWS are left 0."""
        words = {
            Word.MAGIC: MAGIC,
            Word.VERSION: VERSION,
            Word.BATCH: self.batch,
            Word.NUM_SM_PARTS: self.num_sm_parts,
            Word.WORK_TILE_CAPACITY: self.work_tile_capacity,
            Word.SPLIT_INDPTR: self.split_indptr,
            Word.WORK_INDPTR: self.work_indptr,
            Word.COUNTERS: self.counters,
            Word.WORK_TILES: self.work_tiles,
            Word.WORK_TILE_WORDS: WORK_TILE_WORDS,
            Word.NUM_SPLITS: num_splits,
            Word.SPLIT_SIZE: split_size,
            Word.COUNTERS_PER_SEQUENCE: COUNTERS,
            Word.MAX_SEQLEN_KV: max_seqlen_kv,
        }
        return [int(words.get(word, 0)) for word in Word]


def layout_for(batch: Size, num_sm_parts: Size, *, max_seqlen_kv: Size, num_splits: Size, split_size: Size) -> Layout:
    """The layout of the plan that these arguments of `plan` make."""
    if num_splits > 0:
        return Layout(batch, num_sm_parts, batch * num_splits)
    if split_size > 0:
        return Layout(batch, num_sm_parts, batch * splits_of(max_seqlen_kv, split_size, may_have_sink=False))
    return Layout(batch, num_sm_parts, batch + num_sm_parts)


def splits_of(max_seqlen_kv: Size, split_size: Size, may_have_sink: bool) -> Size:
    """Splits of a sequence of max_seqlen_kv keys in batch-invariant mode. Without a plan shorter ones have as many,
    some of them empty.

    A sequence of more than split_size keys, and up to four times as many, has four equal ones (`reference.split_keys`):
    so few and short sequences keep more of a GPU busy, while long ones leave no more partial results. Nothing but its
    own length decides, so its bits stay those of any batch.

    Where there may be an attention sink, two at least: max_seqlen_kv may be that of a batch, and a merge divides by the
    sink otherwise than a kernel whose result is final. Without a sink a single split passes a merge unchanged, and with
    a split_size of OPEN no sequence ever has two.
    """
    least = 2 if may_have_sink and split_size < OPEN else 1
    whole = (max_seqlen_kv + split_size - 1) // split_size
    four = torch.sym_min(4 * (whole - 1), 4)  # where there is more than one
    return torch.sym_max(torch.sym_max(whole, four), least)


def smallest_words(batch: Size) -> Size:
    """Fewest words a plan for `batch` sequences can have."""
    return Layout(batch, 1, batch).words


def most_work_tiles(words: Size, batch: Size) -> Size:
    """Most work tiles, and so most partial rows, a plan of `words` words for `batch` sequences can hold.

    For sizing the scratch of partials on the host, where the plan's header cannot be read.
    """
    return (words - Layout(batch, 1, 0).work_tiles) // WORK_TILE_WORDS


@dataclass(frozen=True)
class Plan:
    """A plan read back on the host."""

    header: dict[Word, int]
    split_indptr: list[int]
    work_indptr: list[int]
    counters: list[int]
    work_tiles: list[tuple[int, int, int, int]]  # only the used ones, in the order of `WorkTile`

    @classmethod
    def read(cls, plan: torch.Tensor, op: str = "Plan.read") -> Plan:
        """Parse a plan; ValueError, in one sentence of `op`, when the tensor is none. Waits for the device."""
        words: list[int] = plan.tolist()
        if len(words) < HEADER_WORDS or words[Word.MAGIC] != MAGIC or words[Word.VERSION] != VERSION:
            found = words[: Word.BATCH] if words else "no words"
            given = f"does not begin with {[MAGIC, VERSION]} but {found}"
            checks.fail(op, "plan", given, "pass a tensor made by mla_suite.plan")
        header = {word: words[word] for word in Word}
        layout = Layout(header[Word.BATCH], header[Word.NUM_SM_PARTS], header[Word.WORK_TILE_CAPACITY])
        if len(words) != layout.words or layout.batch < 0 or layout.num_sm_parts < 1:
            checks.fail(op, "plan", f"has {len(words)} words but its header describes {layout.words}", "pass it whole")
        used, first = header[Word.WORK_TILES_USED], layout.work_tiles
        work_tiles = [
            (words[at], words[at + 1], words[at + 2], words[at + 3])
            for at in range(first, min(first + used * WORK_TILE_WORDS, len(words)), WORK_TILE_WORDS)
        ]
        read = cls(
            header,
            words[layout.split_indptr : layout.work_indptr],
            words[layout.work_indptr : layout.counters],
            words[layout.counters : layout.counters + layout.batch * COUNTERS],
            work_tiles,
        )
        if broken := read._broken(layout):
            checks.fail(op, "plan", f"is damaged: {broken}", "make it anew with mla_suite.plan")
        return read

    def _broken(self, layout: Layout) -> str:
        """What breaks one of the rules above, in words; empty where all hold. Counters may be in use."""
        of_lengths = Word.WORK_TILES_USED, Word.PARTIAL_ROWS
        made = layout.header(
            num_splits=self.header[Word.NUM_SPLITS],
            split_size=self.header[Word.SPLIT_SIZE],
            max_seqlen_kv=self.header[Word.MAX_SEQLEN_KV],
        )
        for word, value in zip(Word, made, strict=True):
            if self.header[word] != value and word not in of_lengths:
                return f"header word {word.name} is {self.header[word]}, not {value}"
        used = self.header[Word.WORK_TILES_USED]
        bounds = self.work_indptr
        if len(self.work_tiles) != used or bounds[0] != 0 or bounds[-1] != used or bounds != sorted(bounds):
            return f"its header has {used} work tiles, its SM parts those at {bounds}"
        own: list[list[tuple[int, int, int, int]]] = [[] for _ in self.split_indptr[1:]]
        for tile in self.work_tiles:
            if not 0 <= tile[WorkTile.SEQUENCE] < len(own):
                return f"a work tile is of sequence {tile[WorkTile.SEQUENCE]}"
            own[tile[WorkTile.SEQUENCE]].append(tile)
        row = 0
        for b, tiles in enumerate(own):
            edges = [0, *[end for _, _, end, _ in tiles]]
            if [first for _, first, _, _ in tiles] != edges[:-1] or edges[-1] != OPEN:
                return f"the work tiles of sequence {b} do not cover each key once"
            split = len(tiles) if len(tiles) > 1 else 0
            rows = [*range(row, row + split)] or [-1]
            if [found for _, _, _, found in tiles] != rows or self.split_indptr[b] != row:
                return f"sequence {b} does not own the partial rows {rows}"
            row += split
        rows_used = self.header[Word.PARTIAL_ROWS], self.split_indptr[-1]
        return "" if rows_used == (row, row) else f"it has {rows_used[0]} partial rows for {row} splits"

    def splits(self) -> list[list[tuple[int, int]]]:
        """(first_key, end_key) of every work tile of each sequence, in order."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.header[Word.BATCH])]
        for sequence, first, end, _ in self.work_tiles:
            found[sequence].append((first, end))
        return found


def assemble(
    layout: Layout,
    header: Sequence[int],
    split_indptr: torch.Tensor,
    work_indptr: torch.Tensor,
    work_tiles: torch.Tensor,
    into: torch.Tensor,
) -> None:
    """Write the parts into the plan tensor `into`, without waiting for a device.

    work_tiles [work_tile_capacity, 4]; split_indptr [batch + 1]; work_indptr [num_sm_parts + 1]; any integer dtype.
    """
    into.zero_()
    for word, value in enumerate(header):
        into[word].fill_(value)  # assigned, the number would be copied from host memory, which cannot be captured
    into[Word.WORK_TILES_USED] = work_indptr[-1]
    into[Word.PARTIAL_ROWS] = split_indptr[-1]
    into[layout.split_indptr : layout.work_indptr] = split_indptr
    into[layout.work_indptr : layout.counters] = work_indptr
    into[layout.work_tiles :] = work_tiles.reshape(-1)
