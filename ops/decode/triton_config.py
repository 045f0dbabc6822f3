"""Tiles of attention in Triton, and those tuned for decode: what their table holds, and which row decides a problem."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from mla_suite.archs import ArchSpec
from mla_suite.core import tuning
from mla_suite.core.tuning import Match, SearchSpace, Value

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
    return match if match is not None and match.within(NEAR) else None


# The search space

LANE_REGISTERS = 128  # for the accumulator: half of what a lane may name
ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}  # bytes in shared memory: fp8 is widened before the product
STAGES = {False: (1, 2, 3), True: (1, 2, 3, 5)}
"""Whether copies bypass registers -> stages of the pipeline."""


def candidates(problem: Any, arch: ArchSpec) -> Iterator[Tile]:
    """Tiles whose rows are not mostly padding, whose accumulator fits the registers and whose keys fit the LDS.

    How many stages share it is Triton's affair: on an H200 five of 64 keys take 164 KiB, not 360. What does not fit
    after all is refused when it is launched.
    """
    rows = max(problem.heads * problem.q_len, 1)
    size = ELEMENT[DTYPES[problem.q_dtype]]
    sizes = itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), STAGES[arch.async_copies])
    for tile_rows, keys, warps, stages in sizes:
        padded = tile_rows > 16 and tile_rows >= 2 * rows
        registers = tile_rows * problem.head_dim_v // (warps * arch.wavefront)
        held = min(stages, 2) if arch.async_copies else stages
        lds = (tile_rows + held * keys) * problem.head_dim * size
        if not padded and registers <= LANE_REGISTERS and lds <= arch.lds_bytes:
            yield Tile(tile_rows, keys, warps, stages)


def cells(problem: Any, arch: ArchSpec, tile: Tile) -> Mapping[str, Value]:
    return dict(tile_rows=tile.rows, tile_keys=tile.keys, warps=tile.warps, stages=tile.stages)


SPACES = {"triton": SearchSpace(candidates, FORMAT, table, facts, cells)}
