"""How decode on sm_90 splits keys, and the instance that fits: what clusters do, and whether queries are scaled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.attention import Shape, Splits, decode_shape
from mla_suite.archs.sm_90 import combine
from mla_suite.archs.sm_90.costs import NODE_SPLITS, Estimate, best_splits, pairing_pays, scaling_pays
from mla_suite.archs.sm_90.tile import BLOCK_N, groups_of
from mla_suite.ops.decode import DecodeArgs
from mla_suite.ops.plan.metadata import splits_of

if TYPE_CHECKING:
    from mla_suite.archs.sm_90.decode import Sm90Config


def round_up_to_block_n(split_size: int) -> int:
    """A split of the batch-invariant mode in whole stages: a copy may not reach into the next page."""
    return -(-split_size // BLOCK_N) * BLOCK_N


def _estimated(config: Sm90Config, shape: Shape) -> tuple[ArchSpec, str, int, int, int]:
    """What an estimate of a call's time depends on, as `Estimate` has it."""
    return config.arch, config.cost_model_key, shape.batch, shape.rows, -(-shape.keys // BLOCK_N)


def split_count(config: Sm90Config, shape: Shape) -> int:
    """Splits per sequence where arguments say nothing: those of the least estimated time."""
    return best_splits(*_estimated(config, shape))


def estimate_of(config: Sm90Config, shape: Shape) -> Estimate:
    """What a call is estimated to take, by its split count."""
    return Estimate(*_estimated(config, shape))


def scaled_for(config: Sm90Config, shape: Shape, splits: Splits) -> Sm90Config:
    """The instance that scales queries where work tiles are long; in batch-invariant mode by split_size alone."""
    stages = -(-shape.keys // BLOCK_N)
    if splits.size:
        of_tile = splits.size / BLOCK_N
    elif shape.plan_words:  # SM parts split as many sequences at most as there are parts
        groups = groups_of(config.arch, splits.tiles(shape), config.tiles(shape.rows))
        of_tile = shape.batch * stages / (shape.batch + groups)
    else:
        of_tile = stages / splits.number
    return config.scaling if scaling_pays(of_tile) else config


def split(
    config: Sm90Config, args: DecodeArgs, shape: Shape
) -> tuple[Sm90Config, Splits, combine.WholeRowsConfig | None]:
    """The instance with its cluster mode, the splits, and the streaming combine if one may run beside decode.

    Clusters of a balanced plan share keys where a sequence has two row tiles, which takes lengths of all kinds the
    least time, or else walk SM parts in pairs where that may pay; four tiles stay alone (R16 in
    csrc/sm_90/plan/PERF.md).
    """
    if shape.plan_words:
        splits = Splits(1, 1, args.split_size)
        groups = groups_of(config.arch, splits.tiles(shape), config.tiles(shape.rows))
        sizes = shape.batch, shape.rows, groups, shape.keys
        chosen = config if not splits.size and config.tiles(shape.rows) > 2 else unmerged(config, shape, splits)
        if joins_splits(config, args, shape):
            return config.folding[chosen.cluster_mode], splits, None
        if chosen is config and may_pair_parts(config, args, groups) and pairing_pays(*sizes, config.kv_load == "fp8"):
            chosen = config.clustered["reduce_last"]
        return chosen, splits, None
    size = round_up_to_block_n(args.split_size)
    by_size = int(splits_of(shape.keys, size, args.attn_sink is not None)) if size else 0
    count = args.num_splits or by_size or split_count(config, shape)
    if size:
        nodes = folded(config, args, shape)
        splits = Splits(nodes, nodes, size * NODE_SPLITS) if nodes else Splits(count, count, size)
        chosen = unmerged(config, shape, splits)
        return config.folding[chosen.cluster_mode] if nodes else chosen, splits, None
    estimate = estimate_of(config, shape)
    mode = estimate.cluster_mode(count)
    partials, runs = (count, 2) if mode == "none" else (count // 2, 4)
    streaming = None
    if estimate.streams(count, mode):
        merged = shape.combine_problem(args.head_dim_v, shape.batch * partials)
        streaming = combine.streaming(merged, config.arch, estimate.busy(count), runs)
    splits = Splits(count, partials, size)
    if mode == "none" and streaming is None:
        return unmerged(config, shape, splits), splits, None
    return config.clustered[mode], splits, streaming


def folded(config: Sm90Config, args: DecodeArgs, shape: Shape) -> int:
    """The nodes of each sequence if work tiles of batch-invariant calls are nodes, whose splits a CTA adds; else 0.

    Results have the same bits either way (csrc/common/split_fold.hpp), so what is estimated may decide.
    """
    size, may_have_sink = round_up_to_block_n(args.split_size), args.attn_sink is not None
    splits = int(splits_of(shape.keys, size, may_have_sink))
    nodes = max(-(-shape.keys // (size * NODE_SPLITS)), 2 if may_have_sink else 1)
    estimate = estimate_of(config, shape)
    return nodes if config.folding and estimate.folding_pays(splits, nodes) else 0


def joins_splits(config: Sm90Config, args: DecodeArgs, shape: Shape) -> bool:
    """Whether CTAs add those splits of a plan that are a node's first and lie in their SM part.

    Splits of a plan are rounded down to whole stages, and those without a plan up, so both begin at the same keys only
    where nothing is rounded.
    """
    if not config.folding or args.split_size == 0 or args.split_size % BLOCK_N != 0:
        return False
    splits = int(splits_of(shape.keys, args.split_size, may_have_sink=False))
    return estimate_of(config, shape).joining_pays(splits)


def unmerged(config: Sm90Config, shape: Shape, splits: Splits) -> Sm90Config:
    """The instance for splits that no cluster merges.

    Two row tiles of a sequence share keys if all have a partner and few SMs are left free: fewer CTAs take up to 1.6 %
    longer so (D70 in csrc/sm_90/decode/PERF.md).
    """
    tiles = config.tiles(shape.rows)
    crowded = 8 * splits.tiles(shape) * tiles >= 7 * config.arch.compute_units
    shares = "share_kv" in config.clustered and tiles % 2 == 0 and crowded
    return config.clustered["share_kv"] if shares else config


def may_pair_parts(config: Sm90Config, args: DecodeArgs, groups: int) -> bool:
    """Whether clusters may walk a plan's SM parts in pairs.

    Batch-invariant splits are all combined by one kernel, and a kernel that another replaces for its clusters loses
    more by that than they gain.
    """
    return "reduce_last" in config.clustered and not config.load.clusters_of and groups % 2 == 0 and not args.split_size


def needs_no_plan(config: Sm90Config, args: DecodeArgs, out: torch.Tensor) -> bool:
    """Whether a call has a balanced plan that could save less than it costs.

    A plan shares sequences out. One sequence leaves nothing to share, and short ones little: equal splits of the
    longest that there may be are then done before a plan is read and its partials are combined. Without a plan the CTAs
    of a cluster combine their splits among themselves, and the rest is combined while decode runs. A plan's num_splits
    stays, and its split_size: what folds without a plan takes as long as the longest sequences.
    """
    if args.plan is None or args.num_splits or args.split_size:
        return False
    shape = decode_shape(args, out)
    if shape.batch == 1:
        return True
    estimate = estimate_of(config, shape)
    return estimate.plan_saves_little(split_count(config, shape))
