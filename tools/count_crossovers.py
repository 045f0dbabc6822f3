"""Prints the counted rows of ops/decode/tuned/<arch>.csv, gfx942 or gfx950: which tile takes the least modelled time.

  python tools/count_crossovers.py ARCH COMMIT DATE

The emulator plays one workgroup of each tile as docs/amd_time_model.md says, which gives its clocks without keys and
those that a key adds. The clocks of a call are those of the compute unit with the most workgroups; keys, queries and
results come at what a unit draws, or at its share of what the chip sustains; keys that several row tiles read take of
it what the model of time says. Splits are those that decode makes by itself, and behind them comes a combine. None of
this is a measured time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import ArchSpec, decode_table
from mla_suite.archs.cdna.decode import FP8_KV_FORMATS, FP8_QUERIES, TILE, CdnaConfig, tile_rows
from mla_suite.archs.cdna.splits import default_splits
from mla_suite.archs.decode_table import FORMAT
from mla_suite.archs.gfx942 import Gfx942Config
from mla_suite.archs.gfx950 import Gfx950Config
from mla_suite.cli import bar
from mla_suite.core import register
from mla_suite.core.prepared import ceil_div, rounded_up
from mla_suite.emulator import timing
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.scheduler import round_up

CONFIGS: dict[str, type[CdnaConfig]] = {"gfx942": Gfx942Config, "gfx950": Gfx950Config}
KINDS = (("16bit", "16bit"), ("16bit", "fp8"), ("fp8", "fp8"))
BLOCK_MS = (32, 64, 96, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
FULL, FEW_KEYS = 128, 64
"""Sequences that fill the device; so many with few keys of an fp8 cache take one tile for all rows."""
TILES = (16, 32, 64)
LENGTHS = (1024, 1536)  # keys of the workgroup that is played: its loop is steady, in whole periods of its page numbers
STEP, LONGEST = 256, 1 << 16  # keys
BELOW = (0, 80, 160, 240)  # contexts up to a limit that are looked at, since whole splits favour multiples of 64
WORTH = 0.95  # emulated launches are up to 4 % from these clocks


class Workgroup(NamedTuple):
    """Clocks of a workgroup that has memory for itself: `fixed` beside its keys, `per_key` of each, `keys` at once."""

    fixed: float
    per_key: float
    keys: int


@cache
def workgroup(arch_name: str, kind: tuple[str, str], rows: int) -> Workgroup:
    """With one tile of `rows`. The clock is as low as the matrix units hold it while the loop runs."""
    clocks, matrix, op, flavour = [], [], register.get("decode"), archs.get(arch_name).fp8
    options: dict[str, Any] = {"kv_format": FP8_KV_FORMATS[flavour]} if kind[1] == "fp8" else {}
    options |= {"dtype": FP8_QUERIES[flavour]} if kind[0] == "fp8" else {}
    for keys in LENGTHS:
        args, kwargs = decode_sample((keys,), heads=rows, num_splits=1, **options).make(torch.device("cpu"))
        with mla_suite.emulate(arch_name), emulator.configured(collect=True, time=True) as reports:
            chosen = op.choose(op.Args(*args, **kwargs)).supported
            torch.ops.mla_suite.decode(*args, **kwargs)
        if reports[0].findings:
            raise SystemExit(f"{reports[0].findings[0]}; what breaks a rule of the machine is not counted")
        assert reports[0].groups is not None
        clocks.append(float(reports[0].groups[0]["clocks"].max()))
        matrix.append(float(reports[0].groups[0]["matrix"].max()))
    step = LENGTHS[1] - LENGTHS[0]
    per_key = (clocks[1] - clocks[0]) / step
    fixed = clocks[0] - LENGTHS[0] * per_key
    load = (matrix[1] - matrix[0]) / step / per_key
    together = 1 if rows == TILE else chosen.config.keys  # waves with a row tile each have keys of their own
    return Workgroup(fixed, per_key / timing.matrix_clock(timing.CHIP, load), together)


def modelled(arch: ArchSpec, kind: tuple[str, str], rows: int, tile: int, batch: int, context: int) -> float:
    """Clocks of a call with tiles of at most `tile` of its `rows` query rows."""
    tiles, cost, tile = -(-rows // tile), CONFIGS[arch.name].costs, tile_rows(rows, tile)
    key_bytes, query_bytes = (576 * (1 if name == "fp8" else 2) for name in (kind[1], kind[0]))
    splits = default_splits(cost, arch, kind, tile, tiles, batch, context)
    groups, found = batch * tiles * splits, workgroup(arch.name, kind, tile)
    share = min(cost.unit_bytes, cost.chip_bytes / min(groups, arch.compute_units))
    own = tile * (query_bytes + 512 * (4 if splits > 1 else 2))  # bytes that a workgroup moves beside its keys
    keys = ceil_div(round_up(ceil_div(context, splits)), found.keys) * found.keys
    fetched = key_bytes * timing.fetched(tiles)
    clocks = found.fixed + keys * max(found.per_key, fetched / share) + own * (1 / share - 1 / cost.unit_bytes)
    merge = cost.combine + batch * rows * splits * 512 * 4 / cost.chip_bytes if splits > 1 else 0.0
    return ceil_div(groups, arch.compute_units) * clocks + merge


def limits(arch: ArchSpec, kind: tuple[str, str], rows: int, batch: int) -> Iterator[tuple[int, int]]:
    """(context, tile): up to this context, the tile takes the fewest clocks, none being smaller than one before it,
    which a larger one beats by `WORTH`; ends where one tile for all rows does, or at LONGEST."""
    best = 0

    def clocks(tile: int, context: int) -> float:
        found = sum(modelled(arch, kind, rows, tile, batch, context - less) for less in BELOW)
        return found * (WORTH if tile == best else 1)

    for context in range(STEP, LONGEST + 1, STEP):
        tiles = [tile for tile in (*TILES, rows) if best <= tile <= rows]
        now = min(tiles, key=lambda tile: (clocks(tile, context), -tile))
        if best and now != best:
            yield rounded_up(context - STEP), best  # a shipped limit is such a number
        best = now
        if best == rows:
            return
    yield LONGEST, best


def lines(arch_name: str, commit: str, date: str) -> Iterator[str]:
    arch = archs.get(arch_name)
    pairs = [(kind, rows) for kind in KINDS for rows in BLOCK_MS]
    with bar("", len(pairs)) as update:
        for kind, rows in pairs:
            update(description=f"{rows} rows, {kind[0]} queries, {kind[1]} cache")
            for batch in BATCHES:
                found = list(limits(arch, kind, rows, batch))
                if found and batch == FULL and kind[1] == "fp8":
                    found.insert(0, (FEW_KEYS, min(tile for tile in decode_table.TILES.values() if tile >= rows)))
                for context, tile in found:
                    facts = dict(query=kind[0], cache=kind[1], rows=rows, batch=batch, context=context)
                    provenance = dict(kind="counted", commit=commit, date=date)
                    yield FORMAT.line(dict(policy="default", shape="any", **facts, use=f"rows{tile}", **provenance))
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
