"""The search space of decode: the tile of its Triton kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from mla_suite.archs import ArchSpec
from mla_suite.core.tuning import SearchSpace, Value
from mla_suite.ops.decode import triton_config
from mla_suite.ops.decode.triton_config import Tile

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
    size = ELEMENT[triton_config.DTYPES[problem.q_dtype]]
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


SPACES = {"triton": SearchSpace(candidates, triton_config.FORMAT, triton_config.table, triton_config.facts, cells)}
