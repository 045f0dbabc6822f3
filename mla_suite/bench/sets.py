"""Named sets of shapes: the grids that others published, production shapes, and a quick one for machines without a GPU.

A case names an operator and one of its samples. Cases are cheap: tensors are made when a case is run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mla_suite.core.op import Sample
from mla_suite.ops.combine.samples import sample as combine_sample
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.sparse_decode.samples import PoolShape
from mla_suite.ops.sparse_decode.samples import sample as sparse_sample


@dataclass(frozen=True)
class Case:
    """One shape of one operator.

    facts    numbers that plots and tables group by: batch, heads, q_len, kv_len (or splits)
    planned  decode with a balanced plan for all compute units, made beforehand as serving makes it once per step
    """

    op: str
    sample: Sample
    facts: Mapping[str, int]
    planned: bool = False

    @property
    def shape(self) -> str:
        return self.sample.name + ("-plan" if self.planned else "")

    @property
    def id(self) -> str:
        return f"{self.op}-{self.shape}"


@dataclass(frozen=True)
class NamedSet:
    """`source` says who published the shapes, or why they are here."""

    source: str
    cases: Callable[[], Sequence[Case]]


def decode(batch: int, heads: int, kv_len: int, q_len: int = 1, *, planned: bool = False, **options: Any) -> Case:
    """All sequences equally long."""
    made = decode_sample([kv_len] * batch, heads=heads, q_len=q_len, **options)
    return Case("decode", made, dict(batch=batch, heads=heads, q_len=q_len, kv_len=kv_len), planned)


def ragged(batch: int, heads: int, mean: int, q_len: int = 1, **options: Any) -> Case:
    """Lengths uniform in [q_len, 2 mean), from a fixed seed; kv_len is their mean."""
    lens = random.Random(mean).choices(range(q_len, 2 * mean), k=batch)
    made = decode_sample(lens, heads=heads, q_len=q_len, **options)
    named = Sample(made.name.replace(f"-kv{max(lens)}-", f"-kv~{mean}-"), made.make, made.bytes, made.flops)
    return Case("decode", named, dict(batch=batch, heads=heads, q_len=q_len, kv_len=mean), planned=True)


def combine(batch: int, heads: int, splits: int) -> Case:
    return Case("combine", combine_sample(batch, heads, splits), dict(batch=batch, heads=heads, q_len=1, splits=splits))


def sparse(batch: int, heads: int, q_len: int, pools: Sequence[PoolShape], *, sink: bool = False) -> Case:
    made = sparse_sample(batch, q_len, heads, pools, sink=sink)
    keys = sum(pool.topk for pool in pools)
    return Case("sparse_decode", made, dict(batch=batch, heads=heads, q_len=q_len, kv_len=keys))


def _aiter_pr_3003(**options: Any) -> list[Case]:
    batches, contexts = (1, 3, 5, 16, 32, 64, 128, 256), (21, 64, 256, 512, 1200, 3200, 5200, 8192)
    return [decode(b, 32, kv, 4, page=1, planned=True, **options) for b in batches for kv in contexts]


def _gpu_mode_2025() -> list[Case]:
    return [decode(128, 128, kv, planned=True) for kv in (512, 2048, 4096, 6144)]


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
    uneven = [ragged(128, 128, 4096), ragged(128, 16, 4096), ragged(32, 32, 3200, 4), ragged(8, 16, 8192)]
    return [decode(*shape, planned=True) for shape in grid] + uneven


def _decode_merge() -> list[Case]:
    grid = [(1, rows, splits) for rows in (16, 64, 128) for splits in (16, 32, 64)]
    return [combine(*shape) for shape in (*grid, (8, 64, 8), (8, 128, 8), (32, 64, 4), (32, 128, 2))]


SELECTED_FROM = 16384
"""Tokens per sequence that a sparse case selects from: few enough for memory, so many that selections rarely meet."""


def _v32() -> list[Case]:
    def pools(batch: int) -> list[PoolShape]:
        return [PoolShape("v32", batch * SELECTED_FROM // 64, 64, 2048)]

    return [sparse(b, h, q, pools(b)) for h in (64, 128) for b in (1, 8, 32, 128) for q in (1, 2)]


def _v4() -> list[Case]:
    def pools(batch: int, extra: int) -> list[PoolShape]:
        window = PoolShape("dsv4", batch * SELECTED_FROM // 256, 256, 128)
        return [window, PoolShape("dsv4", batch * SELECTED_FROM // 64, 64, extra)]

    models = ((64, 512), (128, 1024))  # heads and compressed keys of Flash and Pro
    return [sparse(b, h, q, pools(b, extra), sink=True) for h, extra in models for b in (1, 8, 32, 128) for q in (1, 2)]


def _quick() -> list[Case]:
    contexts = [decode(2, 16, kv) for kv in (64, 256, 1024)]
    wide = [decode(1, 128, 512), decode(4, 32, 256, 4)]
    small = [PoolShape("v32", 16, 64, 256)]
    return [*contexts, *wide, combine(4, 16, 8), sparse(2, 16, 1, small)]


SETS: Mapping[str, NamedSet] = {
    "quick": NamedSet("a few small shapes of each attention operator; seconds on a CPU", _quick),
    "flashmla": NamedSet("dense decode, bf16, pages of 64: DeepSeek head counts over batch and context", _flash_mla),
    "aiter-3003": NamedSet(
        "AITER pull request 3003: fp8 queries and keys, 32 heads, 4 query tokens, pages of 1",
        partial(_aiter_pr_3003, kv_format="fp8", dtype=torch.float8_e4m3fn),
    ),
    "aiter-3003-bf16": NamedSet("the same grid in bf16", _aiter_pr_3003),
    "aiter-3468": NamedSet(
        "AITER pull request 3468, the reduce alone: tokens x splits at the 16 and 8 heads of Kimi K2.5 per rank; the "
        "pull request names the axes, not the list",
        _aiter_pr_3468,
    ),
    "decode-merge": NamedSet("what decode's cuts leave to combine: sequences x query rows x splits", _decode_merge),
    "gpu-mode-2025": NamedSet("GPU MODE amd-mla-decode: the attention of its four sizes", _gpu_mode_2025),
    "mixed-mla": NamedSet("GPU MODE mixed-mla (2026): 16 heads, pages of 1 by indices, bf16 keys", _mixed_mla),
    "mixed-mla-fp8": NamedSet("the same eight shapes with fp8 keys", partial(_mixed_mla, kv_format="fp8")),
    "v3.2": NamedSet("DeepSeek V3.2 sparse decode: 2048 selected keys of 656 bytes", _v32),
    "v4": NamedSet("DeepSeek V4 sparse decode: a window of 128 keys beside 512 or 1024 compressed ones, sink", _v4),
}


def matching(cases: Mapping[str, Case], parts: Sequence[str] | None) -> list[Case]:
    """The cases whose shape contains one of `parts`, or all of them. ValueError, with what there is, for no case."""
    wanted = [case for case in cases.values() if not parts or any(part in case.shape for part in parts)]
    if not wanted:
        raise ValueError(f"no shape contains {' or '.join(parts or ())}; they are {', '.join(cases)}")
    return wanted


def named(name: str, op: str | None = None) -> list[Case]:
    """The cases of a set, or those of one operator. ValueError, with what there is, for an unknown name or no case."""
    if name not in SETS:
        raise ValueError(f"no set of shapes {name!r}; there are {', '.join(SETS)}")
    cases = [case for case in SETS[name].cases() if op in (None, case.op)]
    if not cases:
        ops = sorted({case.op for case in SETS[name].cases()})
        raise ValueError(f"set {name!r} has no case of {op!r}; it has {', '.join(ops)}")
    return cases
