"""decode on sm_90: which instance, how many splits, and how it is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.common import combine as combine_kernels
from mla_suite.archs.common import combine_config as combine_configs
from mla_suite.archs.common import decode_table
from mla_suite.archs.common.combine import AnyCombineConfig, missing
from mla_suite.archs.common.decode import (
    INPUTS,
    NO_MASK,
    Prepared,
    Shape,
    Splits,
    combine_launch,
    copies_out,
    launch_of,
    negated,
    numbers_of,
    shape_of,
    tuned_splits,
)
from mla_suite.archs.sm_90 import combine, tensor_maps
from mla_suite.archs.sm_90.costs import Estimate, best_splits, pairing_pays
from mla_suite.archs.sm_90.decode_config import ELEMENTS, KV_LOADS, ROPE, WIDTHS, Sm90Config
from mla_suite.archs.sm_90.tile import BLOCK_N, groups_of
from mla_suite.build.params import pack_numbers, reciprocal
from mla_suite.core.dispatch import Launch, Supported, Unsupported
from mla_suite.launch import tensor_map
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.decode import DecodeArgs, Problem
from mla_suite.ops.plan.metadata import splits_of

PLAN = INPUTS.index("plan")
MAX_M = 2**25 - 1  # query rows of a sequence: 32 bits count its partial results in 16 bytes


def config_for(problem: Problem, arch: ArchSpec) -> Sm90Config:
    """The instance for a problem. It sees neither batch nor lengths, so a batch-invariant call may use it."""
    if problem.kv_format == "fp8":
        element, rows = ELEMENTS[problem.q_dtype], problem.heads * problem.q_len
        for width, q_rows in KV_LOADS["swap_ab"].stages:
            if width == problem.head_dim and rows <= q_rows:
                return Sm90Config(arch, element, width, "swap_ab", q_rows=q_rows)
        return Sm90Config(arch, element, problem.head_dim, "fp8")
    kv_load = "tma" if problem.page % BLOCK_N == 0 else "cp_async"
    if problem.rope:
        kv_load += "_rotated"
    return Sm90Config(arch, ELEMENTS[problem.q_dtype], problem.head_dim, kv_load)


def supports(problem: Problem, arch: ArchSpec) -> Supported | Unsupported:
    why = _unsupported(problem)
    if why is not None:
        return Unsupported(why)
    row = decode_table.row_of(arch, problem)
    if row is not None and row.values["use"] == decode_table.TRITON:
        return Unsupported(f"{decode_table.reason(row)} leaves it to the triton kernel")
    config = config_for(problem, arch)
    clusters = [config.clustered(mode).instance for mode in config.cluster_modes]
    reason = f"tiles of {config.q_rows} rows for {problem.q_len} x {problem.heads} query rows"
    answer = Supported(config, reason if row is None else f"{reason}, by {decode_table.reason(row)}")
    return missing(arch, *clusters, *combine_configs.invariant_instances(arch, problem.head_dim_v)) or answer


def _unsupported(problem: Problem) -> str | None:
    """Why the kernels cannot take a problem; None when they can."""
    if problem.window or problem.tree:
        return NO_MASK
    if problem.q_dtype not in ELEMENTS:
        return f"q is {problem.q_dtype}; it takes bfloat16, float16 or float8_e4m3fn"
    if problem.kv_format not in ("fp8", ELEMENTS[problem.q_dtype]):
        known = " or ".join(dict.fromkeys((ELEMENTS[problem.q_dtype], "fp8")))
        return f"kv_format {problem.kv_format} with {problem.q_dtype} queries; it takes {known}"
    if problem.head_dim not in WIDTHS or problem.head_dim_v != 512:
        return f"rows of {problem.head_dim} values with head_dim_v {problem.head_dim_v}; it takes 576 or 512 with 512"
    if problem.rope and (problem.rope != ROPE or problem.head_dim != 576 or problem.kv_format == "fp8"):
        given = f"rope_cos_sin of {problem.rope} values with {problem.kv_format} rows of {problem.head_dim}"
        return f"{given}; it rotates {ROPE} of bf16 or fp16 rows of 576"
    if problem.alignment < tensor_map.ALIGNMENT:
        return f"kv_cache is aligned to {problem.alignment} bytes; its address and block stride must be multiples of 16"
    rows = problem.heads * problem.q_len
    if rows < 1 or rows > MAX_M or rows * problem.heads >= 2**32:
        return f"{rows} query rows of {problem.heads} heads; it takes 1 to {MAX_M}, rows x heads below {2**32}"
    return None


def whole_blocks(split_size: int) -> int:
    """A split of the batch-invariant mode in whole stages: a copy may not reach into the next page."""
    return -(-split_size // BLOCK_N) * BLOCK_N


def split_count(config: Sm90Config, args: DecodeArgs, shape: Shape) -> int:
    """Splits per sequence where arguments say nothing: the tuned row's, else those of the least estimated time."""
    return tuned_splits(config.arch, args, shape) or best_splits(
        config.arch, config.costs_as, shape.batch, shape.rows, -(-shape.bound // BLOCK_N)
    )


def _split(
    config: Sm90Config, args: DecodeArgs, shape: Shape
) -> tuple[Sm90Config, Splits, combine.StreamingCombineConfig | None]:
    """The instance with its cluster mode, the splits, and the streaming combine if one may run beside decode."""
    if shape.plan_words:
        splits = Splits(1, 1, args.split_size)
        groups = groups_of(config.arch, splits.tiles(shape), config.tiles(shape.rows))
        merges = may_pair_parts(config, args, groups) and pairing_pays(shape.batch, shape.rows, groups, shape.bound)
        return config.clustered("reduce_last" if merges else "none"), splits, None
    size = whole_blocks(args.split_size)
    by_size = int(splits_of(shape.bound, size, args.attn_sink is not None)) if size else 0
    count = args.num_splits or by_size or split_count(config, args, shape)
    if size:
        return config, Splits(count, count, size), None
    estimate = Estimate(config.arch, config.costs_as, shape.batch, shape.rows, -(-shape.bound // BLOCK_N))
    mode = estimate.cluster_mode(count)
    partials, runs = (count, 2) if mode == "none" else (count // 2, 4)
    streaming = None
    if estimate.streams(count, mode):
        streaming = combine.streaming(config.arch, 512, shape.rows, shape.batch, partials, estimate.busy(count), runs)
    return config.clustered(mode), Splits(count, partials, size), streaming


def notes(config: Sm90Config, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> tuple[str, ...]:
    """Returns what `explain` says of a call: how its keys are split."""
    out = outputs[0]
    if args.seq_lens.shape[0] == 0 or out.numel() == 0:
        return ()
    if _needs_no_plan(config, args, out):
        unread = "the plan is not read: equal splits take less time for these sequences"
        return unread, *notes(config, outputs, replace(args, plan=None))
    shape = shape_of(args, args.q, out)
    clustered, splits, streaming = _split(config, args, shape)
    beside = " while decode runs" if streaming is not None else ""
    pairs = "" if clustered.cluster_mode == "none" else f"; clusters of two CTAs, cluster_mode {clustered.cluster_mode}"
    return (f"{splits.note(shape)}{beside}{pairs}",)


def may_pair_parts(config: Sm90Config, args: DecodeArgs, groups: int) -> bool:
    """Whether clusters may walk a plan's SM parts in pairs. Batch-invariant splits are all combined by one kernel."""
    return "reduce_last" in config.cluster_modes and groups % 2 == 0 and not args.split_size


def _needs_no_plan(config: Sm90Config, args: DecodeArgs, out: torch.Tensor) -> bool:
    """Whether a call has a balanced plan that could save less than it costs.

    A plan shares sequences out. One sequence leaves nothing to share, and short ones little: equal splits of the
    longest that there may be are then done before a plan is read and its partials are combined. Without a plan the CTAs
    of a cluster combine their splits among themselves, and the rest is combined while decode runs. A plan's split_size
    or num_splits stays.
    """
    if args.plan is None or args.split_size or args.num_splits:
        return False
    if args.seq_lens.shape[0] == 1:
        return True
    shape = shape_of(args, args.q, out)
    estimate = Estimate(config.arch, config.costs_as, shape.batch, shape.rows, -(-shape.bound // BLOCK_N))
    return estimate.plan_saves_little(split_count(config, args, shape))


def prepare(config: Sm90Config, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> Launch:
    out, lse = outputs
    if args.seq_lens.shape[0] == 0 or out.numel() == 0:
        return lambda outputs, tensors: None
    if _needs_no_plan(config, args, out):
        unplanned = prepare(config, outputs, replace(args, plan=None))
        return lambda outputs, tensors: unplanned(outputs, (*tensors[:PLAN], None, *tensors[PLAN + 1 :]))
    q = negated(args.q) if args.softmax_scale < 0 else args.q
    shape = shape_of(args, q, out)
    config, splits, streaming = _split(config, args, shape)
    slots, tiles = splits.slots(shape), config.tiles(shape.rows)
    groups = groups_of(config.arch, splits.tiles(shape), tiles)
    copies_q = not shape.q.in_whole_vectors or tensor_maps.pitch(shape.q.shape, shape.q.strides) is None
    within_span = tensor_maps.within_span(shape.q_len, shape.heads, shape.out.strides)
    temporary = copies_out(shape) or not within_span
    queries = shape.q.copied() if copies_q else shape.q
    results = shape.out.copied() if temporary else shape.out
    kv_map = None
    if config.load.by_box:
        kv_map = tensor_maps.kv_map(args.kv_cache.shape, args.kv_cache.stride(), q.dtype, config.box_blocks)
    q_map = None
    if queries.dtype.itemsize > 1:
        q_map = tensor_maps.q_map(queries.shape, queries.strides, queries.dtype, shape.q_len)
    q_row_stride = tensor_maps.pitch(queries.shape, queries.strides)
    if q_row_stride is None:
        raise RuntimeError(f"decode: rows of queries with strides {queries.strides} are not evenly apart, even copied")
    splits_reciprocal, splits_shift = reciprocal(splits.number)
    table = args.block_table
    wanted_lse = LseLayout.of(lse), args.plus_inf_lse
    numbers = pack_numbers(
        "decode_tma",
        tensor_maps.LEADING,
        q_row_stride=q_row_stride,
        **combine_kernels.lse_numbers(*wanted_lse),
        heads_reciprocal=(2**32 - 1) // shape.heads + 1 if shape.heads > 1 else 0,
        page_ids_stride=0 if table is None else table.stride(0),
        page_ids_width=0 if table is None else table.shape[1],
        plan_words=shape.plan_words,
        splits_reciprocal=splits_reciprocal,
        splits_shift=splits_shift,
        grid_stride=groups,
        streaming=int(streaming is not None),
        rope_cos_sin=0,
        **numbers_of(args, shape, results, splits),
    )
    combined = None
    if slots:
        merges = config.cluster_mode == "reduce_last"
        chosen: AnyCombineConfig = streaming or combine.config_for(
            config.arch,
            args.head_dim_v,
            out.dtype,
            shape.rows,
            shape.batch,
            -(-slots // shape.batch),
            splits.size > 0,
            shape.plan_words > 0,
            merges,
        )
        # A plan says itself how many partials a sequence has; which of them decode merges depends on `groups`.
        partials = groups if merges else splits.partials
        combined = combine_launch(chosen, args, shape, results, wanted_lse, partials, merges)
    pack = tensor_maps.decode_packer(kv_map, q_map)
    if config.load.rotates:
        numbers, pack = b"", tensor_maps.with_cos_sin(pack, numbers)
    prepared = Prepared(
        *(config, (tiles, groups, 1), config.lds, True, numbers, copies_q, temporary, False),
        *(slots, shape.rows, combined),
    )
    launch = launch_of(prepared, args, pack)
    return _with_aligned_cos_sin(launch) if config.load.rotates else launch


def _with_aligned_cos_sin(launch: Launch) -> Launch:
    """The launch with a copy of rope_cos_sin where that is not aligned to 16 bytes, as bulk copies ask."""
    at = tensor_maps.COS_SIN

    def aligned(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
        cos_sin = tensors[at]
        if cos_sin.data_ptr() % tensor_map.ALIGNMENT:
            tensors = (*tensors[:at], cos_sin.clone(), *tensors[at + 1 :])
        launch(outputs, tensors)

    return aligned
