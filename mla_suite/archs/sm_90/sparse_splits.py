"""sparse_decode on sm_90: how many splits a call's keys make, and the instance that fits them.

A split is a range of a query token's keys for one group of blocks. More of them occupy more SMs, and each writes a
partial result that combine, or a cluster, adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from mla_suite.archs import sparse_attention
from mla_suite.archs.attention import Shape, Splits
from mla_suite.archs.sm_90.costs import early_share, max_splits, splits_worth_trying
from mla_suite.archs.sm_90.tile import BLOCK_M, BLOCK_N, groups_of
from mla_suite.archs.sparse_attention import VALUES
from mla_suite.ops.sparse_decode import SparseDecodeArgs

if TYPE_CHECKING:
    from mla_suite.archs.sm_90.sparse_decode import Sm90SparseConfig

NEVER = 2**31  # keys, more than there are
LEAST_KEYS = {16: (640, NEVER), 32: (2048, 4096)}
"""Most heads of such a kernel -> keys of a split from which it takes less time than the kernel for few heads, or that
of 64 query rows, on an H200 and on an H100 (csrc/sm_90/sparse_decode/PERF.md). A shorter split leaves its warpgroups
few steps and merges their results all the same; the slower the memory, the less there is to gain. On an H100 the kernel
for few heads is faster at any length."""
INVARIANT_KEYS = {16: 1024, 32: 2048}
"""The same in batch-invariant mode, where every card makes the same choice: beside 64 rows an H100 loses 3 % at 1,024
keys of 16 heads, and an H200 would lose 14 % without."""
FAST_MEMORY = 4_000_000_000_000  # bytes a second; an H200 reads 4.6e12 and an H100 3.1e12


class Costs(NamedTuple):
    """Parts of a launch's time, in microseconds; only differences between split counts matter.

    stage    what the CTAs of a cluster share -> 32 keys on one SM
    late     more where some CTAs of combine find no SM before all splits are done
    reduced  splits that a cluster adds -> more for its partials
    whole    the same where its results are those of a token: for a row tile, and for 64 heads
    merged   what such a call has less, as it launches no combine
    """

    stage: Mapping[str, float]
    late: float
    reduced: Mapping[int, float]
    whole: Mapping[int, tuple[float, float]]
    merged: float


# Of 42 shapes of records on an H100, each at 8 to 16 counts, the choices take 0.5 % longer than the best on average and
# 3.7 % at most; of 88 shapes of bf16 rows on an H200 0.6 % and 8.8 % (csrc/sm_90/sparse_decode/PERF.md).
RECORD_COSTS = Costs(
    {"none": 1.0, "share_kv": 0.9, "reduce_o": 1.0, "share_and_reduce": 0.9, "reduce_four": 1.0},
    late=1.0,
    reduced={2: 1.8, 4: 3.4},
    whole={2: (0.0, 0.0), 4: (0.5, 0.0)},
    merged=0.0,
)
ROW_COSTS = Costs(
    {"none": 1.0, "reduce_o": 1.15, "reduce_four": 1.0},
    late=3.4,
    reduced={2: 2.5, 4: 3.0},
    whole={2: (0.0, 3.8), 4: (0.0, 1.8)},
    merged=2.0,
)
NARROW_COSTS = RECORD_COSTS._replace(stage={"none": 0.46})  # rows of 128 + 32 values, on the same H100
COSTS = {"bf16x576": ROW_COSTS, "bf16x512": ROW_COSTS, "bf16x160": NARROW_COSTS}
"""Record -> its costs, where they are not RECORD_COSTS."""
FEW_KEYS = 64  # of a stage of the kernel for few heads
FEW_STAGE_US = 1.8  # as many on one SM
TALL_US = 0.4  # more of a kernel of 64 query rows where there is that one
TILE_US = 7.5  # a further work tile of a CTA: its first keys are looked up, copied and dequantised before any product
PARTIAL_SHARE = 0.58  # of the memory's rate, at which partials are written and read
REDUCED_LATE_US = 1.4  # as Costs.late, behind clusters that reduce O


@lru_cache(maxsize=4096)
def best_splits(config: Sm90SparseConfig, tokens: int, heads: int, keys: int) -> int:
    """Splits per query token of about `keys` keys: the count that should take the least time."""
    stages = max(1, -(-keys // BLOCK_N))
    configs = config, *config.reducing

    def least(splits: int) -> float:
        return min([microseconds(each, tokens, heads, keys, splits) for each in configs])

    most = max_splits(config.arch, tokens * config.tiles(heads), stages)
    fours = range(4, most + 1, 4) if config.reducing else ()
    return min(sorted({*splits_worth_trying(most, stages).tolist(), *fours}), key=least)


def microseconds(config: Sm90SparseConfig, tokens: int, heads: int, keys: int, splits: int) -> float:
    """What a call should take, less what all split counts have in common; infinite where clusters cannot add splits."""
    tiles = config.tiles(heads)
    stages = max(1, -(-keys // BLOCK_N))
    values = VALUES.get(config.record, 512)
    costs = COSTS.get(config.record, RECORD_COSTS)
    stage_keys, stage_us = BLOCK_N, costs.stage[config.cluster_mode]
    if config.few_heads:
        stage_keys, stage_us = FEW_KEYS, FEW_STAGE_US
    reduced = config.reduced_splits
    if reduced > 1 and (splits % reduced or tokens * splits * tiles > config.clustered_blocks):
        return inf
    groups = groups_of(config.arch, tokens * splits, tiles)
    waves = -(-tokens * splits // groups)
    split_keys = -(-stages // splits) * BLOCK_N
    spent = waves * -(-split_keys // stage_keys) * stage_us + (waves - 1) * TILE_US
    if config.few_heads_serve(heads) and not config.few_heads:
        spent += TALL_US
    partials = splits // reduced
    if partials == 1 and reduced == 1:
        return spent
    if partials == 1:
        tile, rows = costs.whole[reduced]
        return spent + tile * tiles + rows * heads / BLOCK_M - costs.merged
    written = tokens * heads * partials * values * 4 / (PARTIAL_SHARE * config.arch.memory_bytes_per_s / 1e6)
    late = early_share(config.arch, tokens * heads, partials, config.arch.compute_units - groups * tiles) < 1
    if reduced > 1:
        return spent + costs.reduced[reduced] + written + late * REDUCED_LATE_US
    return spent + written + late * costs.late


def split_call(config: Sm90SparseConfig, args: SparseDecodeArgs, shape: Shape) -> tuple[Sm90SparseConfig, Splits]:
    """How a call's keys are split, and the instance that fits. In batch-invariant mode and with a plan no clusters
    reduce O: splits are combined alike whatever the batch, and the parts of a plan are not in pairs."""
    sizes = shape.batch, shape.heads, shape.keys
    splits = sparse_attention.splits(args, shape, lambda: best_splits(config, *sizes))
    chosen = for_splits(config, args, shape, splits)
    if chosen is config and not splits.size and not shape.plan_words:
        chosen = fastest(config, *sizes, splits.number)
    if chosen.reduced_splits > 1:
        splits = splits._replace(partials=splits.number // chosen.reduced_splits)
    return chosen, splits


def fastest(config: Sm90SparseConfig, tokens: int, heads: int, keys: int, splits: int) -> Sm90SparseConfig:
    """This instance, or one whose clusters reduce O where that should take less time."""
    return min((config, *config.reducing), key=lambda each: microseconds(each, tokens, heads, keys, splits))


def for_splits(config: Sm90SparseConfig, args: SparseDecodeArgs, shape: Shape, splits: Splits) -> Sm90SparseConfig:
    """The instance for a call: with keys as the first operand for few heads if splits are long, else `config`.

    In batch-invariant mode it depends on heads and split_size alone, so a sequence has the same bits in any batch, and
    with the memory of any card.
    """
    swapped = config.keys_first(shape.heads)
    if swapped is None:
        return config
    if args.split_size and not args.num_splits:
        keys, least = args.split_size, INVARIANT_KEYS[swapped.q_rows]
    else:
        keys = shape.batch * shape.keys // max(splits.tiles(shape), 1)
        least = LEAST_KEYS[swapped.q_rows][config.arch.memory_bytes_per_s < FAST_MEMORY]
    return swapped if keys >= least else config
