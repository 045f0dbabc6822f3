"""Prints the counted rows of ops/decode/tuned/gfx950.csv: which tile has the lower bound, from emulator counters.

  python tools/count_crossovers.py COMMIT DATE

Bound of a call in clocks: the larger of memory, at the rate that the chip sustains and with nothing shared between row
tiles, and of what the busiest compute unit does: keys at the largest of its matrix, vector and LDS clocks and of what
it draws from memory, then queries and results. Splits are those that decode makes by itself, and a combine behind them
is a constant. Neither latency nor caches are in it, so it is a bound and not a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import ArchSpec
from mla_suite.archs.cdna.splits import default_splits
from mla_suite.archs.decode_table import FORMAT
from mla_suite.archs.gfx950 import Gfx950Config
from mla_suite.cli import bar
from mla_suite.ops.decode.samples import decode_sample

KINDS: dict[tuple[str, str], dict[str, Any]] = {
    ("16bit", "16bit"): {},
    ("16bit", "fp8"): {"kv_format": "fp8"},
    ("fp8", "fp8"): {"kv_format": "fp8", "dtype": torch.float8_e4m3fn},
}
BLOCK_MS = (32, 64, 96, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
TILES = (16, 32)
STEP, LONGEST = 256, 1 << 15  # keys


@cache
def unit_clocks(kind: tuple[str, str], rows: int) -> float:
    """Clocks per key of a compute unit with one tile of `rows`, memory left out: what a longer sequence adds."""
    found = []
    for keys in (512, 1536):
        args, kwargs = decode_sample((keys,), heads=rows, num_splits=1, **KINDS[kind]).make(torch.device("cpu"))
        with mla_suite.emulate("gfx950") as arch, emulator.configured(collect=True) as reports:
            torch.ops.mla_suite.decode(*args, **kwargs)
        if reports[0].findings:
            raise SystemExit(f"{reports[0].findings[0]}; what breaks a rule of the machine is not counted")
        found.append(reports[0].bound(arch))
    short, long = found
    return max(long.matrix - short.matrix, long.valu - short.valu, long.lds_128 - short.lds_128) / 1024


def bound(arch: ArchSpec, kind: tuple[str, str], rows: int, tile: int, batch: int, context: int) -> float:
    tiles, cost = -(-rows // tile), Gfx950Config.costs
    key_bytes = 576 * (1 if kind[1] == "fp8" else 2)
    splits = default_splits(cost, arch, kind, tile, tiles, batch, context)
    own = tile * (576 * 2 + 512 * (4 if splits > 1 else 2))  # bytes of queries and results that a workgroup moves
    per_key = max(unit_clocks(kind, tile), key_bytes / cost.unit_bytes)
    turns = -(-batch * tiles * splits // arch.compute_units)
    memory = batch * tiles * (context * key_bytes + splits * own) / cost.chip_bytes
    unit = turns * (per_key * -(-context // splits) + own / cost.unit_bytes)
    return max(memory, unit) + (cost.combine if splits > 1 else 0)


def limits(arch: ArchSpec, kind: tuple[str, str], rows: int, batch: int) -> Iterator[tuple[int, int]]:
    """(context, tile): up to this context, the tile has the lowest bound, none being smaller than one before it; ends
    where one tile for all rows does."""
    best = 0
    for context in range(STEP, LONGEST + 1, STEP):
        tiles = [tile for tile in (*TILES, rows) if best <= tile <= rows]
        now = min(tiles, key=lambda tile: (bound(arch, kind, rows, tile, batch, context), -tile))
        if best and now != best:
            yield context - STEP, best
        best = now
        if best == rows:
            return


def lines(commit: str, date: str) -> Iterator[str]:
    arch = archs.get("gfx950")
    pairs = [(kind, rows) for kind in KINDS for rows in BLOCK_MS]
    with bar("", len(pairs)) as update:
        for kind, rows in pairs:
            update(description=f"{rows} rows, {kind[0]} queries, {kind[1]} cache")
            for batch in BATCHES:
                for context, tile in limits(arch, kind, rows, batch):
                    facts = dict(query=kind[0], cache=kind[1], rows=rows, batch=batch, context=context)
                    provenance = dict(kind="counted", commit=commit, date=date)
                    yield FORMAT.line(dict(policy="default", shape="any", **facts, use=f"rows{tile}", **provenance))
            update(advance=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", metavar="COMMIT", help="of the kernels that are counted, for the rows' provenance")
    parser.add_argument("date", metavar="DATE", help="YYYY-MM-DD, likewise")
    given = parser.parse_args()
    for line in lines(given.commit, given.date):
        print(line, flush=True)


if __name__ == "__main__":
    main()
