"""Prints the counted rows of ops/decode/tuned/<arch>.csv, gfx942 or gfx950: which tile takes the least modelled time.

  python tools/count_crossovers.py ARCH COMMIT DATE

The emulator plays one workgroup of each tile as docs/amd_time_model.md says, with memory for itself. What a key takes
longer in a call, where a workgroup has a share of the chip's memory and the chip's clock, which falls with the load of
all matrix units, is that of `archs/cdna/splits.py`, and so is what its queries and results take; keys that several row
tiles read take of memory what the model of time says. The clocks of a call are those of the compute unit with the most
workgroups. Splits are those that decode makes by itself, and behind them comes a combine. None of this is a measured
time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import ArchSpec, decode_table
from mla_suite.archs.cdna.decode import FP8_KV_FORMATS, FP8_QUERIES, MAX_ROWS, TILE, CdnaConfig, tile_rows
from mla_suite.archs.cdna.splits import REREAD, default_splits
from mla_suite.archs.decode_table import FORMAT
from mla_suite.archs.gfx942 import Gfx942Config
from mla_suite.archs.gfx950 import Gfx950Config
from mla_suite.cli import bar
from mla_suite.core import register
from mla_suite.core.prepared import ceil_div, rounded_up
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.scheduler import round_up

CONFIGS: dict[str, type[CdnaConfig]] = {"gfx942": Gfx942Config, "gfx950": Gfx950Config}
KINDS = (("16bit", "16bit"), ("16bit", "fp8"), ("fp8", "fp8"))
BLOCK_MS = (32, 48, 64, 96, 128, 256, 512)
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TILES = (16, 32, 64)
LENGTHS = (64, 128, 256, 512, 1024, 1536)  # keys of the workgroup that is played; the last two have a steady loop
CONTEXTS = (64, *range(256, 8193, 256), *range(9216, (1 << 16) + 1, 1024))
BELOW = (0, 80, 160, 240)  # contexts up to a limit that are looked at, since whole splits favour multiples of 64
COMBINE = 14_000  # clocks of a combine beside its partials' bytes: 13,000 to 14,500 up to 8,192 rows of few splits
AT_RISK = 1.4
WORTH = 0.97  # emulated launches are 1.4 % from these clocks in the median


@cache
def workgroup(arch_name: str, kind: tuple[str, str], rows: int) -> tuple[tuple[float, ...], int]:
    """Clocks of a workgroup with one tile of `rows` and LENGTHS keys, and how many keys it takes at once.

    It has half of a sequence, as a split that writes a partial result, or one of LENGTHS[0] keys whole.
    """
    op, flavour, clocks, together = register.get("decode"), archs.get(arch_name).fp8, [], 1
    options: dict[str, Any] = {"kv_format": FP8_KV_FORMATS[flavour]} if kind[1] == "fp8" else {}
    options |= {"dtype": FP8_QUERIES[flavour]} if kind[0] == "fp8" else {}
    for keys in LENGTHS:
        splits = 1 if keys == LENGTHS[0] else 2
        sample = decode_sample((keys * splits,), heads=rows, num_splits=splits, **options)
        args, kwargs = sample.make(torch.device("cpu"))
        with mla_suite.emulate(arch_name), emulator.configured(collect=True, time=True) as reports:
            chosen = op.choose(op.Args(*args, **kwargs)).supported
            torch.ops.mla_suite.decode(*args, **kwargs)
        if reports[0].findings:
            raise SystemExit(f"{reports[0].findings[0]}; what breaks a rule of the machine is not counted")
        assert reports[0].groups is not None
        clocks.append(float(reports[0].groups[0]["clocks"].max()))
        together = 1 if rows == TILE else chosen.config.keys  # waves with a row tile each have keys of their own
    return tuple(clocks), together


def alone(clocks: tuple[float, ...], keys: int) -> float:
    """Those of a workgroup with any number of keys, on a line between those of LENGTHS and beyond the last two."""
    if keys <= LENGTHS[-1]:
        return float(np.interp(keys, LENGTHS, clocks))
    return clocks[-1] + (clocks[-1] - clocks[-2]) / (LENGTHS[-1] - LENGTHS[-2]) * (keys - LENGTHS[-1])


def modelled(
    arch: ArchSpec, kind: tuple[str, str], rows: int, tile: int, batch: int, context: int, reread: float
) -> float:
    """Clocks of a call with tiles of at most `tile` of its `rows` query rows, where a byte that another tile has read
    takes `reread` of memory's time."""
    cost, tile = CONFIGS[arch.name].costs, tile_rows(rows, tile)
    tiles = ceil_div(rows, tile)
    splits = default_splits(cost, arch, kind, tile, tiles, batch, context)
    groups, (played, together) = batch * tiles * splits, workgroup(arch.name, kind, tile)
    units = min(groups, arch.compute_units)
    keys = round_up(ceil_div(context, splits))
    if context > LENGTHS[0]:
        keys = ceil_div(keys, together) * together
    key = cost.key_clocks(arch, kind, tile, tiles, units, reread=reread) - cost.key_clocks(arch, kind, tile, 1, 1)
    own = cost.own_bytes(kind, tile, splits > 1) / cost.rate(units)
    own -= cost.own_bytes(kind, tile, keys > LENGTHS[0]) / cost.unit_bytes
    merge = COMBINE + batch * rows * splits * 512 * 4 / cost.chip_bytes if splits > 1 else 0.0
    return ceil_div(groups, arch.compute_units) * (alone(played, keys) + keys * key + own) + merge


def limits(arch: ArchSpec, kind: tuple[str, str], rows: int, batch: int) -> Iterator[tuple[int, int]]:
    """(context, tile): up to this context, and from the one before it on, the tile is taken; the last context is that
    of CONTEXTS.

    A tile is taken where its clocks are `WORTH` of each larger one's, and no more than `AT_RISK` of theirs if what its
    workgroups read of each other's keys takes twice the time that the model, which has no caches, gives it. A tile in
    use counts as `WORTH` of what it takes.
    """
    tiles, best, last = [*(tile for tile in TILES if tile < rows), min(rows, MAX_ROWS)], 0, 0

    def clocks(tile: int, context: int, reread: float) -> float:
        lengths = [context - less for less in BELOW if less < context]
        return sum(modelled(arch, kind, rows, tile, batch, keys, reread) for keys in lengths)

    for context in CONTEXTS:
        worth = {tile: WORTH if tile == best else 1.0 for tile in tiles}
        took = {tile: worth[tile] * clocks(tile, context, REREAD) for tile in tiles}
        dear = {tile: worth[tile] * clocks(tile, context, 2 * REREAD) for tile in tiles}
        now = tiles[-1]
        for tile in reversed(tiles):
            if took[tile] < WORTH * took[now] and dear[tile] <= AT_RISK * dear[now]:
                now = tile
        if best and now != best:
            yield rounded_up(last), best  # a shipped limit is such a number
        best, last = now, context
    yield last, best


def lines(arch_name: str, commit: str, date: str) -> Iterator[str]:
    arch = archs.get(arch_name)
    pairs = [(kind, rows) for kind in KINDS for rows in BLOCK_MS]
    with bar("", len(pairs)) as update:
        for kind, rows in pairs:
            update(description=f"{rows} rows, {kind[0]} queries, {kind[1]} cache")
            for batch in BATCHES:
                for context, tile in limits(arch, kind, rows, batch):
                    use = next(name for name, most in decode_table.TILES.items() if most >= tile)
                    facts = dict(query=kind[0], cache=kind[1], rows=rows, batch=batch, context=context)
                    provenance = dict(kind="counted", commit=commit, date=date)
                    yield FORMAT.line(dict(policy="default", shape="any", **facts, use=use, **provenance))
            update(advance=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", metavar="ARCH", choices=tuple(CONFIGS), help="gfx942 or gfx950")
    parser.add_argument("commit", metavar="COMMIT", help="of the kernels that are counted, for the rows' provenance")
    parser.add_argument("date", metavar="DATE", help="YYYY-MM-DD, likewise")
    given = parser.parse_args()
    for line in lines(given.arch, given.commit, given.date):
        print(line, flush=True)


if __name__ == "__main__":
    main()
