"""Print the byte map of every KV cache kv_format.

A cache is a tensor [num_pages, page_size, width]. For each kv_format this shows what one token costs, the rule that
makes its scales, and where each field of token t lies in a block of P tokens:

    python -m mla_suite formats                         all kv_formats, blocks of 64 tokens
    python -m mla_suite formats dsv4 --page-size 256    one kv_format, another page size
    python -m mla_suite formats v32 --constants         also the integers that kernels are compiled with
    python -m mla_suite formats --json                  the same facts for a program
    python -m mla_suite formats v41 v41_fp4 --context 131072    also how many tokens of such sequences a GiB holds

Offsets count bytes from the start of a block. The next block begins `block` bytes later, and a cache may leave more
room than that. In Python: mla_suite.kv_formats.get_kv_format(name); pack, unpack, validate and empty are there too.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from mla_suite.cli import positive
from mla_suite.errors import UsageError
from mla_suite.kv_formats import KV_FORMATS, Field, KVFormat, get_kv_format

NOTES = {
    "e4m3fn": "OCP fp8: largest 448; 0x7f and 0xff are NaN",
    "e4m3fnuz": "FNUZ fp8: a byte is half its OCP value, largest 240; 0x80 is NaN",
    "e2m1": "OCP fp4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign; the first of two values is in the low half of their byte",
    "e8m0": "2^(byte - 127): byte 0 is 2^-127, 255 is NaN",
}
COUNTED = dict(window_layers=40, window=128, window_format="v41", ratios=[1, 1, 2, 2], index_bytes=68)
COUNTED |= dict(index_ratios=[1, 1, 1, 1, 2, 2, 2, 2])
"""Options of a windowed model -> their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="kv_format", help=f"which to print; default all: {', '.join(KV_FORMATS)}"
    )
    parser.add_argument("--page-size", type=positive, default=64, help="tokens in a block (default 64)")
    parser.add_argument("--constants", action="store_true", help="also print the constants kernels are compiled with")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--context", type=positive, help="tokens of a sequence of a windowed model, to count a GiB in")
    parser.add_argument("--window-layers", type=positive, help="layers with a window (default 40)")
    parser.add_argument("--window", type=positive, help="tokens of a window (default 128)")
    parser.add_argument("--window-format", help="kv_format of windows (default v41)")
    parser.add_argument(
        "--ratios", type=positive, nargs="+",
        help="tokens to an entry of each compressed cache, in the kv_formats named (default 1 1 2 2)",
    )  # fmt: skip
    parser.add_argument(
        "--index-ratios", type=positive, nargs="+",
        help="the same of each cache of index keys (default 1 1 1 1 2 2 2 2)",
    )  # fmt: skip
    parser.add_argument("--index-bytes", type=positive, help="bytes of an index key (default 68: MXFP4)")


def run(args: argparse.Namespace) -> int:
    for name, default in COUNTED.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif not args.context:
            raise UsageError(f"--{name.replace('_', '-')} counts the tokens that a GiB holds: add --context")
    console = Console(highlight=False)
    facts = {fmt.name: describe(fmt, args.page_size) for fmt in map(get_kv_format, args.names or KV_FORMATS)}
    if args.context:
        for name, described in facts.items():
            described["tokens_per_gib"] = tokens_per_gib(get_kv_format(name), args)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, described in facts.items():
        show(name, described, args.constants, console)
    return 0


def describe(fmt: KVFormat, page_size: int) -> dict[str, Any]:
    """Everything printed about a kv_format, as plain data."""
    scaled = "kv_descale, one fp32 per tensor" if fmt.per_tensor_descale else "none"
    return {
        "summary": fmt.summary,
        "dtypes": list(fmt.dtypes),
        "shape": ["pages", page_size, fmt.width],
        "token_bytes": fmt.token_bytes,
        "head_dim": fmt.head_dim,
        "head_dim_v": fmt.head_dim_v,
        "block_bytes": fmt.block_bytes(page_size),
        "block_bytes_unpadded": fmt.block_bytes(page_size, padded=False),
        "alignment": fmt.alignment,
        "scale_rule": scaled if fmt.scale_rule is None else fmt.scale_rule.sentence,
        "fields": [
            {
                "name": field.name,
                "encoding": field.encoding,
                "count": field.count,
                "offset": offset_formula(field),
                "token_0": [field.start(0, page_size), field.start(0, page_size) + field.bytes],
                "last_token": [
                    field.start(page_size - 1, page_size),
                    field.start(page_size - 1, page_size) + field.bytes,
                ],
            }
            for field in fmt.fields
        ],
        "constants": fmt.constants(),
    }


def tokens_per_gib(fmt: KVFormat, args: argparse.Namespace) -> int:
    """Tokens in sequences of `args.context` that a GiB holds, with windows, compressed entries and index keys."""
    windows = args.window_layers * min(args.window, args.context) * get_kv_format(args.window_format).token_bytes
    entries = sum(args.context // ratio for ratio in args.ratios) * fmt.token_bytes
    keys = sum(args.context // ratio for ratio in args.index_ratios) * args.index_bytes
    return args.context * 2**30 // (windows + entries + keys)


def show(name: str, facts: dict[str, Any], constants: bool, console: Console) -> None:
    """Prints what `describe` found: a line for each fact, then a table of the fields."""
    _, page_size, width = facts["shape"]
    dense = get_kv_format(name).dense
    padding = facts["block_bytes"] - facts["block_bytes_unpadded"]
    lines = {
        "cache": f"[pages, {page_size}, {width}{'*' if dense else ''}] {' or '.join(facts['dtypes'])}; "
        f"{facts['token_bytes']} bytes per token",
        "row": f"{facts['head_dim']}{'*' if dense else ''} values, of which V is the first {facts['head_dim_v']}"
        + (" (*any size)" if dense else ""),
        "block": f"{facts['block_bytes']} bytes" + (f", of which {padding} are padding" if padding else ""),
        "align": f"first byte and block stride are multiples of {facts['alignment']}",
        "scale": facts["scale_rule"],
    }
    if "tokens_per_gib" in facts:
        lines["GiB"] = f"{facts['tokens_per_gib']} tokens"
    encodings = {field["encoding"] for field in facts["fields"]}
    lines |= {encoding: note for encoding, note in NOTES.items() if encoding in encodings}
    console.print(f"[bold]{name}[/bold]  {facts['summary']}")
    for label, text in lines.items():
        console.print(f"  {label:9} {text}", markup=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 1, 0, 2))
    for column in ("", "values", "first byte", "token 0", f"token {page_size - 1}"):
        table.add_column(column, no_wrap=True)
    for field in facts["fields"]:
        spans = [f"{first}..{end - 1}" for first, end in (field["token_0"], field["last_token"])]
        table.add_row(field["name"], f"{field['count']} x {field['encoding']}", field["offset"], *spans)
    console.print(table)
    if constants:
        console.print("\n".join(f"  -D{macro}={value}" for macro, value in facts["constants"].items()))
    console.print()


def offset_formula(field: Field) -> str:
    """`P*576 + t*8 + 7` and the like."""
    terms = [f"P*{field.per_block}"] if field.per_block else []
    terms.append(f"t*{field.stride}")
    return " + ".join([*terms, str(field.offset)] if field.offset else terms)
