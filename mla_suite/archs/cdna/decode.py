"""decode on CDNA: its configurations, which prove themselves legal for an arch, and how they are launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from mla_suite.archs import ArchSpec, attention, combine, decode_table
from mla_suite.archs.attention import NARROW, WIDTHS, Shape, Splits
from mla_suite.archs.cdna.extends import FEWEST_TOKENS, WORTH, clocks
from mla_suite.archs.cdna.splits import Kind, LoopCosts, default_splits
from mla_suite.archs.combine import OUTPUTS
from mla_suite.core import dispatch
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.launch import has_kernel, missing
from mla_suite.launch.spec import CallSpec, LaunchSpec, Temporary
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.decode import DecodeArgs, Problem
from mla_suite.ops.plan.metadata import splits_of

TILE = 16  # rows of a matrix instruction
MAX_ROWS = 128
NARROW_ROWS = (16, 32, 64, 128)
"""Tiles of query rows that NARROW rows of bf16 have instances for."""
STAGES = {512: 3, 256: 5, 128: 8}
"""Stages of keys that the waves share where the cache has 16 bits, by head_dim_v."""
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fnuz: "fp8", torch.float8_e4m3fn: "fp8"}
MAX_BF16_P_ROWS = 96
"""Rows of a tile up to which fp8 queries keep softmax weights in bf16."""
FP8_KV_FORMATS = {"fnuz": "fp8_fnuz", "ocp": "fp8"}  # by the arch's flavour
FP8_QUERIES = {"fnuz": torch.float8_e4m3fnuz, "ocp": torch.float8_e4m3fn}
PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8"), ("fp8", "fp8"))
"""(query, cache) that have instances; fp8 is e4m3 in the arch's own flavour."""


@dataclass(frozen=True)
class CdnaConfig:
    """One instance of csrc/<arch>/decode*.hip. Construction raises ValueError, in one sentence, for an illegal point.

    query        type of the queries
    cache        type of the cached values
    rows         query rows (query token x head) that a workgroup holds
    width        values of a cached row
    rotate       the cache holds an un-rotated rope part
    fp8_weights  the softmax weights are rounded to fp8 before they meet the values, which needs fp8 queries,
                 in tiles of more than MAX_BF16_P_ROWS rows
    """

    costs: ClassVar[LoopCosts]
    """Of the arch, whose subclass says them."""

    arch: ArchSpec = field(repr=False)
    query: str
    cache: str
    rows: int
    width: int
    rotate: bool
    fp8_weights: bool = False

    def __post_init__(self) -> None:
        if self.arch.vendor != "amd":
            self._raise(f"{self.arch.name} is not an AMD arch")
        if (self.query, self.cache) not in PAIRS:
            self._raise(f"query and cache are one of {', '.join(f'{q} and {c}' for q, c in PAIRS)}")
        if self.rows % TILE or not TILE <= self.rows <= MAX_ROWS:
            self._raise(f"rows are {TILE} to {MAX_ROWS} in steps of {TILE}")
        if self.width not in WIDTHS:
            self._raise(f"width is one of {', '.join(map(str, WIDTHS))}")
        if self.cache == "fp8" and self.width != 576:
            self._raise("fp8 rows have 576 values")
        if self.rotate and (self.width != 576 or self.cache != "bf16"):
            self._raise("only bf16 rows of 576 values have un-rotated instances")
        if self.narrow and (self.cache != "bf16" or self.rows not in NARROW_ROWS):
            self._raise(f"narrow rows are bf16, with {', '.join(map(str, NARROW_ROWS))} query rows")
        if self.fp8_weights and (self.query != "fp8" or self.rows <= MAX_BF16_P_ROWS):
            self._raise(f"fp8 weights come with fp8 queries, in tiles of more than {MAX_BF16_P_ROWS} rows")
        if self.lds > self.arch.lds_bytes:
            self._raise(f"it needs {self.lds} bytes of LDS of {self.arch.lds_bytes}")

    def _raise(self, why: str) -> None:
        point = f"query={self.query} cache={self.cache} rows={self.rows} width={self.width} rotate={self.rotate}"
        raise ValueError(f"decode: no kernel at {point} on {self.arch.name}: {why}")

    @property
    def head_dim_v(self) -> int:
        return WIDTHS[self.width]

    @property
    def narrow(self) -> bool:
        return self.width in NARROW

    @property
    def threads(self) -> int:
        return 4 * self.arch.wavefront  # a wave per SIMD, each with all registers of its lanes

    @property
    def keys(self) -> int:
        """Keys of a tile that the waves share; two row tiles of 16-bit queries leave no registers for more scores."""
        few = self.cache != "fp8" or (self.query != "fp8" and self.rows > MAX_ROWS // 2)
        return TILE if few else 2 * TILE

    @property
    def lds(self) -> int:
        """Static LDS in bytes: one private latent tile per wave, or stages of shared rows and their page numbers."""
        value = 1 if self.cache == "fp8" else 2
        if self.rows == TILE:
            return 4 * TILE * max(self.head_dim_v * value, min(self.head_dim_v, 256) * 4)
        rope = self.keys * value * (self.width - self.head_dim_v)
        stage, pages = self.keys * (self.head_dim_v * value + 16) + rope, 4 * 512
        if self.rotate:
            return 2 * (stage + TILE * 256) + pages  # with cosines and sines
        return STAGES[self.head_dim_v] * stage + pages

    @property
    def instance(self) -> str:
        if self.cache == "fp8":
            kernel, weight = ("decode_fp8_weights", "fp8") if self.fp8_weights else ("decode_fp8", "bf16")
            return f"{kernel}_query-{self.query}_weight-{weight}_rows-{self.rows}"
        if self.narrow:
            return f"decode_narrow_dtype-{self.cache}_rows-{self.rows}_width-{self.width}_dv-{self.head_dim_v}"
        kernel = "decode_rotated" if self.rotate else "decode"
        return f"{kernel}_dtype-{self.cache}_rows-{self.rows}_width-{self.width}_rotate-{int(self.rotate)}"

    @property
    def kind(self) -> Kind:
        return decode_table.width(self.query), decode_table.width(self.cache)

    def tiles(self, rows: int) -> int:
        """Workgroups that share the keys of one work tile."""
        return -(-rows // self.rows)

    def default_splits(self, rows: int, batch: int, keys: int) -> int:
        """Splits of each of `batch` sequences of `rows` query rows and `keys` keys where arguments say nothing."""
        sizes = self.rows, self.tiles(rows), batch, keys, self.width, self.head_dim_v
        return default_splits(self.costs, self.arch, self.kind, *sizes)

    def extend_clocks(self, problem: Problem) -> float:
        """Estimated clocks of many query tokens, each of which sees the keys before it."""
        batch, keys = max(problem.batch, 1), max(problem.context, problem.q_len)
        splits = self.default_splits(problem.heads * problem.q_len, batch, keys)
        sizes = batch, problem.heads, problem.q_len, keys, self.width, self.head_dim_v
        return clocks(self.costs, self.arch, self.kind, self.rows, splits, *sizes)

    def spec(self, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> CallSpec:
        """The launch of decode, and of the combine behind it."""
        out, lse = outputs
        if args.seq_lens.shape[0] == 0 or out.numel() == 0:
            return CallSpec()
        shape = attention.decode_shape(args, out)
        splits = _splits(self, args, shape)
        slots, work_tiles = splits.slots(shape), splits.tiles(shape)
        if shape.plan_words:
            work_tiles = min(work_tiles, self.arch.compute_units)
        queries, results = shape.q, shape.out
        copies, temporaries = attention.decode_mask_copies(args), list[Temporary]()
        if args.softmax_scale < 0 or not queries.in_whole_vectors or shape.q_rope is not None:
            queries, copy = attention.decode_query_copy(args, shape)
            copies.append(copy)
        if attention.decode_out_is_apart(shape):
            results = results.copied()
            temporaries.append(Temporary(OUTPUTS["out"]))
        # The kernels store lse as [tokens, heads] with -inf, and it is converted for who wants it otherwise.
        if args.plus_inf_lse or not lse.is_contiguous():
            temporaries.append(Temporary(OUTPUTS["lse"], args.plus_inf_lse))
        numbers = dict(
            q_batch_stride=0 if shape.ragged else queries.strides[0],
            q_token_stride=queries.strides[-3],
            q_head_stride=queries.strides[-2],
            kv_token_stride=args.kv_cache.stride(1),
            block_table_stride=0 if args.block_table is None else args.block_table.stride(0),
            grid_stride=work_tiles,
            **attention.decode_numbers(args, shape, results, splits),
        )
        grid, pointers = (work_tiles, self.tiles(shape.rows), 1), attention.decode_pointers(args, slots > 0)
        launch = LaunchSpec(self.instance, grid, self.threads, 0, False, "decode", numbers, pointers)
        merge = None
        if slots:
            each = 0 if shape.plan_words or shape.ragged else splits.partials
            merged = shape.combine_problem(args.head_dim_v, slots, num_splits=each)
            chosen = combine.config_for(merged, self.arch, splits.size > 0)
            wanted = LseLayout.contiguous(shape.heads), False
            merge = attention.combined(chosen, args, shape, results, wanted, splits.partials)
        notes = [splits.note(shape, "sequence"), *attention.parts_notes(shape, read=False)]
        return attention.call_of(launch, merge, shape, slots, args.head_dim_v, copies, temporaries, notes)


def tile_rows(rows: int, most: int = MAX_ROWS, narrow: bool = False) -> int:
    """Rows of a workgroup: ceil(rows / most) near-equal tiles; of `narrow` rows the least of NARROW_ROWS that fits."""
    tiles = -(-rows // most)
    least = -(-rows // (tiles * TILE)) * TILE
    return next(size for size in NARROW_ROWS if size >= least) if narrow else least


Rule = Callable[[Problem, int], CdnaConfig]


def supports(problem: Problem, arch: ArchSpec, rule: Rule) -> Supported | Unsupported:
    """The instance that `rule` gives for the problem, in the tiles of the tuned row if there is one."""
    why = _unsupported(problem, arch)
    if why is not None:
        return Unsupported(why)
    row = decode_table.row_of(arch, problem)
    use = "" if row is None else str(row.values["use"])
    if row is not None and use == decode_table.TRITON:
        return Unsupported(f"{decode_table.reason(row)} leaves it to the triton kernel")
    config = rule(problem, decode_table.TILES[use]) if use else _untuned(problem, arch, rule)
    if row is not None and not has_kernel(arch, config.instance):
        dispatch.warn_once(
            config.instance,
            f"decode: {decode_table.reason(row)} names tiles of kernel {config.instance}, which is not built for "
            f"{arch.name}; the rule's run instead. `python -m mla_suite build` builds them",
        )
        config, row = rule(problem, MAX_ROWS), None
    tiles = f"tiles of {config.rows} rows for {problem.q_len} x {problem.heads} query rows"
    answer = Supported(config, tiles if row is None else f"{tiles}, by {decode_table.reason(row)}")
    return missing(arch, config.instance, *combine.invariant_instances(arch, problem.head_dim_v)) or answer


def _untuned(problem: Problem, arch: ArchSpec, rule: Rule) -> CdnaConfig:
    """The instance where no tuned row decides: in the largest tiles, or those in which an extend takes less time."""
    largest = rule(problem, MAX_ROWS)
    own_splits = problem.planned or problem.num_splits > 0 or problem.split_size > 0
    if problem.q_len < FEWEST_TOKENS or problem.window or problem.tree or own_splits:
        return largest
    smaller = [rule(problem, most) for most in decode_table.TILES.values() if TILE < most < MAX_ROWS]
    built = [config for config in smaller if has_kernel(arch, config.instance)]
    best = min(built, key=lambda config: config.extend_clocks(problem), default=largest)
    return best if best.extend_clocks(problem) < WORTH * largest.extend_clocks(problem) else largest


def _unsupported(problem: Problem, arch: ArchSpec) -> str | None:
    """Why the kernels cannot take a problem; None when they can."""
    fp8_kv_format, fp8_query = FP8_KV_FORMATS[arch.fp8], FP8_QUERIES[arch.fp8]
    caches = {torch.bfloat16: ("bf16", fp8_kv_format), torch.float16: ("fp16",), fp8_query: (fp8_kv_format,)}
    possible = caches.get(problem.q_dtype)
    if possible is None:
        return f"q is {problem.q_dtype}; it takes bfloat16, float16 or {str(fp8_query).removeprefix('torch.')}"
    if problem.kv_format not in possible:
        return f"kv_format {problem.kv_format} with {problem.q_dtype} queries; it takes {' or '.join(possible)}"
    if WIDTHS.get(problem.head_dim) != problem.head_dim_v:
        widths = ", ".join(f"{width} with {head_dim_v}" for width, head_dim_v in WIDTHS.items())
        return f"rows of {problem.head_dim} values with head_dim_v {problem.head_dim_v}; it takes {widths}"
    if problem.head_dim in NARROW and problem.kv_format != "bf16":
        return f"{problem.kv_format} rows of {problem.head_dim} values; it takes bf16"
    if problem.kv_format == fp8_kv_format and problem.head_dim != 576:
        return f"fp8 rows of {problem.head_dim} values; it takes 576"
    if problem.rope and (problem.rope != 64 or problem.head_dim != 576 or problem.kv_format != "bf16"):
        given = f"rope_cos_sin of {problem.rope} values with {problem.kv_format} rows of {problem.head_dim}"
        return f"{given}; it rotates 64 of bf16 rows of 576"
    if problem.alignment < 16:
        return f"kv_cache is aligned to {problem.alignment} bytes; its address and block stride must be multiples of 16"
    rows = problem.heads * problem.q_len
    if rows < 1 or -(-rows // MAX_ROWS) > attention.MAX_ROW_TILES:
        return f"{rows} query rows per sequence; it takes 1 to {MAX_ROWS * attention.MAX_ROW_TILES}"
    return None


def _splits(config: CdnaConfig, args: DecodeArgs, shape: Shape) -> Splits:
    if shape.plan_words:
        return Splits(1, 1, args.split_size)
    has_sink = args.attn_sink is not None
    by_size = int(splits_of(shape.keys, args.split_size, has_sink)) if args.split_size else 0
    count = args.num_splits or by_size or config.default_splits(shape.rows, shape.batch, shape.keys)
    return Splits(count, count, args.split_size)
