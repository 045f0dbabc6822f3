"""Caches in a declared kv_format: make, check, pack, unpack, gather rows, scatter rows, look for damaged values.

A cache is `[num_pages, page_size, width]`; blocks may lie further apart than tokens need (`KVFormat.block_bytes`). A
*slot* is page id * page_size + offset. Rows are fp32 `[..., head_dim]`. `empty`, `pack`, `unpack` and `validate` are in
`mla_suite.kv_formats` as well, and take a format by its name or its record.
"""

from __future__ import annotations

import math

import torch

from mla_suite.core import checks
from mla_suite.kv_formats import KV_FORMATS, get_kv_format
from mla_suite.kv_formats.declare import Field, KVFormat
from mla_suite.kv_formats.encode import decode, decode_rows, encode_rows


def dtypes(kv_format: KVFormat) -> tuple[torch.dtype, ...]:
    """The tensor dtypes a cache in this kv_format may have; the first is the one `empty` makes."""
    return tuple(getattr(torch, name) for name in kv_format.dtypes)


def empty(
    kv_format: str | KVFormat,
    num_pages: int,
    page_size: int,
    *,
    padded: bool = True,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """An uninitialised cache `[num_pages, page_size, width]`, its blocks `block_bytes(page_size, padded)` apart.

    Raises ValueError for an unknown name and for a negative size.
    """
    fmt = get_kv_format(kv_format)
    for argument, count in (("num_pages", num_pages), ("page_size", page_size)):
        checks.whole("empty", argument, count)
        if count < 0:
            checks.fail("empty", argument, f"is {count}", "it takes 0 or more")
    stride = fmt.block_bytes(page_size, padded) // fmt.element_bytes
    blocks = torch.empty((num_pages, stride), dtype=dtypes(fmt)[0], device=device)
    return blocks.as_strided((num_pages, page_size, fmt.width), (stride, fmt.width, 1))


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """The cache with fp8 values as bytes: opcheck compares no fp8, and Triton has no e4m3fnuz on every GPU."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def unknown(name: str, encodings: frozenset[str]) -> str:
    """Says, where a kv_format holds others than these encodings, which; else an empty string."""
    others = get_kv_format(name).encodings - encodings
    if not others:
        return ""
    return f"kv_format {name} holds {', '.join(sorted(others))}; it takes {', '.join(sorted(encodings))}"


def check(
    kv_format: KVFormat, cache: torch.Tensor, head_dim: int, *, op: str, argument: str, like: torch.Tensor | None = None
) -> None:
    """Refuse a cache that cannot be in `kv_format` with rows of `head_dim` values. Reads metadata only.

    like  a tensor on the device where the cache must be
    """
    taker = f"kv_format {kv_format.name!r}"
    possible_dtypes = dtypes(kv_format)
    checks.is_tensor(op, argument, cache)
    if cache.dtype not in possible_dtypes:
        dtype = checks.dtype_names([cache.dtype])
        others = [name for name, declared in KV_FORMATS.items() if cache.dtype in dtypes(declared)]
        hint = f"; a cache of {dtype} is in kv_format {' or '.join(others)}" if others else ""
        possible = f"{taker} takes {checks.dtype_names(possible_dtypes)}{hint}"
        checks.fail(op, argument, f"is {dtype}", possible, TypeError)
    names = "[num_pages, page_size, width]"
    checks.tensor(op, argument, cache, rank=3, dtypes=possible_dtypes, like=like, names=names)
    if not kv_format.dense and head_dim != kv_format.head_dim:
        possible = f"{taker} holds rows of {kv_format.head_dim}"
        checks.fail(op, argument, f"is read as rows of {head_dim}", possible)
    width = head_dim if kv_format.dense else kv_format.width
    pages, page, given = cache.shape
    if given != width:
        rows = f", since queries or new rows have {head_dim} values" if kv_format.dense else ""
        possible = f"{taker} takes [num_pages, page_size, {width}]{rows}"
        checks.fail(op, argument, f"has shape {tuple(cache.shape)}", possible)
    if page < 1:
        checks.fail(op, argument, f"has shape {tuple(cache.shape)}", "a page holds 1 token or more")
    strides = cache.stride()
    if strides[1] != width and page > 1:
        possible = f"tokens of kv_format {kv_format.name!r} lie exactly {width} elements apart"
        checks.fail(op, argument, f"has strides {strides}", possible)
    if pages > 1 and strides[0] < page * width:
        possible = f"blocks of {page} tokens must not overlap, so the first is at least {page * width}"
        checks.fail(op, argument, f"has strides {strides}", possible)
    if pages > 1 and strides[0] * kv_format.element_bytes % kv_format.alignment != 0:
        possible = f"kv_format {kv_format.name!r} needs blocks a multiple of {kv_format.alignment} bytes apart"
        checks.fail(op, argument, f"has strides {strides}", possible)


def check_base(kv_format: KVFormat, cache: torch.Tensor, *, op: str, argument: str) -> None:
    """Refuse a cache whose first byte is not aligned as the format needs. Real tensors only: fakes have no address."""
    remainder = cache.data_ptr() % kv_format.alignment
    if remainder:
        possible = (
            f"kv_format {kv_format.name!r} needs a first byte aligned to {kv_format.alignment}: slice whole pages only"
        )
        checks.fail(op, argument, f"begins {remainder} bytes past a multiple of {kv_format.alignment}", possible)


def alignment(cache: torch.Tensor) -> int:
    """The largest power of two up to 16 that divides both the address of the cache and the bytes between its blocks."""
    block = cache.stride(0) * cache.element_size() if cache.shape[0] > 1 else 0
    return math.gcd(cache.data_ptr(), block, 16)


def check_descale(
    kv_format: KVFormat, descale: torch.Tensor | None, like: torch.Tensor, *, op: str, argument: str
) -> None:
    """Refuse a descale the kv_format has no use for, or one that is not a single fp32 value."""
    if descale is None:
        return
    if not kv_format.per_tensor_descale:
        users = ", ".join(name for name, declared in KV_FORMATS.items() if declared.per_tensor_descale)
        checks.fail(op, argument, f"was given with kv_format {kv_format.name!r}", f"only {users} read one: pass None")
    check_single(descale, like, op=op, argument=argument)


def check_single(descale: torch.Tensor | None, like: torch.Tensor, *, op: str, argument: str) -> None:
    """Refuse a descale that is not a single fp32 value."""
    if descale is None:
        return
    checks.tensor(op, argument, descale, rank=(0, 1), dtypes=checks.FLOAT32, like=like)
    if descale.numel() != 1:
        checks.fail(op, argument, f"has shape {tuple(descale.shape)}", "it takes one value: shape [] or [1]")


def check_descale_value(descale: torch.Tensor | None, *, op: str, argument: str) -> None:
    """Refuse a descale by which no value can be divided. Reads its value."""
    factor = 1.0 if descale is None else float(descale)
    if not 0.0 < factor < math.inf:
        checks.fail(op, argument, f"is {factor:g}", "values are divided by it: a finite number above 0")


def pack(
    kv_format: str | KVFormat, rows: torch.Tensor, *, descale: torch.Tensor | None = None, padded: bool = True
) -> torch.Tensor:
    """A new cache that holds `rows` `[num_pages, page_size, head_dim]` (any float dtype), quantised by its rule.

    Blocks lie as far apart as those of `empty`, and bytes between them are zero. Raises TypeError for rows of no float
    dtype, and ValueError for an unknown name, for rows of another width than the format's, for a descale that the
    format has no use for, and on the CPU for one that is not finite or not above 0.
    """
    kv_format = get_kv_format(kv_format)
    checks.is_tensor("pack", "rows", rows)
    if not rows.is_floating_point():
        checks.fail("pack", "rows", f"is {str(rows.dtype).removeprefix('torch.')}", "it takes a float dtype", TypeError)
    if rows.dim() != 3 or not (kv_format.dense or rows.shape[-1] == kv_format.head_dim):
        width = "head_dim" if kv_format.dense else kv_format.head_dim
        checks.fail(
            "pack",
            "rows",
            f"has shape {tuple(rows.shape)}",
            f"kv_format {kv_format.name!r} takes [num_pages, page_size, {width}]",
        )
    check_descale(kv_format, descale, rows, op="pack", argument="descale")
    if descale is not None and descale.is_cpu and checks.readable(descale):
        check_descale_value(descale, op="pack", argument="descale")
    sized = sized_to(kv_format, rows.shape[-1])
    pages, page, _ = rows.shape
    cache = empty(sized, pages, page, padded=padded, device=rows.device)
    stride = cache.stride(0) if pages else 0
    cache.as_strided((pages, stride), (stride, 1)).view(torch.uint8).zero_()
    for name, stored in encode_rows(sized, rows.float(), descale).items():
        _words(sized, cache, sized.by_name[name], torch.uint8).copy_(stored.view(torch.uint8))
    return cache


def unpack(kv_format: str | KVFormat, cache: torch.Tensor, *, descale: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 rows `[num_pages, page_size, head_dim]` of a cache; of some pages, `unpack(kv_format, cache[page_ids])`.

    Raises ValueError or TypeError for an unknown name, for a tensor that is no cache in that format, and for a descale
    that it has no use for.
    """
    kv_format = get_kv_format(kv_format)
    _check_any_width(kv_format, cache, "unpack")
    check_descale(kv_format, descale, cache, op="unpack", argument="descale")
    sized = sized_to(kv_format, cache.shape[2])
    stored = {f.name: _words(sized, cache, f, torch.uint8).contiguous() for f in sized.fields if f.name != "pad"}
    return decode_rows(sized, stored, descale)


def _check_any_width(kv_format: KVFormat, cache: torch.Tensor, op: str) -> None:
    """`check` of a cache whose rows, where they are dense, have as many values as it is wide."""
    checks.tensor(op, "cache", cache, rank=3, dtypes=dtypes(kv_format))
    check(kv_format, cache, cache.shape[2] if kv_format.dense else kv_format.head_dim, op=op, argument="cache")


def gather(
    kv_format: KVFormat, cache: torch.Tensor, slots: torch.Tensor, *, descale: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 rows `[n, head_dim]` at `slots` `[n]` (int64, in range); no other token of the cache is read."""
    return decode_rows(sized_to(kv_format, cache.shape[2]), fields_at(kv_format, cache, slots), descale)


def fields_at(kv_format: KVFormat, cache: torch.Tensor, slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """The stored bytes of tokens at `slots` `[n]` (int64, in range) as words, by their field."""
    sized = sized_to(kv_format, cache.shape[2])
    block, token = slots // cache.shape[1], slots % cache.shape[1]
    return {field.name: _words(sized, cache, field)[block, token] for field in sized.fields}


def put_fields(kv_format: KVFormat, cache: torch.Tensor, slots: torch.Tensor, stored: dict[str, torch.Tensor]) -> None:
    """Write `stored` fields, as `fields_at` and `encode_rows` make them, at distinct `slots` `[n]` (int64)."""
    sized = sized_to(kv_format, cache.shape[2])
    block, token = slots // cache.shape[1], slots % cache.shape[1]
    for name, values in stored.items():
        words = _words(sized, cache, sized.by_name[name])
        words[block, token] = values.view(words.dtype)


def same_records(written: KVFormat, read: KVFormat) -> bool:
    """Whether a token stored in `read` is one in `written` as well, but for the places of its fields in a block."""
    if written.dense and read.dense:
        return written.encodings == read.encodings
    if written.scale_rule is None or read.scale_rule is None:
        return False
    alike = [{field.name: (field.encoding, field.count) for field in fmt.fields} for fmt in (written, read)]
    promised = read.scale_rule.power_of_two or not written.scale_rule.power_of_two
    return alike[0] == alike[1] and written.scale_rule.tile == read.scale_rule.tile and promised


def as_keys(kv_format: KVFormat, rows: torch.Tensor) -> torch.Tensor:
    """`rows` as attention multiplies them, in their dtype: those of scaled values are rounded to bf16.

    Only a scale of arbitrary bits (`v32`) makes values that bf16 does not hold.
    """
    return rows if kv_format.scale_rule is None else rows.bfloat16().to(rows.dtype)


def scatter(
    kv_format: KVFormat,
    cache: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    descale: torch.Tensor | None = None,
) -> None:
    """Write `rows` `[n, head_dim]` at distinct `slots` `[n]` (int64, in range); no other token of the cache changes."""
    sized = sized_to(kv_format, rows.shape[-1])
    put_fields(sized, cache, slots, encode_rows(sized, rows.float(), descale))


def validate(kv_format: str | KVFormat, cache: torch.Tensor) -> tuple[str, ...]:
    """Lists the faults among the values of a cache, one sentence each; empty when all is well.

    Looks at every token, so write or clear the whole cache first. Reports NaN and inf among the values, and scales that
    are not positive and finite or, where the rule says so, not a power of two. Raises ValueError or TypeError for an
    unknown name and for a tensor that is no cache in that format.
    """
    kv_format = get_kv_format(kv_format)
    _check_any_width(kv_format, cache, "validate")
    sized = sized_to(kv_format, cache.shape[2])
    found: list[str] = []
    for field in sized.value_fields:
        _report(found, f"{field.name} is not finite", ~_decoded(sized, cache, field).isfinite().all(dim=-1))
    if sized.scale_rule is not None:
        scales = _decoded(sized, cache, sized.by_name["scale"])
        legal = (scales > 0) & scales.isfinite()
        _report(found, "scale is not positive and finite", ~legal.all(dim=-1))
        if sized.scale_rule.power_of_two:
            mantissa, _ = torch.frexp(scales)
            _report(found, "scale is not a power of two", (legal & (mantissa != 0.5)).any(dim=-1))
    return tuple(found)


def _report(found: list[str], what: str, wrong: torch.Tensor) -> None:
    count = int(wrong.sum())
    if count:
        page, offset = (int(i) for i in wrong.nonzero()[0])
        found.append(f"{what} in {count} of {wrong.numel()} tokens, first at page {page} offset {offset}")


def _decoded(kv_format: KVFormat, cache: torch.Tensor, field: Field) -> torch.Tensor:
    return decode(_words(kv_format, cache, field, torch.uint8).contiguous(), field.encoding)


def sized_to(kv_format: KVFormat, width: int) -> KVFormat:
    """A seamless format for rows of `width` values as one field: its bytes do not depend on where a row is divided."""
    if kv_format.dense:
        return kv_format.sized(width, 0)
    return kv_format.sized(kv_format.head_dim, 0) if kv_format.seamless else kv_format


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _words(kv_format: KVFormat, cache: torch.Tensor, field: Field, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One field of every token as a view `[num_pages, page_size, words]`, in the widest word that fits, or in `dtype`.

    Indexing moves one word at a time: 2048 rows of 1152 bytes take 0.2 ms as int64 and 1.3 ms as bytes (one CPU core).
    """
    pages, page, width = cache.shape
    element = cache.element_size()
    start = field.start(0, page)
    block = cache.stride(0) * element if pages > 1 else kv_format.token_bytes * page
    base = cache.storage_offset() * element
    if dtype is None:
        common = math.gcd(field.bytes, field.stride, start, block, base, width * element)
        dtype = next(word for word in _WORDS if common % word.itemsize == 0)
    # Through one row, because a dtype view needs every stride to divide, even one of a dimension of size 1.
    row = cache.as_strided((min(pages, page, 1), width), (width, 1)).view(dtype)
    size = dtype.itemsize
    return row.as_strided(
        (pages, page, field.bytes // size), (block // size, field.stride // size, 1), (base + start) // size
    )
