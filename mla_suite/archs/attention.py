"""What the launches of decode and sparse_decode have in common on every arch: rows, splits, copies and the combine.

sparse_decode is described as decode of sequences of one query token each, whose keys are the selected ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

import torch

from mla_suite.archs import ArchSpec, combine
from mla_suite.archs.combine import OUTPUTS, AnyCombineConfig
from mla_suite.build.params import divisor, reciprocal
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import get_kv_format
from mla_suite.launch import missing
from mla_suite.launch.spec import CallSpec, Copy, Input, LaunchSpec, Scratch, Slot, Temporary, inputs, present
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.decode import DecodeArgs
from mla_suite.ops.plan.metadata import HEADER_WORDS, most_work_tiles
from mla_suite.ops.plan.window import most_keys
from mla_suite.ops.sparse_decode import Problem as SparseDecodeProblem
from mla_suite.ops.sparse_decode import SparseDecodeArgs, splits_by_size

MAX_ROW_TILES = 65535  # of a grid's second dimension
MIN_SCALE = 1e-30  # stands for 0, where a masked score of -inf times the scale would be NaN
WIDTHS = {576: 512, 512: 512, 320: 256, 288: 256, 160: 128}
"""Values of a row that dense decode has kernels for -> those of them that are V."""
NARROW = tuple(width for width, head_dim_v in WIDTHS.items() if head_dim_v < 512)
DECODE_INPUTS = inputs(DecodeArgs)
SPARSE_INPUTS = inputs(SparseDecodeArgs)
PARTIALS: Mapping[str, Slot] = {"partial_out": Scratch("partial_out"), "partial_lse": Scratch("partial_lse")}
NO_PARTIALS: Mapping[str, Slot] = dict.fromkeys(PARTIALS)


class Rows(NamedTuple):
    """Rows of queries or results by their metadata."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool  # the address is a multiple of 16

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Rows:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % 16 == 0)

    @property
    def in_whole_vectors(self) -> bool:
        """Whether 16-byte accesses reach every row."""
        return self.aligned and self.strides[-1] == 1 and gcd(*self.strides[:-1]) * self.dtype.itemsize % 16 == 0

    def copied(self) -> Rows:
        """The same rows in contiguous memory of their own."""
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.append(strides[-1] * size)
        return Rows(self.dtype, self.shape, tuple(reversed(strides)), True)


class Shape(NamedTuple):
    """Sizes of a call, from metadata alone."""

    q: Rows
    out: Rows
    batch: int
    heads: int
    q_len: int  # query tokens of the longest sequence
    rows: int  # query rows of a sequence
    ragged: bool  # sequences differ in their query tokens
    page_size: int
    keys: int  # of a sequence at most, from its window's origin on; of sparse_decode in the mean
    plan_words: int  # 0 without a plan


class Splits(NamedTuple):
    """How the keys of sequences are split.

    number    equal splits per sequence; 1 with a plan, which has its own
    partials  partial results per sequence; 1 is the result itself
    size      keys of a split in batch-invariant mode, else 0
    """

    number: int
    partials: int
    size: int

    def slots(self, shape: Shape) -> int:
        """Partial results of all sequences together."""
        if shape.plan_words:
            return int(most_work_tiles(shape.plan_words, shape.batch))
        return shape.batch * self.partials if self.partials > 1 else 0

    def tiles(self, shape: Shape) -> int:
        """Work tiles that a launch walks."""
        return self.slots(shape) if shape.plan_words else shape.batch * self.number

    def note(self, shape: Shape, what: str) -> str:
        """What `explain` says of them; `what` is split."""
        if shape.plan_words:
            return f"the plan splits {what}s, into at most {self.slots(shape)} partial results"
        if self.number == 1:
            return f"{what}s are not split"
        if self.partials == 1:
            return f"{self.number} splits of each {what}, merged in the kernel"
        return f"{self.number} splits of each {what}, whose {self.partials} partial results combine merges"


def combined(
    config: AnyCombineConfig,
    args: DecodeArgs | SparseDecodeArgs,
    shape: Shape,
    out: Rows,
    lse: tuple[LseLayout, bool],
    partials: int,
    merges: bool = False,
) -> LaunchSpec:
    """The launch that combines partials into rows of `out` and an lse as `combine.launch_of` has it.
    `merges` says that a decode with a plan merges some rows itself, and marks them."""
    rows, head_dim_v = shape.rows, args.head_dim_v
    slots = DECODE_INPUTS if isinstance(args, DecodeArgs) else SPARSE_INPUTS
    indptr = Input(slots["plan"].position, first=HEADER_WORDS, length=shape.batch + 1)
    pointers = {
        **PARTIALS,
        "split_indptr": indptr if shape.plan_words else None,
        "cu_seqlens_q": slots["cu_seqlens_q"] if shape.ragged else None,
        "attn_sink": None if args.attn_sink is None else slots["attn_sink"],
        **OUTPUTS,
    }
    return combine.launch_of(
        config,
        (shape.batch, rows, shape.heads),
        ((rows * head_dim_v, head_dim_v), (rows, 1), out.strides[-3:-1]),
        lse,
        True,  # scratch and results begin on 16 bytes
        out.dtype,
        1 if args.attn_sink is None else shape.heads,
        partials,
        (combine.MAY_BE_MERGED if merges else int(shape.plan_words > 0), False),
        pointers,
    )


def call_of(
    launch: LaunchSpec,
    combine_launch: LaunchSpec | None,
    shape: Shape,
    slots: int,
    head_dim_v: int,
    copies: Sequence[Copy],
    temporaries: Sequence[Temporary],
    notes: Sequence[str],
) -> CallSpec:
    """The call of a kernel that leaves `slots` partials to a combine, where there is one."""
    launches: tuple[LaunchSpec, ...] = (launch,)
    scratch = dict[str, tuple[int, ...]]()
    if combine_launch is not None:
        launches += (combine_launch,)
        scratch = {"partial_out": (slots, shape.rows, head_dim_v), "partial_lse": (slots, shape.rows)}
    return CallSpec(launches, scratch, tuple(copies), tuple(temporaries), tuple(notes))


# decode


def decode_shape(args: DecodeArgs, out: torch.Tensor) -> Shape:
    """The sizes of a call of decode."""
    ragged, page_size = args.cu_seqlens_q is not None, args.kv_cache.shape[1]
    pages = 0 if args.kv_indices is None else args.kv_indices.shape[0]
    pages = args.block_table.shape[1] if args.block_table is not None else pages
    heads, q_len = args.q.shape[-2], args.max_seqlen_q if ragged else args.q.shape[1]
    keys = most_keys(args.max_seqlen_kv or pages * page_size, q_len, args.window_left)
    sizes = args.seq_lens.shape[0], heads, q_len, heads * q_len
    plan_words = 0 if args.plan is None else args.plan.shape[0]
    return Shape(Rows.of(args.q), Rows.of(out), *sizes, ragged, page_size, keys, plan_words)


def decode_numbers(args: DecodeArgs, shape: Shape, out: Rows, splits: Splits) -> dict[str, int | float]:
    """The parameters that the decode kernels of every arch take."""
    cp_period = args.cp_interleave * args.cp_world_size
    return dict(
        kv_page_stride=args.kv_cache.stride(0),
        out_token_stride=out.strides[-3],
        out_head_stride=out.strides[-2],
        batch=shape.batch,
        heads=shape.heads,
        q_len=shape.q_len,
        rows=shape.rows,
        page=shape.page_size,
        **divisor("page", shape.page_size),
        num_splits=splits.number,
        split_size=splits.size if splits.number > 1 and not args.num_splits else 0,
        causal=int(args.causal),
        window_left=args.window_left,
        cp_interleave=args.cp_interleave,
        cp_period=cp_period,
        **divisor("cp_period", cp_period),
        cp_offset=args.cp_interleave * args.cp_rank,
        softmax_scale=max(abs(args.softmax_scale), MIN_SCALE),
    )


def decode_pointers(args: DecodeArgs, partials: bool) -> dict[str, Slot]:
    """All arguments, the results, and partials where there are some."""
    return {**present(args, DECODE_INPUTS), **OUTPUTS, **(PARTIALS if partials else NO_PARTIALS)}


def decode_mask_copies(args: DecodeArgs) -> list[Copy]:
    """The tree mask where the kernels, which take its words side by side, need a copy of it."""
    mask = args.tree_mask
    return [] if mask is None or mask.is_contiguous() else [Copy(DECODE_INPUTS["tree_mask"])]


def decode_out_is_apart(shape: Shape) -> bool:
    """Whether results need a temporary: 16-byte stores must reach every row, and one stride every next token."""
    out = shape.out
    return not out.in_whole_vectors or (not shape.ragged and out.strides[0] != shape.q_len * out.strides[1])


# sparse_decode

MAX_POOLS = 4  # groups of pool fields in the kernel's parameters
MAX_HEADS = MAX_ROW_TILES * 128
RECORDS = {
    ("dsv4", 512): "dsv4",
    ("v32", 576): "v32",
    ("v32_pow2", 576): "v32pow2",
    ("v32_nope", 512): "v32nope",
    ("v41", 512): "v41",
    ("v41_fp4", 512): "v41any",
    ("bf16", 512): "bf16x512",
    ("bf16", 576): "bf16x576",
}
"""(kv_format, values of a row) -> a kernel's name of the record; all pools of a launch have the same, or those that
`record_of` names together. An arch may have more."""
_POOL_POINTERS = {"cache": "kv_caches", "indices": "indices", "indptr": "indptrs", "lengths": "topk_lengths"}
_POOL_NUMBERS = (
    *("page_bytes", "index_stride", "slots", "page", "page_reciprocal", "page_shift", "topk", "tokens_per_length"),
)
_NO_POOLS = {f"{name}_{i}": 0 for i in range(MAX_POOLS) for name in _POOL_NUMBERS}
_NO_POOL_POINTERS = {f"{name}_{i}": None for i in range(MAX_POOLS) for name in _POOL_POINTERS}


def record_of(kv_formats: Sequence[str], width: int, records: Mapping[tuple[str, int], str] = RECORDS) -> str | None:
    """A kernel's name of the record of pools in these kv_formats; None when no kernel reads them together."""
    names = {records.get((kv_format, width)) for kv_format in kv_formats}
    # A power of two is a number: the kernel for any scale reads both.
    if names == {"v32", "v32pow2"}:
        return "v32"
    # The kernel of V4.1's pools of 288 bytes reads those of 528 beside them.
    if names == {"v41", "v41any"}:
        return "v41any"
    return names.pop() if len(names) == 1 else None


def _sparse_unsupported(problem: SparseDecodeProblem, records: Mapping[tuple[str, int], str]) -> Unsupported | None:
    """Why no kernel can take a problem; None when one may."""
    if problem.dtype != torch.bfloat16:
        return Unsupported(f"q is {problem.dtype}; it takes bfloat16")
    kv_formats = [pool.kv_format for pool in problem.pools]
    if record_of(kv_formats, problem.head_dim, records) is None:
        possible = ", ".join(f"{kv_format} ({width})" for kv_format, width in records)
        given = f"pools in {', '.join(kv_formats)} with rows of {problem.head_dim} values"
        return Unsupported(f"{given}; it takes {possible}")
    if problem.head_dim_v != 512:
        return Unsupported(f"head_dim_v {problem.head_dim_v}; it takes 512")
    if len(problem.pools) > MAX_POOLS:
        return Unsupported(f"{len(problem.pools)} pools; it takes 1 to {MAX_POOLS}")
    for i, pool in enumerate(problem.pools):
        if pool.alignment < 16:
            needed = "its address and block stride must be multiples of 16"
            return Unsupported(f"kv_caches[{i}] is aligned to {pool.alignment} bytes; {needed}")
    if not 1 <= problem.heads <= MAX_HEADS:
        return Unsupported(f"{problem.heads} heads; it takes 1 to {MAX_HEADS}")
    return None


def sparse_supports(
    problem: SparseDecodeProblem,
    arch: ArchSpec,
    config_for: Callable[[SparseDecodeProblem, ArchSpec], Any],
    records: Mapping[tuple[str, int], str] = RECORDS,
) -> Supported | Unsupported:
    """The instance that `config_for` gives for the problem, if it was built, and the combine behind it."""
    why = _sparse_unsupported(problem, records)
    if why is not None:
        return why
    config = config_for(problem, arch)
    answer = Supported(config, f"{config.record} records, tiles of {config.rows} rows for {problem.heads} heads")
    return missing(arch, config.instance, *combine.invariant_instances(arch, problem.head_dim_v)) or answer


def sparse_shape(args: SparseDecodeArgs, out: torch.Tensor) -> Shape:
    """The sizes of a call of sparse_decode. Rows that the kernels cannot reach are those of copies, not `aligned`."""
    queries, results = _token_rows(args.q), _token_rows(out)
    tokens, heads, _ = results.shape
    keys = sum([index.numel() for index in args.indices]) // max(tokens, 1)
    plan_words = 0 if args.plan is None else args.plan.shape[0]
    return Shape(queries, results, tokens, heads, 1, heads, False, 0, keys, plan_words)


def sparse_splits(args: SparseDecodeArgs, shape: Shape, own: Callable[[], int]) -> Splits:
    """Splits of each query token: those of the arguments, else the kernel's `own`."""
    if shape.plan_words:
        return Splits(1, 1, args.split_size)
    number = args.num_splits or (splits_by_size(args) if args.split_size else own())
    return Splits(number, number, args.split_size)


def sparse_numbers(args: SparseDecodeArgs, shape: Shape, splits: Splits) -> dict[str, int | float]:
    """The parameters that the sparse_decode kernels of every arch take."""
    lengths = args.topk_lengths or [None] * len(args.kv_caches)
    numbers: dict[str, int | float] = dict(_NO_POOLS)
    for i, pool in enumerate(zip(args.kv_caches, args.indices, lengths, strict=True)):
        for name, number in zip(_POOL_NUMBERS, _pool_numbers(args.q, *pool), strict=True):
            numbers[f"{name}_{i}"] = number
    return numbers | dict(
        pools=len(args.kv_caches),
        out_token_stride=shape.out.strides[0],
        out_head_stride=shape.out.strides[1],
        tokens=shape.batch,
        heads=shape.heads,
        num_splits=splits.number,
        split_size=splits.size if splits.number > 1 and not args.num_splits else 0,
        softmax_scale=max(abs(args.softmax_scale), MIN_SCALE),
    )


@lru_cache(maxsize=256)
def fp4_pools(kv_formats: tuple[str, ...]) -> int:
    """A bit for each pool whose values have 4 bits."""
    return sum(("e2m1" in get_kv_format(kv_format).encodings) << i for i, kv_format in enumerate(kv_formats))


def _pool_numbers(
    q: torch.Tensor, kv_cache: torch.Tensor, index: torch.Tensor, lengths: torch.Tensor | None
) -> tuple[int, ...]:
    """One pool's numbers, in the order of _POOL_NUMBERS."""
    pages, page, _ = kv_cache.shape
    per_sequence = lengths is not None and q.dim() == 4 and lengths.dim() == 1
    apart, (page_reciprocal, page_shift) = token_stride(index, 1), reciprocal(max(page, 1))
    topk = index.shape[-1]
    return (
        kv_cache.stride(0) * kv_cache.element_size(),
        topk if apart is None else apart,
        pages * page,
        page,
        page_reciprocal,
        page_shift,
        topk,
        q.shape[1] if per_sequence else 1,
    )


def sparse_pointers(args: SparseDecodeArgs, partials: bool) -> dict[str, Slot]:
    """All arguments but q, the results, and partials where there are some."""
    pointers: dict[str, Slot] = {
        "attn_sink": None if args.attn_sink is None else SPARSE_INPUTS["attn_sink"],
        "plan": None if args.plan is None else SPARSE_INPUTS["plan"],
        **OUTPUTS,
        **(PARTIALS if partials else NO_PARTIALS),
        **_NO_POOL_POINTERS,
    }
    for name, argument in _POOL_POINTERS.items():
        position = SPARSE_INPUTS[argument].position
        for i, tensor in enumerate(getattr(args, argument) or ()):
            if tensor is not None:
                pointers[f"{name}_{i}"] = Input(position, i)
    return pointers


def sparse_copies(args: SparseDecodeArgs) -> list[Copy]:
    """Selections that the kernels take as contiguous copies."""
    indices, lengths = SPARSE_INPUTS["indices"].position, SPARSE_INPUTS["topk_lengths"].position
    copies = [Copy(Input(indices, i)) for i, index in enumerate(args.indices) if token_stride(index, 1) is None]
    for i, tensor in enumerate(args.topk_lengths or ()):
        if tensor is not None and not tensor.is_contiguous():
            copies.append(Copy(Input(lengths, i)))
    return copies


def _token_rows(tensor: torch.Tensor) -> Rows:
    """[..., heads, width] as [tokens, heads, width]; not aligned where the tokens are not evenly apart."""
    apart = token_stride(tensor, 2)
    shape, strides = (prod(tensor.shape[:-2]), *tensor.shape[-2:]), (apart or 0, *tensor.stride()[-2:])
    return Rows(tensor.dtype, shape, strides, apart is not None and tensor.data_ptr() % 16 == 0)


def token_stride(tensor: torch.Tensor, kept: int) -> int | None:
    """Elements from each query token to the next, all dimensions before the last `kept`; None where they vary."""
    sizes, strides = tensor.shape[: tensor.dim() - kept], tensor.stride()[: tensor.dim() - kept]
    if not sizes:
        return 0  # ragged indices
    if len(sizes) == 1 or sizes[1] == 1:
        return strides[0]
    return strides[1] if sizes[0] == 1 or strides[0] == sizes[1] * strides[1] else None
