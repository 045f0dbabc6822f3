"""Tiles of attention in Triton, and those tuned for decode: what their table holds, and which row decides a problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mla_suite.archs import ArchSpec
from mla_suite.core import tuning
from mla_suite.core.tuning import Match, Value

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}
NEAR = 2  # a row decides shapes up to this factor larger or smaller than its own


class Tile(NamedTuple):
    """How much one program holds. Its warps share a [rows, 512] fp32 accumulator: rows x 16 / warps registers each."""

    rows: int
    keys: int
    warps: int
    stages: int


def refuse(table: str, values: Mapping[str, Value]) -> str | None:
    """Why a tile of a table cannot be compiled: Triton's sizes are powers of two."""
    for name in ("tile_rows", "tile_keys", "warps"):
        size = int(values[name])
        if size & (size - 1):
            return f"{name} is {size}; it must be a power of two"
    return None


FORMAT = tuning.Format(
    op="decode",
    exact=(
        tuning.Choice("q_dtype", tuple(DTYPES.values())),
        tuning.Choice("kv_format", ("bf16", "fp16", "fp32", "fp8")),
        tuning.Integer("head_dim_v", 16, 1024),
    ),
    near=(
        tuning.Integer("batch", 1, 1 << 20),
        tuning.Integer("rows", 1, 1 << 20),  # of a sequence: q_len x heads
        tuning.Integer("context", 1, 1 << 30),
    ),
    config=(
        tuning.Integer("tile_rows", 16, 256),
        tuning.Integer("tile_keys", 16, 256),
        tuning.Integer("warps", 1, 16),
        tuning.Integer("stages", 1, 8),
    ),
    refuse=refuse,
)


def table(arch: str) -> str:
    """Beside the tables of our own kernels, which are named by the arch alone."""
    return f"triton-{arch}"


def facts(problem: Any, arch: ArchSpec) -> Mapping[str, Value]:
    return dict(
        q_dtype=DTYPES[problem.q_dtype],
        kv_format=problem.kv_format,
        head_dim_v=problem.head_dim_v,
        batch=max(problem.batch, 1),
        rows=max(problem.heads * problem.q_len, 1),
        context=max(problem.context, 1),
    )


def find(problem: Any, arch: ArchSpec | None) -> Match | None:
    """The row for a problem, None where no row is near. Batch-invariant problems see none: they may not see batch."""
    if arch is None or problem.split_size > 0 or problem.q_dtype not in DTYPES:
        return None
    match = tuning.find(FORMAT, table(arch.name), facts(problem, arch))
    if match is None or any(theirs > NEAR * asked or asked > NEAR * theirs for _, asked, theirs in match.moved):
        return None
    return match
