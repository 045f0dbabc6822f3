"""The launches of a call of decode on sm_90, and what `explain` says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mla_suite.archs import attention
from mla_suite.archs import combine as combine_kernels
from mla_suite.archs.attention import DECODE_INPUTS
from mla_suite.archs.combine import OUTPUTS
from mla_suite.archs.sm_90 import combine, decode_splits, tensor_maps
from mla_suite.archs.sm_90.costs import NODE_SPLITS
from mla_suite.archs.sm_90.tile import BLOCK_M, groups_of
from mla_suite.build.params import divisor
from mla_suite.launch import tensor_map
from mla_suite.launch.spec import CallSpec, Copy, LaunchSpec, Temporary
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.decode import DecodeArgs

if TYPE_CHECKING:
    from mla_suite.archs.sm_90.decode import Sm90Config


def spec(config: Sm90Config, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> CallSpec:
    """The launch of decode, and of the combine behind it."""
    out, lse = outputs
    if args.seq_lens.shape[0] == 0 or out.numel() == 0:
        return CallSpec()
    notes = []
    if decode_splits.needs_no_plan(config, args, out):
        args = replace(args, plan=None)
        notes.append("the plan is not read: equal splits take less time for these sequences")
    shape = attention.decode_shape(args, out)
    config, splits, streaming = decode_splits.split(config, args, shape)
    config = decode_splits.scaled_for(config, shape, splits)
    slots, tiles = splits.slots(shape), config.tiles(shape.rows)
    groups = groups_of(config.arch, splits.tiles(shape), tiles)
    queries, results, copies, temporaries = shape.q, shape.out, attention.decode_mask_copies(args), list[Temporary]()
    q_maps = tensor_maps.q_part_maps(DECODE_INPUTS, shape, config.takes_parts and args.softmax_scale >= 0)
    reached = queries.in_whole_vectors and tensor_maps.pitch(queries.shape, queries.strides) is not None
    if not q_maps and (args.softmax_scale < 0 or not reached or shape.q_rope is not None):
        queries, copy = attention.decode_query_copy(args, shape)
        copies.append(copy)
    if attention.decode_out_is_apart(shape) or not tensor_maps.within_span(shape.q_len, shape.heads, shape.out.strides):
        results = results.copied()
        temporaries.append(Temporary(OUTPUTS["out"]))
    if config.load.rotates and args.rope_cos_sin.data_ptr() % tensor_map.ALIGNMENT:  # type: ignore[union-attr]  # rotated by it
        copies.append(Copy(DECODE_INPUTS["rope_cos_sin"]))
    maps = dict.fromkeys(("kv_map", "kv_rest_map", "q_map", "q_rope_map"))
    swapped = config.kv_load == "swap_ab"  # bulk copies bring keys, and boxes are prefetched
    if config.load.by_box or swapped:
        # Nothing is read of a cache without pages, which has no address, but a map needs one.
        cache = DECODE_INPUTS["kv_cache" if args.kv_cache.shape[0] else "q"]
        stored = torch.uint8 if config.fp8_scores or swapped else queries.dtype
        boxes = {"kv_map": config.box_blocks, "kv_rest_map": config.rest_blocks}
        maps |= {
            name: tensor_maps.kv_map(cache, args.kv_cache.shape, args.kv_cache.stride(), stored, blocks)
            for name, blocks in boxes.items()
            if blocks
        }
    if queries.dtype.itemsize > 1:
        maps |= q_maps or {"q_map": tensor_maps.q_map(DECODE_INPUTS["q"], queries, shape.q_len)}
    q_row_stride = 0 if q_maps else tensor_maps.pitch(queries.shape, queries.strides)
    if q_row_stride is None:
        raise RuntimeError(f"decode: rows of queries with strides {queries.strides} are not evenly apart, even copied")
    table = args.block_table
    wanted_lse = LseLayout.of(lse), args.plus_inf_lse
    numbers = dict(
        q_row_stride=q_row_stride,
        in_parts=int(bool(q_maps)),
        **combine_kernels.lse_numbers(*wanted_lse),
        heads_reciprocal=(2**32 - 1) // shape.heads + 1 if shape.heads > 1 else 0,
        page_ids_stride=0 if table is None else table.stride(0),
        page_ids_width=0 if table is None else table.shape[1],
        plan_words=shape.plan_words,
        **divisor("splits", splits.number),
        grid_stride=groups,
        streaming=int(streaming is not None),
        fold_size=0,
        fold_slot=0,
        **attention.decode_numbers(args, shape, results, splits),
    )
    if shape.plan_words:
        numbers["split_size"] = splits.size  # says whether CTAs drift apart (decode/producer_tma.hpp)
    partials, states = slots, config.folds and shape.plan_words > 0
    if config.folds:  # behind the partials each CTA has rows to fold in
        partials += -(-groups * tiles * BLOCK_M // shape.rows)
        numbers |= dict(fold_size=decode_splits.round_up_to_block_n(args.split_size), fold_slot=slots)
    pointers = attention.decode_pointers(args, partials > 0)
    in_table, in_list = pointers.pop("block_table"), pointers.pop("kv_indices")
    pointers["page_ids"] = in_list if in_table is None else in_table
    launch = LaunchSpec(
        *(config.instance, (tiles, groups, 1), config.threads, config.lds, True),
        *("decode_tma", numbers, pointers, maps),
    )
    merge = None
    if slots:
        merges = config.cluster_mode == "reduce_last"
        chosen = streaming or combine.config_for(
            shape.combine_problem(args.head_dim_v, slots),
            config.arch,
            fixed=splits.size > 0,
            planned=shape.plan_words > 0,
            merges=merges,
            folds=config.may_fold and (states or not config.folds),
        )
        # A plan says itself how many partials a sequence has; which of them decode merges depends on `groups`.
        partial_results = groups if merges else splits.partials
        merge = attention.combined(chosen, args, shape, results, wanted_lse, partial_results, merges)
        if streaming is not None:
            merge = combine.bounded(merge)
        if states:
            merge = combine.of_states(merge, shape.rows)
    notes += attention.parts_notes(shape, bool(q_maps))
    beside = " while decode runs" if streaming is not None else ""
    mode = config.cluster_mode
    pairs = "" if mode == "none" else f"; clusters of two CTAs: the call has cluster_mode {mode}"
    notes.append(f"{splits.note(shape, 'sequence')}{beside}{pairs}")
    if config.folds:
        tile = f"a work tile is up to {NODE_SPLITS} splits of at most {args.split_size} keys"
        notes.append(f"{tile}, whose results its CTA adds")
    return attention.call_of(launch, merge, shape, partials, args.head_dim_v, copies, temporaries, notes, 1 + states)
