"""Time of decode on sm_90, estimated from metadata, and the split count that should take the least time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from mla_suite.archs import ArchSpec
from mla_suite.archs import combine as combine_config
from mla_suite.archs.sm_90.combine import MAX_STREAMED_ROWS, MAX_STREAMED_SPLITS, STREAMING_POINTS
from mla_suite.archs.sm_90.tile import BLOCK_M, BLOCK_N, groups_of
from mla_suite.ops.plan.scheduler import TILE_COST, SchedulerCosts

ROWS_PER_KEY = 24
"""Rows of a partial that cost the whole device as much as one key costs a CTA: a row's 2048 bytes, written and read at
4.3 TB/s each way, are 0.95 ns, and a key takes a CTA 22 ns where it is alone and 27 where all are busy."""
MAX_COSTED_ROWS = 2**16  # more rows count as this number, which keeps sums far from 64 bits
MAX_DEALT = 256  # sequences that plan deals out of order; each is compared with all others


def scheduler_costs(num_q_rows: int) -> SchedulerCosts:
    """Costs for plan: all SMs combine all partials at once, so each costs little and their number counts."""
    return SchedulerCosts(TILE_COST, 0, -(-min(num_q_rows, MAX_COSTED_ROWS) // ROWS_PER_KEY), MAX_DEALT)


@dataclass(frozen=True)
class CostModel:
    """Times of parts of a launch, in microseconds at `clock_mhz`; only differences between split counts matter.

    Fitted to times on an H200, which the sum meets within 7 % on average (csrc/sm_90/combine/PERF.md). What the device
    reads of memory takes as many clocks as its record says (`ArchSpec.on_device`), so memory counts for more on a card
    whose memory is slower or whose clock is higher.
    """

    clock_mhz: int = 1980

    read_share: float = 1.04  # of the memory's rate, where nothing else is near to being the limit
    uneven_read: float = 0.075  # more of the time to read, at most, where CTAs are one and two to a TPC
    combine: float = 2.6  # combine, however little it combines
    combined_bytes: float = 0.1e6  # bytes of partials that an SM writes and reads per microsecond
    late_combine: float = 3.1  # more of combine where some of its CTAs found no SM before decode ended
    shared_port: float = 0.7  # more when both SMs of a TPC write partials: they share one port to L2
    streaming_gain: float = 1.3  # less where combine streams: it need not wait for the end of decode
    cluster_reduce: float = 1.0  # cluster_mode reduce_o
    cluster_reduce_gain: float = 0.1  # less this share of the time of decode's CTAs, which partials would draw out
    cluster_exchange: float = -0.5  # cluster_mode exchange_p: one read of the queries serves both CTAs
    exchange_streaming_gain: float = 0.7  # as streaming_gain, with exchange_p
    partial_bytes: float = 4.3e6  # bytes of partials that the device writes or reads per microsecond
    invariant_bytes: float = 1.2e6  # bytes of partials per microsecond where every split has one: to begin it, too
    shared_invariant_bytes: float = 2.0e6  # where two row tiles share keys, which leaves memory to partials
    fold_node: float = 6.0  # a node of 64 rows: most of its sum begins and ends in L2
    fold_split: float = 1.6  # more for each split that is added to it
    joined_partials: float = 200e6  # bytes of a plan's partials from which CTAs fold the splits that they can (D73)
    kept_partials: float = 8e6  # bytes of partials behind which the others take as long as they take to be written
    plan: float = 5.5  # a plan of one tile a CTA: to read it, and to combine its partials behind decode (R17)
    pairing: float = 1.4  # cluster_mode reduce_last: clusters start later, and tiles wait for a look at the plan
    pairing_apart: float = 2.5  # more of two row tiles: the SMs of a TPC no longer read the same keys
    exchange_behind: float = 0.4  # more where combine runs behind decode: both CTAs of a cluster store at once


FITTED = CostModel()


class CtaCosts(NamedTuple):
    """Times of a CTA, in the same microseconds."""

    stage: float  # one stage of keys
    busy_stage: float  # more where every SM is busy, and in proportion: power holds the clock down
    tile: float  # one work tile beside its stages


CTA_COSTS = {
    "tma": CtaCosts(0.72, 0.12, 4.5),
    "fp8": CtaCosts(0.9, 0.12, 4.5),
    "fp8_scores": CtaCosts(0.66, 0.1, 4.5),
    "swap_ab 16": CtaCosts(0.6, 0.15, 5.0),
    "swap_ab 32": CtaCosts(0.75, 0.12, 7.0),
}
"""kv_load, with the most query rows of a CTA where keys are the first operand -> its times. Others take those of 'tma'.
Fitted to an H200's ('tma') and an H100's, which the sums meet within 4 to 7 % on average."""
_LEAST_COMBINE = FITTED.combine - max(FITTED.streaming_gain, FITTED.exchange_streaming_gain - FITTED.cluster_exchange)
"""The least time to combine more than two splits, save with cluster_mode reduce_o, which shortens decode."""
_LEAST_REDUCE = FITTED.combine + FITTED.cluster_reduce
SCALED_STAGES = 24
NODE_SPLITS = 16  # splits of a node, which a CTA may fold (csrc/common/split_fold.hpp)
MAX_WAVES = 8  # waves of CTAs through equal splits; more even out the last wave by little and cost scratch
PROLOGUE_ROWS = 32  # rows whose sentinels a CTA writes while its first TMA loads are in flight
PROLOGUE_STAGES = 4  # stages that a split must have where more rows than that are filled
_STREAMING_SHARE = max(4 / waves / slices for slices, waves in STREAMING_POINTS)
"""Rows per SIMD partition for which a streaming combine finds room, in the most economical of its configurations."""


def pairing_pays(batch: int, rows: int, groups: int, bound: int, converts: bool = False) -> bool:
    """Whether a planned decode takes less time if clusters walk its SM parts in pairs (cluster_mode reduce_last).

    Only sizes are known, not the plan: `groups` SM parts share `batch` sequences of at most `bound` keys. Each pair
    saves a partial, or both where two parts are all of a sequence; where most sequences have one part, or are too short
    for plan to split them, there is nothing to merge. Where CTAs convert e4m3 keys (`converts`), a cluster must have
    all of a sequence: with four parts for each, B32 H64 kv 8192 takes 80.2 us for 74.5 without clusters.
    """
    tiles = -(-rows // BLOCK_M)
    if groups < 2 * batch or tiles > 2 or (converts and groups >= 3 * batch):
        return False
    splits = groups // batch
    if bound <= -(-bound // splits) + scheduler_costs(rows).partial * batch * splits:
        return False
    saved = groups // 2 * (2 if groups < 3 * batch else 1) * rows * 2048
    gain = 2 * saved / FITTED.partial_bytes  # written and read
    return gain > FITTED.pairing + (FITTED.pairing_apart if tiles == 2 else 0.0) + 0.5


def scaling_pays(stages: float) -> bool:
    """Whether bf16 queries of e4m3 rows are multiplied as fp16 in work tiles of so many stages.

    To scale a tile's queries takes 0.8 us before its first product, and each stage of keys is then 0.045 us faster
    (F10 in csrc/sm_90/decode/PERF.md).
    """
    return stages >= SCALED_STAGES


class Estimate:
    """Times of decode, in microseconds, where sequences have at most `stages` x 32 keys.

    kv_load  'tma', 'cp_async', 'fp8', 'fp8_scores', 'swap_ab' or 'tma_rotated': clusters are for all but 'cp_async',
             those that exchange P and streaming for 'tma' alone; those of 'swap_ab' are of 'fp8' (`paired`)
    """

    __slots__ = ("arch", "batch", "clusters", "costs", "max_groups", "paired", "read", "resident", "rows", "stages",
                 "tall", "tiles", "tma", "units")  # fmt: skip

    def __init__(self, arch: ArchSpec, kv_load: str, batch: int, rows: int, stages: int) -> None:
        self.arch, self.tma, self.batch, self.rows, self.stages = arch, kv_load == "tma", batch, rows, stages
        clustered = ("reduce_o", "exchange_p") if self.tma else ("reduce_o",)
        self.clusters = () if kv_load in ("cp_async", "swap_ab") else clustered
        self.paired = Estimate(arch, "fp8", batch, rows, stages) if kv_load == "swap_ab" else self
        named = f"swap_ab {16 if rows <= 16 else 32}" if kv_load == "swap_ab" else kv_load
        self.costs = CTA_COSTS.get(named, CTA_COSTS["tma"])
        self.units = arch.compute_units
        self.tiles = -(-rows // BLOCK_M)
        self.max_groups = groups_of(arch, 1 << 62, self.tiles)
        key_bytes = 576 if kv_load in ("fp8", "fp8_scores", "swap_ab") else 1152
        read_bytes = FITTED.read_share * arch.memory_bytes_per_s / 1e6 * FITTED.clock_mhz / arch.clock_mhz
        self.read = batch * stages * BLOCK_N * key_bytes / read_bytes
        self.resident = _resident(arch, batch * rows)
        self.tall = min(rows, BLOCK_M) > PROLOGUE_ROWS

    def groups(self, splits: int) -> int:
        """Groups of CTAs that walk the work tiles."""
        return min(self.batch * splits, self.max_groups)

    def bounds(self, splits: Any) -> tuple[Any, Any, Any]:
        """For an int64 array of split counts: `decode`, the SMs that it leaves free, the least time with combine."""
        # Numbers below 2^53 divide and round up exactly in fp64, in half the time of NumPy's integers.
        work_tiles = self.batch * splits
        busy = np.minimum(work_tiles, self.max_groups) * self.tiles
        waves, length = np.ceil(work_tiles / self.max_groups), np.ceil(self.stages / splits)
        ctas = self._ctas(length, waves, busy)
        times = self._with_memory(ctas, busy)
        free = self.units - busy
        room = free >= min([grid / resident for resident, grid in self.resident])  # for all CTAs of combine
        # Clusters combine each two splits; no combine reads with more than all SMs.
        split_us = self.batch * self.rows * 2048 / (self.units * FITTED.combined_bytes) / (2 if self.clusters else 1)
        combine = np.where(room, (splits - 1) * split_us, FITTED.late_combine)
        if not self.clusters:
            combine += FITTED.combine
            combine[0] = 0.0
            return times, free, times + combine
        least = _LEAST_COMBINE if self.tma else FITTED.combine
        reduced = times - FITTED.cluster_reduce_gain * ctas
        bounds = np.minimum(times + least, reduced + _LEAST_REDUCE) + combine
        bounds[:2] = reduced[:2] + FITTED.cluster_exchange  # nothing runs behind decode
        return times, free, bounds

    def busy(self, splits: int) -> int:
        """SMs that have a CTA."""
        return self.groups(splits) * self.tiles

    def decode(self, splits: int) -> float:
        """The CTAs of decode, up to their partials."""
        return float(self._with_memory(self.ctas(splits), self.busy(splits)))

    def ctas(self, splits: int) -> float:
        """The same, were memory no limit."""
        waves, length = -(-self.batch * splits // self.max_groups), -(-self.stages // splits)
        time: float = self._ctas(length, waves, self.busy(splits))
        return time

    def _ctas(self, length: Any, waves: Any, busy: Any) -> Any:
        stage = self.costs.stage + self.costs.busy_stage * busy / self.units
        return waves * (length * stage + self.costs.tile)

    def _with_memory(self, ctas: Any, busy: Any) -> Any:
        """The longer of what CTAs and memory take, and up to 12 % more where both take about as long.

        Where some TPCs have two CTAs and others one, those that share a TPC's way to memory end later.
        """
        shared = np.maximum(2 * busy / self.units - 1, 0)
        read = self.read * (1 + FITTED.uneven_read * 6.75 * shared * (1 - shared) ** 2)
        return ctas * (1 + (read / ctas) ** 6) ** (1 / 6)

    def combine(self, free: int, partials: int) -> float:
        """combine, with this number of partials of each sequence, where decode leaves `free` SMs.

        It is placed while decode runs, on the SMs that decode leaves free, and reads with those.
        """
        size = self.batch * self.rows * partials * 2048
        early = early_share(self.arch, self.batch * self.rows, partials, free)
        time = early * size / (max(free, 1) * FITTED.combined_bytes)
        beyond = max(size - FITTED.kept_partials, 0.0) / FITTED.partial_bytes
        if early < 1:
            time = max(time, FITTED.late_combine + (1 - early) * size / (self.units * FITTED.combined_bytes))
        return FITTED.combine + time + beyond

    def streams(self, splits: int, cluster_mode: str = "none") -> bool:
        """Whether a streaming combine may run beside decode: not before all of its sentinels are filled."""
        if cluster_mode == "none":
            crowded = self.busy(splits) > self.units // 2 and 2 * self.rows > MAX_STREAMED_ROWS
            return 1 < splits <= MAX_STREAMED_SPLITS and not crowded and self._room_to_stream(splits)
        return cluster_mode == "exchange_p" and 1 < splits // 2 <= MAX_STREAMED_SPLITS and self._room_to_stream(splits)

    def _room_to_stream(self, splits: int) -> bool:
        """Whether decode fills the sentinels early enough and leaves SMs for all CTAs of a streaming combine."""
        work_tiles = self.batch * splits
        if not self.tma or work_tiles > self.max_groups or (self.tall and -(-self.stages // splits) < PROLOGUE_STAGES):
            return False
        return self.rows * self.batch <= _STREAMING_SHARE * self.arch.simds * (self.units - work_tiles * self.tiles)

    def one_tile(self, splits: int) -> bool:
        """Whether every CTA has one work tile, and clusters have instances."""
        return bool(self.paired.clusters) and self.batch * splits <= self.max_groups

    def plan_saves_little(self, splits: int) -> bool:
        """Whether a plan costs more than it saves over this number of equal splits for each sequence.

        All of them run at once, so a plan saves what the longest split takes longer than the mean: half of its stages,
        if lengths are anything up to the longest (R17 in csrc/sm_90/plan/PERF.md).
        """
        stage = self.costs.stage + self.costs.busy_stage * self.busy(splits) / self.units
        return self.one_tile(splits) and -(-self.stages // splits) * stage <= 2 * FITTED.plan

    def folding_pays(self, splits: int, nodes: int) -> bool:
        """Whether work tiles that are nodes take less time than those of so many `splits` of each sequence."""
        if nodes >= splits:
            return False
        waves = -(-self.batch * nodes // self.max_groups)
        share = min(self.rows, BLOCK_M) / BLOCK_M
        folds = waves * share * (FITTED.fold_node + -(-splits // nodes) * FITTED.fold_split)
        busy = self.busy(nodes)
        folded = float(self._with_memory(self.ctas(nodes) + folds, busy))
        if nodes > 1:
            folded += self.combine(self.units - busy, nodes)
        partials = self.batch * self.rows * splits * 2048
        rate = FITTED.invariant_bytes if self.tiles == 1 else FITTED.shared_invariant_bytes
        return folded < self.decode(splits) + FITTED.combine + partials / rate

    def joining_pays(self, splits: int) -> bool:
        """Whether a plan's partials, of so many `splits` of each sequence, are more than L2 keeps until combine reads
        them."""
        return self.batch * self.rows * splits * 2048 > FITTED.joined_partials

    def in_pairs(self, splits: int) -> bool:
        """Whether the two CTAs of a cluster can combine each two splits."""
        return splits % 2 == 0 and self.one_tile(splits)

    def combines(self, splits: int) -> dict[str, float]:
        """Time to combine the splits of each sequence, by cluster_mode."""
        if splits == 1:
            return {"none": 0.0}
        busy = self.busy(splits)
        free = self.units - busy
        port = FITTED.shared_port if busy > self.units // 2 else 0.0
        gained = FITTED.streaming_gain if self.streams(splits) else 0.0
        times = {"none": self.combine(free, splits) + port - gained}
        if not self.in_pairs(splits):
            return times
        if self.paired is not self:
            times["reduce_o"] = self.paired.decode(splits) + self.paired.combines(splits)["reduce_o"]
            times["reduce_o"] -= self.decode(splits)
            return times
        behind = self.combine(free, splits // 2) if splits > 2 else 0.0
        gain = FITTED.cluster_reduce_gain * self.ctas(splits)
        times["reduce_o"] = FITTED.cluster_reduce - gain + 2 * port + behind
        if "exchange_p" not in self.clusters:
            return times
        times["exchange_p"] = FITTED.cluster_exchange + behind
        if splits > 2:
            streams = self.streams(splits, "exchange_p")
            times["exchange_p"] += -FITTED.exchange_streaming_gain if streams else FITTED.exchange_behind + port
        return times

    def total(self, splits: int) -> float:
        """The call, combined in the way that takes the least time."""
        return self.decode(splits) + min(self.combines(splits).values())

    def cluster_mode(self, splits: int) -> str:
        """The cluster_mode that takes the least time."""
        times = self.combines(splits)
        return min(times, key=times.__getitem__)


@lru_cache(maxsize=1024)
def _resident(arch: ArchSpec, rows: int) -> tuple[tuple[int, int], ...]:
    """(CTAs of combine that an SM has room for, CTAs of the grid) for up to 31, up to 96 and more partials."""
    configs = (combine_config.rule(arch, 512, rows, partials) for partials in (2, 32, 97))
    return tuple((config.resident, config.grid(rows)) for config in configs)


def early_share(arch: ArchSpec, rows: int, partials: int, free: int) -> float:
    """The share of combine's CTAs for so many rows that find room on `free` SMs, before decode has ended."""
    resident, grid = _resident(arch, rows)[(partials > 31) + (partials > 96)]
    return min(1.0, free * resident / grid)


def splits_worth_trying(most: int, stages: int, full: int = 0) -> Any:
    """Split counts up to `most`: of those with equally many stages in a split, the fewest and the fewest even ones.

    More splits of the same length only add CTAs, which slow each other down, and partials. `most` itself is one more:
    it leaves combine to the end of decode, when all SMs are free for it. So are the most and the most even ones up to
    `full` and to half of it, which give all TPCs as many CTAs.
    """
    splits = np.arange(1, most + 1)
    lengths = np.ceil(stages / splits)
    tried = np.ones(most, dtype=bool)
    np.not_equal(lengths[1:], lengths[:-1], out=tried[1:])
    tried[1::2] |= tried[: most - 1 : 2]  # an even count behind an odd one, which is the first of its length
    tried[[-1, *[count - 1 for count in (full, full & -2, full // 2, full // 2 & -2) if 0 < count <= most]]] = True
    return splits[tried]


def max_splits(arch: ArchSpec, ctas: int, stages: int) -> int:
    """The most splits that make sense; `ctas` are those of one split of every sequence."""
    return max(1, min(stages, arch.compute_units, MAX_WAVES * arch.compute_units // ctas))


@lru_cache(maxsize=4096)
def best_splits(arch: ArchSpec, kv_load: str, batch: int, rows: int, stages: int) -> int:
    """Splits per sequence of at most `stages` x 32 keys: the count that should take the least time."""
    most = max_splits(arch, batch * -(-rows // BLOCK_M), stages)
    if most == 1:
        return 1
    estimate = Estimate(arch, kv_load, batch, rows, stages)
    found = _least(estimate, most)
    if estimate.paired is estimate:
        return found
    return min(found, _least(estimate.paired, most), key=estimate.total)


def _least(estimate: Estimate, most: int) -> int:
    """The count of up to `most` splits that should take the least time.

    Counts are tried from the shortest time that they could take on, until that is longer than a time that was found.
    """
    batch, stages = estimate.batch, estimate.stages
    splits = splits_worth_trying(most, stages, estimate.max_groups // batch)
    decodes, free, bounds = estimate.bounds(splits)
    tried = []
    least = inf
    fewer: dict[tuple[bool, ...], tuple[int, float]] = {}
    order = bounds.argsort(kind="stable").tolist()
    splits, decodes, free, bounds = splits.tolist(), decodes.tolist(), free.tolist(), bounds.tolist()
    for index in order:
        if bounds[index] > least:
            break
        count, decode = splits[index], decodes[index]
        # More splits that are combined in the same way (in pairs, beside decode, with one work tile for each CTA) take
        # longer to combine, so decode must gain by them.
        kind = count % 2 == 0, free[index] > 0, batch * count <= estimate.max_groups
        before = fewer.get(kind)
        if before is not None and before[0] < count < most and before[1] <= decode:
            continue
        fewer[kind] = count, decode
        total = decode + min(estimate.combines(count).values())
        tried.append((total, count == 1, count))  # one split where all others take longer
        least = min(least, total)
    return min(tried)[2]
