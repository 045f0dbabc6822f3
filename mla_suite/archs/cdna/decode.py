"""decode on CDNA: what its kernels take, and how they are launched."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.cdna.decode_config import FP8_KV_FORMATS, FP8_QUERIES, MAX_ROWS, WIDTHS, CdnaConfig
from mla_suite.archs.common import combine, decode_table
from mla_suite.archs.common import combine_config as combine_configs
from mla_suite.archs.common.attention import MAX_ROW_TILES, pack_numbers, packer
from mla_suite.archs.common.combine import missing
from mla_suite.archs.common.decode import (
    POINTERS,
    Prepared,
    Shape,
    Splits,
    combine_launch,
    copies_out,
    default_splits,
    launch_of,
    numbers_of,
    query_adjustment,
    shape_of,
)
from mla_suite.core import dispatch
from mla_suite.core.dispatch import Launch, Supported, Unsupported
from mla_suite.launch import has_kernel
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.decode import DecodeArgs, Problem
from mla_suite.ops.plan.metadata import splits_of

Rule = Callable[[Problem, ArchSpec, int], CdnaConfig]
_pack_pointers = packer(len(POINTERS)).pack


def supports(problem: Problem, arch: ArchSpec, rule: Rule) -> Supported | Unsupported:
    """The instance that `rule` gives for the problem, in the tiles of the tuned row if there is one."""
    why = _unsupported(problem, arch)
    if why is not None:
        return Unsupported(why)
    row = decode_table.row_of(arch, problem)
    use = decode_table.ANY if row is None else str(row.values["use"])
    if row is not None and use == decode_table.TRITON:
        return Unsupported(f"{decode_table.reason(row)} leaves it to the triton kernel")
    config = rule(problem, arch, decode_table.TILES.get(use, MAX_ROWS))
    if row is not None and not has_kernel(arch, config.instance):
        dispatch.warn_once(
            config.instance,
            f"decode: {decode_table.reason(row)} names tiles of kernel {config.instance}, which is not built for "
            f"{arch.name}; the rule's run instead. `python -m mla_suite build` builds them",
        )
        config, row = rule(problem, arch, MAX_ROWS), None
    tiles = f"tiles of {config.rows} rows for {problem.q_len} x {problem.heads} query rows"
    answer = Supported(config, tiles if row is None else f"{tiles}, by {decode_table.reason(row)}")
    return missing(arch, config.instance, combine_configs.invariant(arch, problem.head_dim_v).instance) or answer


def _unsupported(problem: Problem, arch: ArchSpec) -> str | None:
    """Why the kernels cannot take a problem; None when they can."""
    fp8_kv_format, fp8_query = FP8_KV_FORMATS[arch.fp8], FP8_QUERIES[arch.fp8]
    caches = {torch.bfloat16: ("bf16", fp8_kv_format), torch.float16: ("fp16",), fp8_query: (fp8_kv_format,)}
    possible = caches.get(problem.q_dtype)
    if possible is None:
        return f"q is {problem.q_dtype}; it takes bfloat16, float16 or {str(fp8_query).removeprefix('torch.')}"
    if problem.kv_format not in possible:
        return f"kv_format {problem.kv_format} with {problem.q_dtype} queries; it takes {' or '.join(possible)}"
    if problem.head_dim not in WIDTHS or problem.head_dim_v != 512:
        return f"rows of {problem.head_dim} values with head_dim_v {problem.head_dim_v}; it takes 576 or 512 with 512"
    if problem.kv_format == fp8_kv_format and problem.head_dim != 576:
        return f"fp8 rows of {problem.head_dim} values; it takes 576"
    if problem.rope and (problem.rope != 64 or problem.head_dim != 576 or problem.kv_format != "bf16"):
        given = f"rope_cos_sin of {problem.rope} values with {problem.kv_format} rows of {problem.head_dim}"
        return f"{given}; it rotates 64 of bf16 rows of 576"
    if problem.alignment < 16:
        return f"kv_cache is aligned to {problem.alignment} bytes; its address and block stride must be multiples of 16"
    rows = problem.heads * problem.q_len
    if rows < 1 or -(-rows // MAX_ROWS) > MAX_ROW_TILES:
        return f"{rows} query rows per sequence; it takes 1 to {MAX_ROWS * MAX_ROW_TILES}"
    return None


def prepare(config: CdnaConfig, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> Launch:
    """The launch of decode, and of the combine behind it."""
    out, lse = outputs
    if args.seq_lens.shape[0] == 0 or out.numel() == 0:
        return lambda outputs, tensors: None
    adjust = query_adjustment(args.softmax_scale < 0, False)
    q = args.q if adjust is None else adjust(args.q, args.q_descale)
    shape = shape_of(args, q, out)
    splits = _splits(config, args, shape)
    slots, work_tiles = splits.slots(shape), splits.tiles(shape)
    if shape.plan_words:
        work_tiles = min(work_tiles, config.arch.compute_units)
    copies_q, temporary = not shape.q.in_whole_vectors, copies_out(shape)
    queries = shape.q.copied() if copies_q else shape.q
    results = shape.out.copied() if temporary else shape.out
    numbers = pack_numbers(
        "decode",
        POINTERS,
        q_batch_stride=0 if shape.ragged else queries.strides[0],
        q_token_stride=queries.strides[-3],
        q_head_stride=queries.strides[-2],
        kv_token_stride=args.kv_cache.stride(1),
        block_table_stride=0 if args.block_table is None else args.block_table.stride(0),
        grid_stride=work_tiles,
        **numbers_of(args, shape, results, splits),
    )
    combined = None
    if slots:
        partials = -(-slots // shape.batch)
        uniform = not (shape.plan_words or shape.ragged)
        chosen = combine.config_for(
            config.arch, args.head_dim_v, out.dtype, shape.rows, shape.batch, partials, splits.size > 0, uniform
        )
        combined = combine_launch(
            chosen, args, shape, results, (LseLayout.contiguous(shape.heads), False), splits.partials
        )
    grid = (work_tiles, config.tiles(shape.rows), 1)
    prepared = Prepared(
        # The kernels store lse as [tokens, heads] with -inf, and it is converted for who wants it otherwise.
        *(config, grid, 0, False, numbers, copies_q, temporary, args.plus_inf_lse or not lse.is_contiguous()),
        *(slots, shape.rows, combined),
    )
    return launch_of(prepared, args, adjust, _pack_pointers)


def notes(config: CdnaConfig, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> tuple[str, ...]:
    """Returns what `explain` says of a call: how its keys are split."""
    if args.seq_lens.shape[0] == 0 or outputs[0].numel() == 0:
        return ()
    shape = shape_of(args, args.q, outputs[0])
    return (_splits(config, args, shape).note(shape),)


def _splits(config: CdnaConfig, args: DecodeArgs, shape: Shape) -> Splits:
    if shape.plan_words:
        return Splits(1, 1, args.split_size)
    by_size = int(splits_of(shape.bound, args.split_size)) if args.split_size else 0
    count = args.num_splits or by_size or default_splits(config, args, shape)
    return Splits(count, count, args.split_size)
