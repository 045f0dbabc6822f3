"""What the launches of sparse_decode have in common on every arch: records, pools, queries and splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from mla_suite.archs import ArchSpec, combine
from mla_suite.archs.attention import (
    MAX_ROW_TILES,
    MIN_SCALE,
    NO_PARTIALS,
    PARTIALS,
    SPARSE_INPUTS,
    Rows,
    Shape,
    Splits,
    parts_notes,
)
from mla_suite.archs.combine import OUTPUTS
from mla_suite.build.params import reciprocal
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import get_kv_format
from mla_suite.launch import missing
from mla_suite.launch.spec import Copy, Input, Slot, present
from mla_suite.ops.decode import Q_FP8
from mla_suite.ops.sparse_decode import Problem as SparseDecodeProblem
from mla_suite.ops.sparse_decode import SparseDecodeArgs, splits_by_size

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
VALUES = {"bf16x160": 128}
"""Record of narrow rows -> the values of V, of which all others have 512."""
DESCALED = {"fp8x576": 576, "fp8x512": 512}
"""Record of bare rows of e4m3, for which a kernel takes descales -> bytes of one."""
_DESCALES = {name: SPARSE_INPUTS[name] for name in ("q_descale", "kv_descale")}
_POOL_POINTERS = {"cache": "kv_caches", "indices": "indices", "indptr": "indptrs", "lengths": "topk_lengths"}
_POOL_NUMBERS = (
    *("page_bytes", "index_stride", "slots", "page", "page_reciprocal", "page_shift", "topk", "tokens_per_length"),
)
_NO_POOLS = {f"{name}_{i}": 0 for i in range(MAX_POOLS) for name in _POOL_NUMBERS}
_NO_POOL_POINTERS = {f"{name}_{i}": None for i in range(MAX_POOLS) for name in _POOL_POINTERS}


def bare_rows(kv_format: str) -> dict[tuple[str, int], str]:
    """Further RECORDS: bare rows of e4m3 in the flavour of `kv_format`."""
    return {(kv_format, width): record for record, width in DESCALED.items()}


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


def _unsupported(problem: SparseDecodeProblem, records: Mapping[tuple[str, int], str]) -> Unsupported | None:
    """Why no kernel can take a problem; None when one may."""
    if problem.dtype != torch.bfloat16:
        return Unsupported(f"q is {problem.dtype}; it takes bfloat16")
    kv_formats = [pool.kv_format for pool in problem.pools]
    record = record_of(kv_formats, problem.head_dim, records)
    if record is None:
        possible = ", ".join(f"{kv_format} ({width})" for kv_format, width in records)
        given = f"pools in {', '.join(kv_formats)} with rows of {problem.head_dim} values"
        return Unsupported(f"{given}; it takes {possible}")
    if problem.head_dim_v != VALUES.get(record, 512):
        return Unsupported(f"head_dim_v {problem.head_dim_v}; it takes {VALUES.get(record, 512)} of {record} records")
    if len(problem.pools) > MAX_POOLS:
        return Unsupported(f"{len(problem.pools)} pools; it takes 1 to {MAX_POOLS}")
    for i, pool in enumerate(problem.pools):
        if pool.alignment < 16:
            needed = "its address and block stride must be multiples of 16"
            return Unsupported(f"kv_caches[{i}] is aligned to {pool.alignment} bytes; {needed}")
    if not 1 <= problem.heads <= MAX_HEADS:
        return Unsupported(f"{problem.heads} heads; it takes 1 to {MAX_HEADS}")
    return None


def supports(
    problem: SparseDecodeProblem,
    arch: ArchSpec,
    config_for: Callable[[SparseDecodeProblem, ArchSpec], Any],
    records: Mapping[tuple[str, int], str] = RECORDS,
) -> Supported | Unsupported:
    """The instance that `config_for` gives for the problem, if all that a call may launch was built.

    fp8 queries over bare rows come to it as bf16 ones, which hold them exactly.
    """
    if problem.dtype in Q_FP8:
        record = record_of([pool.kv_format for pool in problem.pools], problem.head_dim, records)
        problem = problem._replace(dtype=torch.bfloat16) if record in DESCALED else problem
    why = _unsupported(problem, records)
    if why is not None:
        return why
    config = config_for(problem, arch)
    answer = Supported(config, f"{config.record} records, tiles of {config.rows} rows for {problem.heads} heads")
    merges = combine.invariant_instances(arch, problem.head_dim_v)
    return missing(arch, *config.built_from(problem.heads), *merges) or answer


def shape_of(args: SparseDecodeArgs, out: torch.Tensor) -> Shape:
    """The sizes of a call of sparse_decode. Rows that the kernels cannot reach are those of copies, not `aligned`."""
    queries, results = _token_rows(args.q), _token_rows(out)
    q_rope = None if args.q_rope is None else _token_rows(args.q_rope)
    tokens, heads, _ = results.shape
    keys = sum([index.numel() for index in args.indices]) // max(tokens, 1)
    plan_words = 0 if args.plan is None else args.plan.shape[0]
    return Shape(queries, q_rope, results, tokens, heads, 1, heads, False, 0, keys, plan_words)


def queries(args: SparseDecodeArgs, shape: Shape, reached: bool) -> tuple[Shape, list[Copy], list[str]]:
    """The shape with the queries that the kernels take, their copy where that is another than those of the arguments,
    and what `explain` says of it. `reached` says that the kernels' loads reach every row."""
    fp8 = shape.q.dtype in Q_FP8
    if reached and args.softmax_scale >= 0 and not fp8:
        return shape, [], parts_notes(shape, read=True)
    copied = shape.q.copied(shape.q_rope)._replace(dtype=torch.bfloat16)
    beside = None if shape.q_rope is None else SPARSE_INPUTS["q_rope"]
    copy = Copy(SPARSE_INPUTS["q"], args.softmax_scale < 0, torch.bfloat16 if fp8 else None, beside)
    notes = ["queries are copied as bfloat16"] * fp8 + parts_notes(shape, read=False)
    return shape._replace(q=copied, q_rope=None), [copy], notes


def splits(args: SparseDecodeArgs, shape: Shape, own: Callable[[], int]) -> Splits:
    """Splits of each query token: those of the arguments, else the kernel's `own`."""
    if shape.plan_words:
        return Splits(1, 1, args.split_size)
    number = args.num_splits or (splits_by_size(args) if args.split_size else own())
    return Splits(number, number, args.split_size)


def numbers(args: SparseDecodeArgs, shape: Shape, splits: Splits) -> dict[str, int | float]:
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


def pointers(args: SparseDecodeArgs, partials: bool) -> dict[str, Slot]:
    """All arguments but q, the results, and partials where there are some."""
    pointers: dict[str, Slot] = {
        "attn_sink": None if args.attn_sink is None else SPARSE_INPUTS["attn_sink"],
        "plan": None if args.plan is None else SPARSE_INPUTS["plan"],
        **present(args, _DESCALES),
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


def copies(args: SparseDecodeArgs) -> list[Copy]:
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
