"""How many splits a sequence of decode has on CDNA where neither arguments nor a plan say it, and what splits cost a
plan.

More splits shorten a workgroup's loop, and each brings a workgroup more whose queries and partials pass through memory:

    clocks(splits) = key * keys of the longest split
                     + partial * sequences * splits      queries, partials written, and read again by combine
                     + combine                           a second launch; the last two where anything is split

A split has a multiple of SPLIT_ALIGNMENT keys and at least as many; `key` is the longer of what a key takes in the loop
and in memory, which all workgroups share. The splits of the least clocks are taken, among those that fill the device
once at most.

A plan counts the same partials in keys, each with the time that memory takes for it where all compute units are busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mla_suite.archs import ArchSpec
from mla_suite.core.prepared import ceil_div
from mla_suite.ops.plan.scheduler import SPLIT_ALIGNMENT, SchedulerCosts, round_up, tile_cost, workgroup_costs

LOOP_ROWS = (16, 64, 128)
MAX_WORKGROUP_ROWS = 80  # of a tile, up to which a plan's partials cost as if one workgroup combined them
MAX_COSTED_ROWS = 2**16  # of a plan's partials; more rows count as this number, which keeps sums far from 64 bits

Kind = tuple[str, str]
"""Types of queries and cache in the words of decode's tuned table, 16bit or fp8."""


@dataclass(frozen=True)
class LoopCosts:
    """Clocks and bytes of decode on one arch, as version 5 of docs/amd_time_model.md models them.

    unit_bytes  that one compute unit draws from memory per clock, at most
    chip_bytes  that all of them together sustain per clock
    combine     clocks of a combine of few splits and its launch
    loop        (queries, cache) -> clocks of a workgroup's loop for a key of 576 values, with tiles of LOOP_ROWS, at
                the highest clock: under matrix load the model's clock falls
    """

    unit_bytes: float
    chip_bytes: float
    combine: float
    loop: Mapping[Kind, tuple[float, float, float]]

    def loop_clocks(self, kind: Kind, rows: int) -> float:
        """Clocks for a key with a tile of any rows, on a line between those of `loop`."""
        few, some, many = self.loop[kind]
        lowest, middle, highest = LOOP_ROWS
        if rows <= middle:
            return few + (some - few) * max(rows - lowest, 0) / (middle - lowest)
        return some + (many - some) * (rows - middle) / (highest - middle)


def default_splits(
    cost: LoopCosts,
    arch: ArchSpec,
    kind: Kind,
    rows: int,
    tiles: int,
    batch: int,
    keys: int,
    width: int = 576,
    head_dim_v: int = 512,
) -> int:
    """Splits of each of `batch` sequences of `keys` keys, which `tiles` workgroups of `rows` query rows share.

    `cost` is the arch's; `width` and `head_dim_v` are values of a cached row and of a row of results: a partial has the
    latter in fp32.
    """
    sequences = max(batch * tiles, 1)
    key_bytes = width * (1 if kind[1] == "fp8" else 2)
    loop = max(key_bytes / cost.unit_bytes, cost.loop_clocks(kind, rows) * width / 576)
    partial = rows * (2 * 4 * head_dim_v + 2 * width) / cost.chip_bytes

    def clocks(splits: int) -> float:
        key = max(loop, key_bytes * sequences * splits / cost.chip_bytes)
        merge = partial * sequences * splits + cost.combine if splits > 1 else 0.0
        return key * min(keys, round_up(ceil_div(keys, splits))) + merge

    return min(range(1, max(min(arch.compute_units // sequences, ceil_div(keys, SPLIT_ALIGNMENT)), 1) + 1), key=clocks)


def plan_costs(arch: ArchSpec, rows: int, max_rows: int) -> SchedulerCosts:
    """Figures for plans of sequences of `rows` query rows, in tiles of at most `max_rows`.

    A partial counts as many keys as have its bytes: to its workgroup what it has beside the result it stands for, and
    its queries, what is written and what combine reads to the whole chip. Tiles of MAX_WORKGROUP_ROWS and fewer keep
    the figures of one workgroup that combines: there few compute units draw all that memory sustains, so that each key
    takes longer where more of them share a context, which no plan counts.
    """
    tile = ceil_div(rows, ceil_div(rows, max_rows))
    if tile <= MAX_WORKGROUP_ROWS:
        return workgroup_costs(rows)
    width, head_dim_v = 576, 512  # of the widest rows; keys, queries and results have 16 bits
    partial = min(rows, MAX_COSTED_ROWS) * (2 * 4 * head_dim_v + 2 * width) / (2 * width * arch.compute_units)
    return SchedulerCosts(tile_cost(tile), round(tile * head_dim_v / width / 2), round(partial))
