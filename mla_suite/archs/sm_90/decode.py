"""decode on sm_90: which instance, how many splits, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.common import combine as combine_kernels
from mla_suite.archs.common import combine_config as combine_configs
from mla_suite.archs.common import decode_table
from mla_suite.archs.common.attention import pack_numbers
from mla_suite.archs.common.combine import AnyCombineConfig, missing
from mla_suite.archs.common.decode import (
    INPUTS,
    Prepared,
    Shape,
    Splits,
    combine_launch,
    copies_out,
    launch_of,
    numbers_of,
    query_adjustment,
    shape_of,
    tuned_splits,
)
from mla_suite.archs.sm_90 import combine, tensor_maps
from mla_suite.archs.sm_90.costs import Estimate, best_splits, pairing_pays
from mla_suite.archs.sm_90.tile import BLOCK_M, BLOCK_N, P_BYTES, REGISTER_STEPS, block_bytes, groups_of, swap_ab_bytes
from mla_suite.build.params import reciprocal
from mla_suite.core.dispatch import Launch, Supported, Unsupported
from mla_suite.launch import tensor_map
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.decode import DecodeArgs, Problem
from mla_suite.ops.plan.metadata import splits_of

STAGES = 5
REDUCE_BYTES = 5 * 4 * BLOCK_M + 8 * (4 + 4 * 4)  # cluster_mode reduce_o: the statistics of both splits, and barriers
SENTINEL_BYTES = 16 + 4096  # streaming combine: one mbarrier and the pattern that the sentinels are filled from
EXCHANGE_STAGES = 4
FP8_STAGES = {576: 4, 512: 5}
RAW_STAGES = 2  # stages of keys as they are stored, which the producer of e4m3 rows copies ahead
# cluster_mode exchange_p: two stages of 256 columns of the other CTA's keys, two buffers of its P, the statistics of
# both splits, barriers, and the sentinel pattern of one row's half.
EXCHANGE_BYTES = 2 * BLOCK_N * 512 + 2 * P_BYTES + 5 * 4 * BLOCK_M + 8 * (2 + 2 * 2 + 2 * 2 + 2 * 4) + 16 + 1024
WIDTHS = (576, 512)
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
KV_LOADS = ("tma", "gather", "fp8", "swap_ab")
SWAP_AB_STAGES = {16: 11, 32: 9}  # most query rows of a CTA -> stages of 32 keys as they are stored
SWAP_AB_WIDTH = 576
CLUSTER_MODES = ("none", "reduce_o", "reduce_last", "exchange_p")
PLAN = INPUTS.index("plan")
MAX_M = 2**25 - 1  # query rows of a sequence: 32 bits count its partial results in 16 bytes


@dataclass(frozen=True)
class Sm90Config:
    """One instance of csrc/sm_90/decode/decode.cu. Construction raises ValueError, in a sentence, for an illegal point.

    dtype     type of queries; the result has it, too, or bf16 for fp8
    width     values of a cached row
    kv_load   'tma': the copy engine brings 32 keys of one page at a time; 'gather': threads bring keys of any pages;
              'fp8': keys of any pages are e4m3, which threads convert; 'swap_ab': the same, converted where they are
              multiplied, as the first operand (decode/swap_ab), for few rows. Otherwise they have the queries' type
    cluster_mode  each CTA of a cluster of two processes one split of a sequence, and the two write one result or
              partial: they reduce O ('reduce_o') or exchange P ('exchange_p') over DSMEM; with a plan they reduce O
              of their last work tiles where these are splits of one sequence ('reduce_last'); 'none' without a
              cluster, as for gathered keys
    q_rows    query rows of a CTA at most; fewer than 64 only with 'swap_ab'
    """

    arch: ArchSpec = field(repr=False)
    dtype: str
    width: int
    kv_load: str
    cluster_mode: str = "none"
    q_rows: int = BLOCK_M

    def __post_init__(self) -> None:
        if self.arch.name != "sm_90":
            self._raise(f"{self.arch.name} is not sm_90")
        for name, value, possible in (
            ("dtype", self.dtype, dtypes(self.kv_load)),
            ("width", self.width, (SWAP_AB_WIDTH,) if self.kv_load == "swap_ab" else WIDTHS),
            ("kv_load", self.kv_load, KV_LOADS),
            ("cluster_mode", self.cluster_mode, cluster_modes(self.kv_load, self.width)),
            ("q_rows", self.q_rows, tuple(SWAP_AB_STAGES) if self.kv_load == "swap_ab" else (BLOCK_M,)),
        ):
            if value not in possible:
                self._raise(f"{name} is one of {', '.join(map(str, possible))}")
        if self.lds > self.arch.lds_bytes:
            self._raise(f"it needs {self.lds} bytes of shared memory of {self.arch.lds_bytes}")

    def _raise(self, why: str) -> None:
        point = f"dtype={self.dtype} width={self.width} kv_load={self.kv_load}"
        raise ValueError(f"decode: no kernel at {point} on {self.arch.name}: {why}")

    @property
    def threads(self) -> int:
        if self.kv_load == "swap_ab":
            return 384  # three warpgroups: one loads keys, two compute P and the result
        return 512  # four warpgroups: one loads keys, one computes P, two hold the result

    @property
    def lds(self) -> int:
        """Dynamic shared memory in bytes, as csrc/sm_90/decode/shared_storage.hpp lays it out."""
        if self.kv_load == "swap_ab":
            return swap_ab_bytes(self.width, self.stages, self.q_rows)
        alone = block_bytes(self.width, self.stages, REGISTER_STEPS[self.kv_load])
        reduced = dict.fromkeys(("reduce_o", "reduce_last"), REDUCE_BYTES)
        beside = {"none": SENTINEL_BYTES, "exchange_p": EXCHANGE_BYTES, **reduced}[self.cluster_mode]
        if self.kv_load == "fp8":
            cluster = 0 if self.cluster_mode == "none" else beside
            raw = RAW_STAGES * (BLOCK_N * self.width + 2 * 8)
            return -(-(alone + cluster) // 128) * 128 + raw
        return alone + (beside if self.kv_load == "tma" else 0)

    @property
    def stages(self) -> int:
        if self.kv_load == "swap_ab":
            return SWAP_AB_STAGES[self.q_rows]
        if self.kv_load == "fp8":
            return FP8_STAGES[self.width]
        return EXCHANGE_STAGES if self.cluster_mode == "exchange_p" else STAGES

    @property
    def keys(self) -> str:
        """How keys come, as the estimate of time asks: e4m3 rows that no cluster shares are gathered."""
        if self.kv_load == "swap_ab":
            return "fp8"
        return "gather" if self.kv_load == "fp8" and self.width != 576 else self.kv_load

    def clustered(self, cluster_mode: str) -> Sm90Config:
        """The instance with a cluster mode. Keys that are the first operand are shared by none."""
        if self.kv_load == "swap_ab" and cluster_mode != "none":
            return Sm90Config(self.arch, self.dtype, self.width, "fp8", cluster_mode)
        return replace(self, cluster_mode=cluster_mode)

    @property
    def box_blocks(self) -> int:
        """Blocks of 64 values of 32 keys that the copy engine brings at a time."""
        return 1 if self.cluster_mode == "exchange_p" else self.width // 64

    @property
    def instance(self) -> str:
        if self.kv_load == "swap_ab":
            return f"swap_ab_decode_dtype-{self.dtype}_qrows-{self.q_rows}"
        return f"decode_dtype-{self.dtype}_dqk-{self.width}_kvsource-{self.kv_load}_clustermode-{self.cluster_mode}"

    def tiles(self, rows: int) -> int:
        """CTAs that share the keys of one work tile."""
        return -(-rows // BLOCK_M)

    def notes(self, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> tuple[str, ...]:
        """Returns what `explain` says of a call: how its keys are split."""
        return _notes(self, outputs, args)

    def prepare(self, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> Launch:
        """The launch of decode."""
        return _prepare(self, outputs, args)


def cluster_modes(kv_load: str, width: int) -> tuple[str, ...]:
    """The cluster modes that have instances. Beside five stages of e4m3 rows of 512 values there is room for none."""
    if kv_load == "fp8":
        return ("none", "reduce_o") if width == 576 else ("none",)
    return CLUSTER_MODES if kv_load == "tma" else ("none",)


def dtypes(kv_load: str) -> tuple[str, ...]:
    """The types of queries that have instances, by how keys come."""
    return tuple(ELEMENTS.values()) if kv_load in ("fp8", "swap_ab") else ("bf16", "fp16")


def config_for(problem: Problem, arch: ArchSpec) -> Sm90Config:
    """The instance for a problem. It sees neither batch nor lengths, so a batch-invariant call may use it."""
    if problem.kv_format == "fp8":
        element, rows = ELEMENTS[problem.q_dtype], problem.heads * problem.q_len
        few = next((q_rows for q_rows in SWAP_AB_STAGES if rows <= q_rows), None)
        if few is not None and problem.head_dim == SWAP_AB_WIDTH:
            return Sm90Config(arch, element, problem.head_dim, "swap_ab", q_rows=few)
        return Sm90Config(arch, element, problem.head_dim, "fp8")
    kv_load = "tma" if problem.page % BLOCK_N == 0 else "gather"
    return Sm90Config(arch, ELEMENTS[problem.q_dtype], problem.head_dim, kv_load)


def supports(problem: Problem, arch: ArchSpec) -> Supported | Unsupported:
    why = _unsupported(problem)
    if why is not None:
        return Unsupported(why)
    row = decode_table.row_of(arch, problem)
    if row is not None and row.values["use"] == decode_table.TRITON:
        return Unsupported(f"{decode_table.reason(row)} leaves it to the triton kernel")
    config = config_for(problem, arch)
    modes = cluster_modes(config.keys, config.width)
    clusters = [config.clustered(mode).instance for mode in modes]
    reason = f"tiles of {config.q_rows} rows for {problem.q_len} x {problem.heads} query rows"
    answer = Supported(config, reason if row is None else f"{reason}, by {decode_table.reason(row)}")
    return missing(arch, *clusters, combine_configs.invariant(arch, problem.head_dim_v).instance) or answer


def _unsupported(problem: Problem) -> str | None:
    """Why the kernels cannot take a problem; None when they can."""
    if problem.q_dtype not in ELEMENTS:
        return f"q is {problem.q_dtype}; it takes bfloat16, float16 or float8_e4m3fn"
    if problem.kv_format not in ("fp8", ELEMENTS[problem.q_dtype]):
        known = " or ".join(dict.fromkeys((ELEMENTS[problem.q_dtype], "fp8")))
        return f"kv_format {problem.kv_format} with {problem.q_dtype} queries; it takes {known}"
    if problem.head_dim not in WIDTHS or problem.head_dim_v != 512:
        return f"rows of {problem.head_dim} values with head_dim_v {problem.head_dim_v}; it takes 576 or 512 with 512"
    if problem.rope:
        return "rope_cos_sin; it takes keys that were rotated before they were cached"
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
        config.arch, config.keys, shape.batch, shape.rows, -(-shape.bound // BLOCK_N)
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
    by_size = int(splits_of(shape.bound, size)) if size else 0
    count = args.num_splits or by_size or split_count(config, args, shape)
    if size:
        return config, Splits(count, count, size), None
    estimate = Estimate(config.arch, config.keys, shape.batch, shape.rows, -(-shape.bound // BLOCK_N))
    mode = estimate.cluster_mode(count)
    partials, runs = (count, 2) if mode == "none" else (count // 2, 4)
    streaming = None
    if estimate.streams(count, mode):
        streaming = combine.streaming(config.arch, 512, shape.rows, shape.batch, partials, estimate.busy(count), runs)
    return config.clustered(mode), Splits(count, partials, size), streaming


def _notes(config: Sm90Config, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> tuple[str, ...]:
    out = outputs[0]
    if args.seq_lens.shape[0] == 0 or out.numel() == 0:
        return ()
    if _needs_no_plan(config, args, out):
        unread = "the plan is not read: equal splits take less time for these sequences"
        return unread, *_notes(config, outputs, replace(args, plan=None))
    shape = shape_of(args, args.q, out)
    clustered, splits, streaming = _split(config, args, shape)
    beside = " while decode runs" if streaming is not None else ""
    pairs = "" if clustered.cluster_mode == "none" else f"; clusters of two CTAs, cluster_mode {clustered.cluster_mode}"
    return (f"{splits.note(shape)}{beside}{pairs}",)


def may_pair_parts(config: Sm90Config, args: DecodeArgs, groups: int) -> bool:
    """Whether clusters may walk a plan's SM parts in pairs. Batch-invariant splits are all combined by one kernel."""
    modes = cluster_modes(config.kv_load, config.width)
    return "reduce_last" in modes and groups % 2 == 0 and not args.split_size


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
    estimate = Estimate(config.arch, config.keys, shape.batch, shape.rows, -(-shape.bound // BLOCK_N))
    return estimate.plan_saves_little(split_count(config, args, shape))


def _prepare(config: Sm90Config, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> Launch:
    out, lse = outputs
    if args.seq_lens.shape[0] == 0 or out.numel() == 0:
        return lambda outputs, tensors: None
    if _needs_no_plan(config, args, out):
        unplanned = _prepare(config, outputs, replace(args, plan=None))
        return lambda outputs, tensors: unplanned(outputs, (*tensors[:PLAN], None, *tensors[PLAN + 1 :]))
    keys_are_fp8 = config.kv_load in ("fp8", "swap_ab")  # whose kernel takes q_descale itself
    adjust = query_adjustment(args.softmax_scale < 0, args.q_descale is not None and not keys_are_fp8)
    q = args.q if adjust is None else adjust(args.q, args.q_descale)
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
    if config.kv_load == "tma":
        kv_map = tensor_maps.kv_map(args.kv_cache.shape, args.kv_cache.stride(), q.dtype, config.box_blocks)
    q_map = None
    if queries.dtype.itemsize > 1:
        q_map = tensor_maps.q_map(queries.shape, queries.strides, queries.dtype, shape.q_len)
    q_row_stride = tensor_maps.pitch(queries.shape, queries.strides)
    if q_row_stride is None:
        raise RuntimeError(f"decode: rows of queries with strides {queries.strides} are not evenly apart, even copied")
    splits_magic, splits_shift = reciprocal(splits.number)
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
        splits_magic=splits_magic,
        splits_shift=splits_shift,
        grid_stride=groups,
        streaming=int(streaming is not None),
        **numbers_of(args, shape, results, splits),
    )
    combined = None
    if slots:
        chosen: AnyCombineConfig = streaming or combine.config_for(
            config.arch,
            args.head_dim_v,
            out.dtype,
            shape.rows,
            shape.batch,
            -(-slots // shape.batch),
            splits.size > 0,
            shape.plan_words > 0,
        )
        merges = config.cluster_mode == "reduce_last"
        combined = combine_launch(chosen, args, shape, results, wanted_lse, splits.partials, merges)
    prepared = Prepared(
        *(config, (tiles, groups, 1), config.lds, True, numbers, copies_q, temporary, False),
        *(slots, shape.rows, combined),
    )
    return launch_of(prepared, args, adjust, tensor_maps.decode_packer(kv_map, q_map))
