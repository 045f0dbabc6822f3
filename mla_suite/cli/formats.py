"""Print the byte map of every KV cache kv_format.

A cache is a tensor [pages, page, width]. For each kv_format this shows what one token costs, the rule that makes its
scales, and where each field of token t lies in a block of P tokens:

    python -m mla_suite formats                     all kv_formats, blocks of 64 tokens
    python -m mla_suite formats dsv4 --page 256     one kv_format, another page size
    python -m mla_suite formats v32 --constants     also the integers that kernels are compiled with
    python -m mla_suite formats --json              the same facts for a program

Offsets count bytes from the start of a block. The next block begins `block` bytes later, and a cache may leave more
room than that. In Python: mla_suite.kv_formats.kv_format(name), and .cache for pack, unpack and validate.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mla_suite.cli import positive
from mla_suite.kv_formats import KV_FORMATS, Field, KVFormat, kv_format

BAR = 50
COLOURS = {
    "latent": "black on cyan",
    "rope": "black on yellow",
    "scale": "black on green",
    "pad": "white on bright_black",
}

NOTES = {
    "e4m3fn": "OCP fp8: largest 448; 0x7f and 0xff are NaN",
    "e4m3fnuz": "FNUZ fp8: a byte is half its OCP value, largest 240; 0x80 is NaN",
    "e8m0": "2^(byte - 127): byte 0 is 2^-127, 255 is NaN",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="kv_format", help=f"which to print; default all: {', '.join(KV_FORMATS)}"
    )
    parser.add_argument("--page", type=positive, default=64, help="tokens in a block (default 64)")
    parser.add_argument("--constants", action="store_true", help="also print the constants kernels are compiled with")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    chosen = [kv_format(name) for name in args.names] or list(KV_FORMATS.values())
    if args.json:
        print(json.dumps({one.name: facts(one, args.page) for one in chosen}, indent=2))
        return 0
    for one in chosen:
        console.print(picture(one, args.page, args.constants), "")
    return 0


def facts(one: KVFormat, page: int) -> dict[str, Any]:
    """Everything printed about a kv_format, as plain data."""
    return {
        "summary": one.summary,
        "dtypes": list(one.dtypes),
        "shape": ["pages", page, one.width],
        "token_bytes": one.token_bytes,
        "head_dim": one.head_dim,
        "head_dim_v": one.head_dim_v,
        "block_bytes": one.block_bytes(page),
        "block_bytes_unpadded": one.block_bytes(page, padded=False),
        "alignment": one.alignment,
        "scale_rule": scale_sentence(one),
        "fields": [
            {
                "name": field.name,
                "encoding": field.encoding,
                "count": field.count,
                "offset": offset_formula(field),
                "token_0": [field.start(0, page), field.start(0, page) + field.bytes],
                "last_token": [field.start(page - 1, page), field.start(page - 1, page) + field.bytes],
            }
            for field in one.fields
        ],
        "constants": one.constants(),
    }


def picture(one: KVFormat, page: int, constants: bool) -> RenderableType:
    """The kv_format's facts, a bar of one token's bytes, and a table of its fields."""
    shown = facts(one, page)
    table = Table(box=None, padding=(0, 1, 0, 2))
    for column in ("", "values", "first byte", "token 0", f"token {page - 1}"):
        table.add_column(column, no_wrap=True)
    for field in shown["fields"]:
        spans = [f"{first}..{end - 1}" for first, end in (field["token_0"], field["last_token"])]
        table.add_row(field["name"], f"{field['count']} x {field['encoding']}", field["offset"], *spans)
    width = f"{one.width}*" if one.dense else str(one.width)
    padding = one.block_bytes(page) - one.block_bytes(page, padded=False)
    block = f"{one.block_bytes(page)} bytes" + (f", of which {padding} are padding" if padding else "")
    said = {
        "cache": f"[pages, {page}, {width}] {' or '.join(one.dtypes)}; {one.token_bytes} bytes per token",
        "row": f"{one.head_dim} values = {one.latent} latent + {one.rope} rope; V is the first {one.head_dim_v}"
        + (" (*any size)" if one.dense else ""),
        "block": block,
        "align": f"first byte and block stride are multiples of {one.alignment}",
        "scale": scale_sentence(one),
    }
    encodings = {field.encoding for field in one.fields}
    said |= {encoding: note for encoding, note in NOTES.items() if encoding in encodings}
    lines = [Text(f"  {label:9} {text}") for label, text in said.items()]
    title = Text.assemble((one.name, "bold"), f"  {one.summary}")
    parts: list[RenderableType] = [title, *lines, *bars(one, page), table]
    if constants:
        parts.append(Text("  " + "\n  ".join(f"-D{name}={value}" for name, value in one.constants().items())))
    return Group(*parts)


def scale_sentence(one: KVFormat) -> str:
    if one.scale_rule is not None:
        return one.scale_rule.sentence
    return "kv_descale, one fp32 per tensor" if one.per_tensor_descale else "none"


def offset_formula(field: Field) -> str:
    """`P*576 + t*8 + 7` and the like."""
    terms = [f"P*{field.per_block}"] if field.per_block else []
    terms.append(f"t*{field.stride}")
    return " + ".join([*terms, str(field.offset)] if field.offset else terms)


def bars(one: KVFormat, page: int) -> list[Text]:
    """One token's bytes drawn to scale; a second bar for what lies at the end of the block."""
    drawn = [Text("  token     ") + bar([f for f in one.fields if not f.per_block])]
    tail = [f for f in one.fields if f.per_block]
    if tail:
        start = tail[0].start(0, page)
        drawn.append(Text("  tail      ") + bar(tail) + Text(f" x {page}, from byte {start}"))
    return drawn


def bar(fields: list[Field]) -> Text:
    total = max(sum(field.bytes for field in fields), 64)
    text = Text("|")
    for field in fields:
        label = f"{field.name} {field.bytes} B"
        cells = max(BAR * field.bytes // total, len(label) + 2)
        text.append(label.center(cells), style=COLOURS[field.name]).append("|")
    return text
