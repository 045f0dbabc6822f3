"""How many splits a sequence of decode has on CDNA where neither arguments nor a plan say it, and what splits cost a
plan.

More splits shorten a workgroup's loop. Each brings a workgroup more, whose queries and partials share memory with the
others', and a busier chip, whose clock is lower:

    clocks(splits) = key * keys of the longest split
                     + bytes of a workgroup's queries and results / what it draws from memory
                     + combine, and partials read again           a second launch; where anything is split

A split has a multiple of SPLIT_ALIGNMENT keys and at least as many; `key` is the longer of what a key takes in the loop
and in memory, and EXPOSED of the shorter. The splits of the least clocks are taken, among those that fill the device
once at most.

A plan counts the same partials in keys, each with the time that memory takes for it where all compute units are busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mla_suite.archs import ArchSpec
from mla_suite.core.prepared import ceil_div
from mla_suite.ops.plan.scheduler import SPLIT_ALIGNMENT, SchedulerCosts, round_up, tile_cost, workgroup_costs

LOOP_ROWS = (16, 32, 64, 96, 128)
REREAD = 5.3 / 17.2  # what a byte that another row tile reads, too, takes of memory's time
LOWEST_CLOCK = 0.6  # of the highest, with all matrix units of the chip busy
EXPOSED = 0.05  # 0.00 to 0.11 in played loops, the most where loop and memory take as long as each other
MAX_WORKGROUP_ROWS = 80  # of a tile, up to which a plan's partials cost as if one workgroup combined them
MAX_COSTED_ROWS = 2**16  # of a plan's partials; more rows count as this number, which keeps sums far from 64 bits

Kind = tuple[str, str]
"""Types of queries and cache in the words of decode's tuned table, 16bit or fp8."""


@dataclass(frozen=True)
class LoopCosts:
    """Clocks and bytes of decode on one arch, as version 6 of docs/amd_time_model.md models them.

    unit_bytes  that one compute unit draws from memory per clock, at most
    chip_bytes  that all of them together sustain per clock
    combine     clocks of a combine and its launch beside its partials' bytes: 1,500 fewer than are modelled, since one
                split where several are as fast is what version 5 had up to a fifth slower
    loop        (queries, cache) -> clocks of a workgroup's loop for a key of 576 values that memory has in time, with
                tiles of LOOP_ROWS; others take as long as the next of them
    matrix      (queries, cache) -> of these those in which the matrix units are busy
    """

    unit_bytes: float
    chip_bytes: float
    combine: float
    loop: Mapping[Kind, tuple[float, ...]]
    matrix: Mapping[Kind, tuple[float, ...]]

    def rate(self, workgroups: int) -> float:
        """Bytes per clock that each of so many workgroups draws from memory."""
        return min(self.unit_bytes, self.chip_bytes / workgroups)

    def key_clocks(
        self,
        arch: ArchSpec,
        kind: Kind,
        rows: int,
        tiles: int,
        workgroups: int,
        width: int = 576,
        reread: float = REREAD,
    ) -> float:
        """Clocks of a key in each of `workgroups` with a tile of `rows`, at the highest clock.

        `tiles` of them share a sequence's keys. The clock falls with the load of all matrix units of the chip; memory
        keeps its rate.
        """
        size = next(n for n, most in enumerate(LOOP_ROWS) if rows <= most)
        loop, matrix = self.loop[kind][size], self.matrix[kind][size]
        load = matrix / loop * min(workgroups / arch.compute_units, 1)
        loop *= width / 576 / (1 - (1 - LOWEST_CLOCK) * load)
        shared = (1 + (tiles - 1) * reread) / tiles
        memory = width * value_bytes(kind[1]) * shared / self.rate(workgroups)
        return max(loop, memory) + EXPOSED * min(loop, memory)

    def own_bytes(self, kind: Kind, rows: int, split: bool, width: int = 576, head_dim_v: int = 512) -> int:
        """Bytes of a workgroup's queries, and of its results, which are fp32 where its sequence is split."""
        return rows * (width * value_bytes(kind[0]) + head_dim_v * (4 if split else 2))


def value_bytes(name: str) -> int:
    """Bytes of a value in the words of decode's tuned table."""
    return 1 if name == "fp8" else 2


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
    read_again = rows * 4 * head_dim_v * sequences / cost.chip_bytes

    def clocks(splits: int, longest: int) -> float:
        workgroups = sequences * splits
        own = cost.own_bytes(kind, rows, splits > 1, width, head_dim_v) / cost.rate(workgroups)
        merge = cost.combine + read_again * splits if splits > 1 else 0.0
        return cost.key_clocks(arch, kind, rows, tiles, workgroups, width) * min(keys, longest) + own + merge

    lengths = dict[int, int]()  # keys of the longest split -> the fewest splits that have it
    for splits in range(1, max(min(arch.compute_units // sequences, ceil_div(keys, SPLIT_ALIGNMENT)), 1) + 1):
        lengths.setdefault(round_up(ceil_div(keys, splits)), splits)
    return min(lengths.items(), key=lambda each: clocks(each[1], each[0]))[1]


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
