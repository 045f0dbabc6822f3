"""Named sets of shapes: the grids that others published, production shapes, and a quick one for machines without a GPU.

A case names an operator and one of its samples. Cases are cheap: tensors are made when a case is run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from mla_suite.core import register
from mla_suite.core.op import Sample
from mla_suite.errors import UsageError
from mla_suite.ops.append_kv.samples import sample as append_sample
from mla_suite.ops.combine.samples import sample as combine_sample
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.samples import sample as plan_sample
from mla_suite.ops.sparse_decode.samples import PoolShape
from mla_suite.ops.sparse_decode.samples import sample as sparse_sample


@dataclass(frozen=True)
class Case:
    """One shape of one operator.

    facts    numbers that plots and tables group by: batch, heads, q_len, kv_len (or splits)
    planned  decode with a balanced plan, made beforehand as serving makes it once per step
    parts    that the plan is balanced over; 0: as many as the device works on at a time
    lens     cached keys of each sequence, for decode
    options  what else the sample was made with
    of       makes the same problem for other lengths; None where that has no meaning
    """

    op: str
    sample: Sample
    facts: Mapping[str, int]
    planned: bool = False
    parts: int = 0
    lens: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    of: Callable[[Sequence[int]], Sample] | None = None

    def at(self, lens: Sequence[int]) -> Sample:
        """The same problem for other sequences, of these lengths (which sparse cases ignore)."""
        if self.of is None:
            raise UsageError(f"{self.id} is not made from lengths")
        return self.of(lens)

    @property
    def fp8_products(self) -> bool:
        """Whether queries and keys are both fp8, so that an fp8 matrix product is possible."""
        query = self.options.get("dtype", torch.bfloat16)
        return bool(query.itemsize == 1 and str(self.options.get("kv_format", "")).startswith("fp8"))

    @property
    def shape(self) -> str:
        return self.sample.name + ("-plan" if self.planned else "")

    @property
    def id(self) -> str:
        return f"{self.op}-{self.shape}"


@dataclass(frozen=True)
class NamedSet:
    """A set of shapes.

    source  who published them, or why they are here
    grid    whether `cases` takes other batches, contexts, heads, q_len and pages than the published ones
    """

    source: str
    cases: Callable[..., Sequence[Case]]
    grid: bool = False


def decode(batch: int, heads: int, kv_len: int, q_len: int = 1, *, planned: bool = False, **options: Any) -> Case:
    """All sequences equally long."""
    facts = dict(batch=batch, heads=heads, q_len=q_len, kv_len=kv_len)
    return _decode([kv_len] * batch, facts, planned, options)


def ragged(batch: int, heads: int, mean: int, q_len: int = 1, **options: Any) -> Case:
    """Lengths uniform in [q_len, 2 mean), from a fixed seed; kv_len is their mean."""
    lens = random.Random(mean).choices(range(q_len, 2 * mean), k=batch)
    case = _decode(lens, dict(batch=batch, heads=heads, q_len=q_len, kv_len=mean), True, options)
    made = case.sample
    named = Sample(made.name.replace(f"-kv{max(lens)}-", f"-kv~{mean}-"), made.make, made.bytes, made.flops)
    return replace(case, sample=named)


def _decode(lens: Sequence[int], facts: Mapping[str, int], planned: bool, options: Mapping[str, Any]) -> Case:
    def of(lens: Sequence[int]) -> Sample:
        return decode_sample(lens, heads=facts["heads"], q_len=facts["q_len"], **options)

    return Case("decode", of(lens), facts, planned, lens=tuple(lens), options=options, of=of)


def combine(batch: int, heads: int, splits: int) -> Case:
    return Case("combine", combine_sample(batch, heads, splits), dict(batch=batch, heads=heads, q_len=1, splits=splits))


def sparse(batch: int, heads: int, q_len: int, pools: Sequence[PoolShape], *, sink: bool = False) -> Case:
    made = sparse_sample(batch, q_len, heads, pools, sink=sink)
    facts = dict(batch=batch, heads=heads, q_len=q_len, kv_len=sum(pool.topk for pool in pools))

    def of(lens: Sequence[int]) -> Sample:
        """As many sequences, which select from the pages that one of them had."""
        own = [pool._replace(pages=-(-pool.pages // batch)) for pool in pools]
        return sparse_sample(len(lens), q_len, heads, own, sink=sink)

    return Case("sparse_decode", made, facts, options={"sink": sink}, of=of)


def _aiter_pr_3003(
    batches: Sequence[int] = (1, 3, 5, 16, 32, 64, 128, 256),
    contexts: Sequence[int] = (21, 64, 256, 512, 1200, 3200, 5200, 8192),
    heads: int = 32,
    q_len: int = 4,
    pages: Sequence[int] = (1,),
    **options: Any,
) -> list[Case]:
    shapes = [(b, kv, page) for page in pages for b in batches for kv in contexts]
    return [decode(b, heads, kv, q_len, page=page, planned=True, **options) for b, kv, page in shapes]


def _gpu_mode_2025() -> list[Case]:
    return [decode(128, 128, kv, planned=True) for kv in (512, 2048, 4096, 6144)]


def _gpu_mode_2025_layer() -> list[Case]:
    """The new token is cached before it is attended to; a page is the whole room of a sequence."""
    return [decode(128, 128, kv + 1, planned=True, rotate=True, page=8192) for kv in (512, 2048, 4096, 6144)]


def _mixed_mla(**options: Any) -> list[Case]:
    shapes = [(b, kv) for b in (4, 32, 64, 256) for kv in (1024, 8192)]
    return [decode(b, 16, kv, page=1, ragged_pages=True, planned=True, **options) for b, kv in shapes]


def _aiter_pr_3468() -> list[Case]:
    grid = [combine(tokens, 16, n) for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256) for n in (2, 4, 8, 16)]
    return grid + [combine(tokens, 8, n) for tokens in (1, 16, 256) for n in (2, 16)]


def _flash_mla() -> list[Case]:
    grid = [(128, 128, kv, 1) for kv in (512, 2048, 4096, 6144)]
    grid += [(b, 32, kv, 4) for b in (1, 8, 32, 128) for kv in (256, 512, 1200, 3200, 8192)]
    grid += [(b, 16, kv, 1) for b in (1, 32, 128) for kv in (1024, 4096, 8192)]
    grid += [(1, 128, 1024, 1), (1, 128, 8192, 1), (8, 128, 4096, 1), (8, 64, 4096, 1), (32, 64, 4096, 1)]
    grid += [(64, 128, 16384, 1), (64, 16, 16384, 1), (64, 64, 8192, 1), (128, 64, 4096, 1)]
    grid += [(32, 128, 4096, 2), (128, 128, 4096, 2), (128, 16, 4096, 2), (128, 16, 4096, 4)]
    grid += [(batch, heads, 4096, 1) for heads in OTHER_HEADS for batch in (8, 128)]
    uneven = [ragged(128, 128, 4096), ragged(128, 16, 4096), ragged(32, 32, 3200, 4), ragged(8, 16, 8192)]
    return [decode(*shape, planned=True) for shape in grid] + uneven


def _extend() -> list[Case]:
    lengths = [(16, tokens) for tokens in (64, 256, 512, 1024, 2048)] + [
        (128, tokens) for tokens in (64, 256, 512, 1024)
    ]
    return [decode(1, heads, behind + tokens, tokens) for behind in (0, 2048) for heads, tokens in lengths]


def _decode_merge() -> list[Case]:
    grid = [(1, rows, splits) for rows in (16, 64, 128) for splits in (16, 32, 64)]
    grid += [(8, heads, 8) for heads in OTHER_HEADS]
    return [combine(*shape) for shape in (*grid, (8, 64, 8), (8, 128, 8), (32, 64, 4), (32, 128, 2))]


OTHER_HEADS = (12, 20, 96)
"""Heads that are no power of two: those of Kimi K3, 96 or 12 a rank, and of GLM-4.7-Flash."""
SELECTED_FROM = 16384
"""Tokens per sequence that a sparse case selects from: few enough for memory, so many that selections rarely meet."""


def _v32() -> list[Case]:
    def pools(batch: int) -> list[PoolShape]:
        return [PoolShape("v32", batch * SELECTED_FROM // 64, 64, 2048)]

    grid = [(b, h, q) for h in (64, 128) for b in (1, 8, 32, 128) for q in (1, 2)]
    return [sparse(b, h, q, pools(b)) for b, h, q in (*grid, *((32, h, 1) for h in OTHER_HEADS))]


def _v4() -> list[Case]:
    def pools(batch: int, extra: int) -> list[PoolShape]:
        window = PoolShape("dsv4", batch * SELECTED_FROM // 256, 256, 128)
        return [window, PoolShape("dsv4", batch * SELECTED_FROM // 64, 64, extra)]

    models = ((64, 512), (128, 1024))  # heads and compressed keys of Flash and Pro
    grid = [(b, h, q, extra) for h, extra in models for b in (1, 8, 32, 128) for q in (1, 2)]
    grid += [(32, h, 1, 512) for h in (8, *OTHER_HEADS)]
    return [sparse(b, h, q, pools(b, extra), sink=True) for b, h, q, extra in grid]


def _quick() -> list[Case]:
    contexts = [decode(2, 16, kv) for kv in (64, 256, 1024)]
    wide = [decode(1, 128, 512), decode(4, 32, 256, 4), *(decode(2, heads, 256) for heads in OTHER_HEADS)]
    small = [PoolShape("v32", 16, 64, 256)]
    return [*contexts, *wide, combine(4, 16, 8), sparse(2, 16, 1, small)]


def _counted() -> list[Case]:
    fp8: dict[str, Any] = dict(kv_format="fp8", dtype=torch.float8_e4m3fn)
    fnuz: dict[str, Any] = dict(kv_format="fp8_fnuz", dtype=torch.float8_e4m3fnuz)
    dense = [
        decode(1, 16, 1024),
        decode(1, 128, 1024),
        decode(2, 32, 600, 4, page=1),
        decode(1, 64, 700, dtype=torch.float16, kv_format="fp16"),
    ]
    dense += [decode(1, 12, 400), decode(1, 20, 400), decode(1, 96, 400)]
    dense += [decode(1, 128, 400, rotate=True), decode(1, 16, 400, rotate=True)]
    dense += [replace(decode(3, 128, 700, planned=True), parts=4), replace(decode(3, 16, 700, planned=True), parts=4)]
    narrow = [decode(1, 16, 1024, kv_format="fp8"), decode(1, 128, 600, kv_format="fp8"), decode(1, 16, 960, **fp8)]
    narrow += [replace(decode(2, 32, 700, 4, page=1, planned=True, **fp8), parts=3)]
    narrow += [decode(1, 32, 700, 4, page=1, num_splits=1, **fp8)]  # fp8 weights, which a plan has for long tiles only
    narrow += [decode(1, 16, 1024, kv_format="fp8_fnuz"), decode(1, 128, 600, **fnuz)]
    selected = [sparse(1, heads, 1, [PoolShape("v32", 16, 64, 512)]) for heads in (16, 128)]
    selected += [sparse(1, 64, 2, [PoolShape("dsv4", 4, 64, 128), PoolShape("dsv4", 8, 64, 256)], sink=True)]
    others = [Case(op, made, {}) for op in ("plan", "append_kv") for made in register.get(op).samples()]
    return [*dense, *narrow, *selected, *(combine(*shape) for shape in ((4, 16, 8), (4, 16, 16), (64, 16, 4))), *others]


def _step() -> list[Case]:
    draw = random.Random(0)
    lens = {batch: [8192, *(draw.randint(1, 8192) for _ in range(batch - 1))] for batch in (1, 8, 32, 128, 512)}
    plans = [
        plan_sample(lens[batch], num_heads=rows, num_sm_parts=132, max_seqlen_kv=8192)
        for rows in (16, 128)
        for batch in lens
    ]
    appends = [append_sample(tokens, "bf16", rope=True) for tokens in (1, 128, 8192, 65536)]
    return [*(Case("plan", made, {}) for made in plans), *(Case("append_kv", made, {}) for made in appends)]


SETS: Mapping[str, NamedSet] = {
    "quick": NamedSet("a few small shapes of each attention operator; seconds on a CPU", _quick),
    "flashmla": NamedSet("dense decode, bf16, pages of 64: DeepSeek head counts over batch and context", _flash_mla),
    "aiter-3003": NamedSet(
        "AITER pull request 3003: fp8 queries and keys, 32 heads, 4 query tokens, pages of 1",
        partial(_aiter_pr_3003, kv_format="fp8", dtype=torch.float8_e4m3fn),
        grid=True,
    ),
    "aiter-3003-bf16": NamedSet("the same grid in bf16", _aiter_pr_3003, grid=True),
    "aiter-3468": NamedSet(
        "AITER pull request 3468, the reduce alone: tokens x splits at the 16 and 8 heads of Kimi K2.5 per rank; the "
        "pull request names the axes, not the list",
        _aiter_pr_3468,
    ),
    "extend": NamedSet(
        "prompts with absorbed weights: one sequence behind none and behind 2,048 cached tokens", _extend
    ),
    "decode-merge": NamedSet("what decode's splits leave to combine: sequences x query rows x splits", _decode_merge),
    "gpu-mode-2025": NamedSet("GPU MODE's decode task of 2025: the attention of its four sizes", _gpu_mode_2025),
    "gpu-mode-2025-layer": NamedSet(
        "the same inside the task's layer: un-rotated keys, 8192 rows per sequence, one token more",
        _gpu_mode_2025_layer,
    ),
    "mixed-mla": NamedSet("GPU MODE mixed-mla (2026): 16 heads, pages of 1 by indices, bf16 keys", _mixed_mla),
    "mixed-mla-fp8": NamedSet("the same eight shapes with fp8 keys", partial(_mixed_mla, kv_format="fp8")),
    "v3.2": NamedSet("DeepSeek V3.2 sparse decode: 2048 selected keys of 656 bytes", _v32),
    "v4": NamedSet("DeepSeek V4 sparse decode: a window of 128 keys beside 512 or 1024 compressed ones, sink", _v4),
    "step": NamedSet("plan and append_kv: what a decode step pays beside attention", _step),
    "counted": NamedSet("every kind of emulated kernel on a small problem: the stored baseline of counts", _counted),
}


def matching(cases: Mapping[str, Case], parts: Sequence[str] | None) -> list[Case]:
    """The cases whose name contains one of `parts`, or all of them. ValueError, with what there is, for no case."""
    wanted = [case for name, case in cases.items() if not parts or any(part in name for part in parts)]
    if not wanted:
        raise UsageError(f"no shape contains {' or '.join(parts or ())}; they are {', '.join(cases)}")
    return wanted


def named(name: str, op: str | None = None, **grid: Any) -> list[Case]:
    """The cases of a set, or those of one operator. ValueError, with what there is, for an unknown name or no case.

    grid  other batches, contexts, heads, q_len or pages, for a set that is a grid
    """
    if name not in SETS:
        raise UsageError(f"no set of shapes {name!r}; there are {', '.join(SETS)}")
    if grid and not SETS[name].grid:
        grids = " and ".join(entry for entry in SETS if SETS[entry].grid)
        raise UsageError(f"set {name!r} has fixed shapes, of which --shapes picks; other sizes are for {grids}")
    cases = [case for case in SETS[name].cases(**grid) if op in (None, case.op)]
    if not cases:
        ops = sorted({case.op for case in SETS[name].cases()})
        raise UsageError(f"set {name!r} has no case of {op!r}; it has {', '.join(ops)}")
    return cases
