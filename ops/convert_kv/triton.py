"""convert_kv in Triton, for every GPU: the loads of sparse_decode and the stores of append_kv, or bare bytes."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from mla_suite.archs import ArchSpec
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import KVFormat, get_kv_format
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.append_kv import triton_rows as stores
from mla_suite.ops.append_kv.triton import Place
from mla_suite.ops.convert_kv import row
from mla_suite.ops.sparse_decode import triton_rows as loads

LARGEST_PIECE = 512  # bytes of a record that are copied at once
GROUP = 8  # tokens of a program
WARPS = 4


@triton.jit(do_not_specialize=["tokens", "source_count", "destination_count"])  # one binary for all of them
def convert_kv_kernel(
    source,  # blocks of old.page records
    destination,  # blocks of new.page records
    source_slots,  # [tokens] int32 or int64
    destination_slots,  # [tokens] int32 or int64
    source_descale,  # [1] fp32, or None
    destination_descale,  # [1] fp32, or None
    tokens,
    source_count,  # slots: pages x page
    destination_count,
    source_block_bytes,
    destination_block_bytes,
    old,
    new,
    PIECES: tl.constexpr,  # of bytes: places in both records and a count; of values: first column and count
    NUMBERS: tl.constexpr,
    BYTES: tl.constexpr,
    WORD: tl.constexpr,  # bytes that are copied as one element
    FAST: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program writes the records of GROUP tokens."""
    token = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    slot = tl.load(source_slots + token, mask=token < tokens, other=-1).to(tl.int64)
    target = tl.load(destination_slots + token, mask=token < tokens, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < source_count) & (target >= 0) & (target < destination_count)
    slot, target = tl.where(valid, slot, 0), tl.where(valid, target, 0)
    from_block = source.to(tl.pointer_type(tl.uint8)) + slot // old.page * source_block_bytes
    to_block = destination.to(tl.pointer_type(tl.uint8)) + target // new.page * destination_block_bytes
    from_at, to_at = slot % old.page, target % new.page
    if BYTES:
        for i in tl.static_range(0, NUMBERS, 7):
            here = from_block + old.page * PIECES[i] + from_at * PIECES[i + 1] + PIECES[i + 2]
            there = to_block + new.page * PIECES[i + 3] + to_at * PIECES[i + 4] + PIECES[i + 5]
            copy_bytes(here, there, valid, PIECES[i + 6], WORD)
    else:
        for i in tl.static_range(0, NUMBERS, 2):
            convert_columns(
                old, from_block, from_at, source_descale, new, to_block, to_at, destination_descale, valid,
                PIECES[i], PIECES[i + 1], FAST,
            )  # fmt: skip
        stores.store_pad(new, to_block, to_at, valid)


@triton.jit
def copy_bytes(here, there, valid, COUNT: tl.constexpr, WORD: tl.constexpr):
    """COUNT bytes from each byte pointer `here` to each `there` [tokens]."""
    if WORD == 4:
        here, there = here.to(tl.pointer_type(tl.int32)), there.to(tl.pointer_type(tl.int32))
    at = tl.arange(0, COUNT // WORD)[None, :]
    stored = tl.load(here[:, None] + at, mask=valid[:, None], other=0)
    tl.store(there[:, None] + at, stored, mask=valid[:, None])


@triton.jit
def convert_columns(
    old, from_block, from_at, source_descale, new, to_block, to_at, destination_descale, valid,
    FIRST: tl.constexpr, COUNT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + COUNT of the rows of tokens."""
    row = loads.row_columns(old, from_block, from_at, valid, FIRST, COUNT, False, FAST)
    if source_descale is not None:
        row = row * tl.load(source_descale)
    if destination_descale is not None:
        row = tl.div_rn(row, tl.load(destination_descale) + tl.zeros_like(row))
    stores.store_columns(new, to_block, to_at, valid, row, FIRST, COUNT, FAST)


def byte_pieces(written: KVFormat, read: KVFormat, width: int) -> tuple[int, ...]:
    """Runs of bytes that lie together in both records, in powers of two: the places, as of a `Field`, and the count."""
    found: list[int] = []
    read, written = (caches.sized_to(fmt, width) for fmt in (read, written))
    for old in read.fields:
        new, done = written.by_name[old.name], 0
        while done < old.bytes:
            count = min(1 << (old.bytes - done).bit_length() - 1, LARGEST_PIECE)
            found += (old.per_block, old.stride, old.offset + done, new.per_block, new.stride, new.offset + done, count)
            done += count
    return tuple(found)


@functools.lru_cache(maxsize=256)
def constants(
    source: str, destination: str, width: int, pages: tuple[int, int], descaled: bool, alignment: int
) -> dict[str, Any]:
    """The constants that follow from the formats, the width of a row and the page sizes."""
    read, written = get_kv_format(source), get_kv_format(destination)
    whole = caches.same_records(written, read) and not descaled
    pieces = byte_pieces(written, read, width) if whole else stores.chunks(width, written, read)
    old, new = (
        Place(tl.constexpr(page), loads.record(name, width))
        for name, page in zip((source, destination), pages, strict=True)
    )
    word = 4 if whole and alignment >= 4 and not any(piece % 4 for piece in pieces) else 1
    return dict(old=old, new=new, PIECES=pieces, NUMBERS=len(pieces), BYTES=whole, WORD=word)


def supports(problem: Any, arch: ArchSpec | None) -> Supported | Unsupported:
    if loads.TOO_OLD:
        return Unsupported(loads.TOO_OLD)
    if not problem.copied:
        read, written = get_kv_format(problem.source_format), get_kv_format(problem.destination_format)
        pieces = stores.chunks(problem.width, written, read)
        why = stores.unstored(problem.destination_format) or loads.unread(problem.source_format, problem.width, pieces)
        if why:
            return Unsupported(why)
    # Where an MMA has 64 rows, Triton's conversions of e4m3 round and saturate as these records are defined.
    fast = arch is not None and arch.matrix_min_rows >= 64
    return Supported(fast, f"Triton, one program for {GROUP} tokens")


def run(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    old, new = args.source, args.destination
    tokens = args.source_slots.shape[0]
    counts = [cache.shape[0] * cache.shape[1] for cache in (old, new)]
    if tokens == 0 or 0 in counts:
        return
    width = row(get_kv_format(args.source_format), old)
    descaled = args.source_descale is not None or args.destination_descale is not None
    alignment = min(caches.alignment(old), caches.alignment(new))
    convert_kv_kernel[(triton.cdiv(tokens, GROUP),)](
        *map(caches.as_bytes, (old, new)),
        args.source_slots,
        args.destination_slots,
        args.source_descale,
        args.destination_descale,
        tokens,
        *counts,
        *(cache.stride(0) * cache.element_size() for cache in (old, new)),
        **constants(
            args.source_format, args.destination_format, width, (old.shape[1], new.shape[1]), descaled, alignment
        ),
        FAST=bool(config),
        GROUP=GROUP,
        num_warps=WARPS,
    )
