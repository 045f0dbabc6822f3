"""The parts of bench_served.py that select keys: records of V3.2, V4 and V4.1, bare fp8 rows and bf16 rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from flashmla_sparse import PEER_HEADS, Paged
from served_rows import DEVICE, TOKENS, Row, descale_of, pool, queries, turns_for
from torch.nn import functional

import mla_suite
from mla_suite.kv_formats import get_kv_format

RECORDS = {"584": ("dsv4", "dsv4"), "528": ("v41", "v41"), "288 + 528": ("v41", "v41_fp4")}


def pools_of(formats: tuple[str, ...]) -> list[torch.Tensor]:
    """A window's in pages of 256, if there is one, and one in pages of 64."""
    pages = (256, 64)[-len(formats) :]
    return [pool(name, page, TOKENS // page) for name, page in zip(formats, pages, strict=True)]


def selected(formats: tuple[str, ...], sink: torch.Tensor | None) -> Any:
    """A call of sparse_decode of a turn's queries and indices."""
    pools, none = pools_of(formats), [None] * len(formats)
    options: dict[str, Any] = {"kv_formats": formats, "softmax_scale": get_kv_format(formats[0]).head_dim ** -0.5}
    options["kv_descale"] = descale_of(formats[0])
    return lambda turn: mla_suite.sparse_decode(turn[0], pools, turn[1], none, none, sink, **options)


def flash_mla_call(sink: torch.Tensor) -> Any:
    """FlashMLA's call of V4's records, or None where it is not installed."""
    try:
        import flash_mla
    except ImportError:
        return None
    first, extra = pools_of(RECORDS["584"])
    always = {"attn_sink": sink, "extra_k_cache": extra.unsqueeze(2), "use_legacy": True}
    call = Paged(flash_mla, 512**-0.5, causal=False, fp8=True, **always)
    return lambda turn: call(turn[0], first, None, None, indices=turn[1][0], extra_indices_in_kvcache=turn[1][1])


def selections(batch: int, heads: int, width: int, topks: tuple[int, ...]) -> list[Any]:
    count, shape = turns_for(batch * sum(topks) * 528), (batch, 1)
    found = [
        [torch.randint(TOKENS, (*shape, topk), dtype=torch.int32, device=DEVICE) for topk in topks]
        for _ in range(count)
    ]
    return list(zip(queries(count, batch, 1, heads, width), found, strict=True))


def beside_flash_mla(name: str, call: Any, turns: list[Any], sink: torch.Tensor) -> Iterator[Row]:
    """FlashMLA has the next of the heads that it takes, as engines lay them out."""
    more = min(heads for heads in PEER_HEADS if heads >= len(sink)) - len(sink)
    peer = flash_mla_call(functional.pad(sink, (0, more)))
    if peer is not None:
        padded = [(functional.pad(q, (0, 0, 0, more)), indices) for q, indices in turns]
        yield Row(f"{name}, beside FlashMLA", call, peer, turns, padded)


def records() -> Iterator[Row]:
    shapes = [(batch, heads) for heads in (8, 16, 64) for batch in (1, 8, 32, 128)] + [(32, 12), (32, 20), (32, 96)]
    for batch, heads in shapes:
        turns, sink = selections(batch, heads, 512, (128, 512)), torch.randn(heads, device=DEVICE)
        calls = {name: selected(formats, sink) for name, formats in RECORDS.items()}
        for name in list(RECORDS)[1:]:
            yield Row(f"{name} bytes, B{batch} H{heads}, beside 584", calls[name], calls["584"], turns, turns)
        yield from beside_flash_mla(f"584 bytes, B{batch} H{heads}", calls["584"], turns, sink)


def hca() -> Iterator[Row]:
    for batch in (1, 32):
        turns, sink = selections(batch, 64, 512, (128, 8192)), torch.randn(64, device=DEVICE)
        calls = [selected(RECORDS[name], sink) for name in ("584", "528")]
        yield Row(f"584 bytes, window + 8,192, B{batch} H64, beside 528", *calls, turns, turns)
        yield from beside_flash_mla(f"584 bytes, window + 8,192, B{batch} H64", calls[0], turns, sink)


def beside_v32(name: str, kv_format: str, shapes: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    """Shapes are batches and heads."""
    for batch, heads in shapes:
        turns = selections(batch, heads, 576, (2048,))
        calls = [selected((each,), None) for each in (kv_format, "v32")]
        yield Row(f"{name}, 2,048 keys, B{batch} H{heads}, beside v32", *calls, turns, turns)


def fp8() -> Iterator[Row]:
    return beside_v32("bare fp8 rows", "fp8", ((128, 64), (128, 16), (128, 128), (32, 64), (1, 64)))


def bf16() -> Iterator[Row]:
    shapes = tuple((batch, heads) for heads in (16, 64, 128) for batch in (1, 8, 32, 128))
    return beside_v32("bf16 rows", "bf16", shapes)


def widened(context: int = 65536) -> Iterator[Row]:
    """The tokens of a prompt select from one sequence's pages."""
    records, wide = pool("v32", 64, context // 64), pool("bf16", 64, context // 64, 576)
    slots = torch.arange(context, device=DEVICE)

    def converted(turn: Any) -> object:
        mla_suite.convert_kv(records, wide, slots, slots, source_format="v32", destination_format="bf16")
        return from_rows(turn)

    def call(cache: torch.Tensor, kv_format: str) -> Any:
        options: dict[str, Any] = {"kv_formats": [kv_format], "softmax_scale": 576**-0.5}
        return lambda turn: mla_suite.sparse_decode(turn[0], [cache], [turn[1]], **options)

    from_rows, from_records = call(wide, "bf16"), call(records, "v32")
    for tokens in (256, 1024, 8192):
        for heads in (128, 64, 32, 16):
            q = torch.randn(tokens, heads, 576, device=DEVICE).bfloat16()
            indices = torch.randint(context, (tokens, 2048), dtype=torch.int32, device=DEVICE)
            name = f"{tokens} tokens of {heads} heads over {context} keys, widened beside v32"
            yield Row(name, converted, from_records, [(q, indices)], [(q, indices)])
