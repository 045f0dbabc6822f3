"""convert_kv: copy tokens from one paged KV cache into another of any page size and any kv_format."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch

from mla_suite.core import checks, dispatch, eager
from mla_suite.core.op import Op, Output
from mla_suite.core.register import register
from mla_suite.kv_formats import KVFormat, get_kv_format
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.append_kv import SLOT_DTYPES
from mla_suite.ops.convert_kv import compare, reference, samples


@dataclass(frozen=True)
class ConvertKvArgs:
    """The arguments of `convert_kv`, documented there, in the order of the schema."""

    source: torch.Tensor
    destination: torch.Tensor
    source_slots: torch.Tensor
    destination_slots: torch.Tensor
    source_descale: torch.Tensor | None = None
    destination_descale: torch.Tensor | None = None
    _: KW_ONLY
    source_format: str
    destination_format: str


class Problem(NamedTuple):
    """The properties a choice of kernel may depend on."""

    tokens: int
    source_format: str
    destination_format: str
    width: int  # values of a row
    alignment: int  # largest power of two up to 16 that divides both caches' addresses and block strides, in bytes
    countable: bool  # 31 bits count the slots of a cache, and the bytes of a page
    copied: bool  # stored bytes go as they are to other places


def convert_kv(
    source: torch.Tensor,
    destination: torch.Tensor,
    source_slots: torch.Tensor,
    destination_slots: torch.Tensor,
    source_descale: torch.Tensor | None = None,
    destination_descale: torch.Tensor | None = None,
    *,
    source_format: str,
    destination_format: str,
) -> None:
    """Write tokens of `source` into `destination`, each at its slot. Mutates `destination` and nothing else.

    source               [num_pages, page_size, width] in `source_format`
    destination          [num_pages, page_size, width] in `destination_format`; its rows have as many values as those
                         of source, its pages any size, and its memory is its own
    source_slots         [tokens] int32 or int64: page id * page_size + offset, in pages of source
    destination_slots    [tokens] int32 or int64, in pages of destination, none twice
    source_descale       [] or [1] fp32, for fp8 and fp8_fnuz: a stored value is read as value * source_descale
    destination_descale  [] or [1] fp32 above 0, for fp8 and fp8_fnuz: x is stored as x / destination_descale
    source_format, destination_format   names of `python -m mla_suite formats`

    A token with a negative slot on either side is skipped. Whole pages go by their slots:
    `(page_ids[:, None] * page + torch.arange(page)).flatten()`.

    Records that differ in the order of a block or in the writer's smallest scale alone (`v41` and `v41_vllm`) are
    copied byte for byte, and so are `v32_pow2` into `v32` and equal formats without a descale. All others are read as
    fp32 and quantised by the destination's scale rule, rounded once: without loss where the destination holds every
    value, as fp32 does, and bf16 for all records but `v32` and `v32_nope`. Slots past a cache, a destination slot given
    twice and a descale that is not finite or not above 0 are refused on the CPU and in debug mode.
    """
    tensors = source, destination, source_slots, destination_slots, source_descale, destination_descale
    eager.call(CONVERT_KV.functional, tensors, (source_format, destination_format))


def row(fmt: KVFormat, cache: torch.Tensor) -> int:
    """Values of a row of the cache."""
    return cache.shape[-1] if fmt.dense else fmt.head_dim


def check(args: ConvertKvArgs) -> tuple[Output, ...]:
    read, written = get_kv_format(args.source_format), get_kv_format(args.destination_format)
    checks.tensor("convert_kv", "source", args.source, rank=3, dtypes=caches.dtypes(read))
    caches.check(read, args.source, row(read, args.source), op="convert_kv", argument="source")
    checks.tensor("convert_kv", "destination", args.destination, rank=3, dtypes=caches.dtypes(written))
    width, given = row(read, args.source), row(written, args.destination)
    caches.check(written, args.destination, given, op="convert_kv", argument="destination", like=args.source)
    if width != given:
        possible = f"those of source, in kv_format {read.name!r}, have {width}: no kv_format makes one of the other"
        checks.fail("convert_kv", "destination", f"holds rows of {given} values", possible)
    checks.written_whole("convert_kv", "destination", args.destination)
    caches.check_descale(read, args.source_descale, args.source, op="convert_kv", argument="source_descale")
    caches.check_descale(
        written, args.destination_descale, args.source, op="convert_kv", argument="destination_descale"
    )
    for argument in ("source_slots", "destination_slots"):
        slots = getattr(args, argument)
        checks.tensor("convert_kv", argument, slots, rank=1, dtypes=SLOT_DTYPES, like=args.source)
    tokens = args.source_slots.shape[0]
    checks.shape("convert_kv", "destination_slots", args.destination_slots, (tokens,), "[tokens] of source_slots")
    return ()


def describe(args: ConvertKvArgs) -> Problem:
    both = args.source, args.destination
    read, written = get_kv_format(args.source_format), get_kv_format(args.destination_format)
    return Problem(
        tokens=args.source_slots.shape[0],
        source_format=args.source_format,
        destination_format=args.destination_format,
        width=row(read, args.source),
        alignment=min(map(caches.alignment, both)),
        countable=all(map(_countable, both)),
        copied=reference.copied(written, read, args.source_descale, args.destination_descale),
    )


def _countable(cache: torch.Tensor) -> bool:
    pages, page, _ = cache.shape
    return max(pages * page, cache.stride(0) * cache.element_size()) < 2**31


def validate(args: ConvertKvArgs) -> None:
    read, written = get_kv_format(args.source_format), get_kv_format(args.destination_format)
    for fmt, argument in ((read, "source"), (written, "destination")):
        cache, slots, descale = (getattr(args, argument + part) for part in ("", "_slots", "_descale"))
        caches.check_base(fmt, cache, op="convert_kv", argument=argument)
        caches.check_descale_value(descale, op="convert_kv", argument=f"{argument}_descale")
        held = cache.shape[0] * cache.shape[1]
        if slots.numel() and int(slots.max()) >= held:
            possible = f"{argument} has slots 0..{held - 1}, and a negative one skips its token"
            checks.fail("convert_kv", f"{argument}_slots", f"holds slot {int(slots.max())}", possible)
    slots = args.destination_slots[reference.kept(args.source_slots, args.destination_slots)]
    once, count = slots.unique(return_counts=True)
    if once.numel() < slots.numel():
        given = f"holds slot {int(once[count > 1][0])} {int(count.max())} times"
        checks.fail("convert_kv", "destination_slots", given, "each token needs a slot of its own")


CONVERT_KV = register(
    Op(
        name="convert_kv",
        results="()",
        writes="destination",
        Args=ConvertKvArgs,
        check=check,
        describe=describe,
        validate=validate,
        backends=dispatch.backends("convert_kv", reference.run),
        samples=samples.samples,
        compare=compare.compare,
        pages=compare.pages,
    )
)
