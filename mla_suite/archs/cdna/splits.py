"""How many splits a sequence of decode has on CDNA where neither arguments nor a plan say it.

More splits shorten a workgroup's loop, and each brings a workgroup more whose queries and partials pass through memory:

    clocks(splits) = key * keys / splits                 of the loop
                     + partial * sequences * splits      queries, partials written, and read again by combine
                     + combine                           a second launch, where anything is split

The least of that lies at sqrt(key * keys / (partial * sequences)) splits. There are no more than saturate memory with
keys, no more than fill the device once, and at least MIN_SPLIT keys in each; as many as give each COARSE_SPLIT keys are
taken in any case, since a long context's loop overlaps with little else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, sqrt

from mla_suite.archs import ArchSpec

MIN_SPLIT = 64  # keys
COARSE_SPLIT = 256  # keys
LOOP_ROWS = (16, 64, 128)

Kind = tuple[str, str]
"""Types of queries and cache in the words of decode's tuned table, 16bit or fp8."""


@dataclass(frozen=True)
class LoopCosts:
    """Clocks and bytes of decode on one arch, as docs/amd_time_model.md models them.

    unit_bytes  that one compute unit draws from memory per clock, at most
    chip_bytes  that all of them together sustain per clock
    combine     clocks of a combine of few splits and its launch
    loop        (queries, cache) -> clocks of a workgroup's loop for a key of 576 values, with tiles of LOOP_ROWS
    """

    unit_bytes: float
    chip_bytes: float
    combine: float
    loop: Mapping[Kind, tuple[float, float, float]]

    def loop_clocks(self, kind: Kind, rows: int) -> float:
        """Clocks for a key with a tile of any rows, on a line between those of `loop`."""
        few, some, many = self.loop[kind]
        lowest, middle, highest = LOOP_ROWS
        if rows <= middle:
            return few + (some - few) * max(rows - lowest, 0) / (middle - lowest)
        return some + (many - some) * (rows - middle) / (highest - middle)


def default_splits(
    cost: LoopCosts,
    arch: ArchSpec,
    kind: Kind,
    rows: int,
    tiles: int,
    batch: int,
    keys: int,
    width: int = 576,
    head_dim_v: int = 512,
) -> int:
    """Splits of each of `batch` sequences of `keys` keys, which `tiles` workgroups of `rows` query rows share.

    `cost` is the arch's; `width` and `head_dim_v` are values of a cached row and of a row of results: a partial has the
    latter in fp32.
    """
    sequences = max(batch * tiles, 1)
    key_bytes = width * (1 if kind[1] == "fp8" else 2)
    key = max(key_bytes / cost.unit_bytes, cost.loop_clocks(kind, rows) * width / 576)
    partial = rows * (2 * 4 * head_dim_v + 2 * width) / cost.chip_bytes
    cheapest = round(sqrt(key * keys / (partial * sequences)))
    saturating = ceil(key * cost.chip_bytes / (key_bytes * sequences))
    once = arch.compute_units // sequences
    finer = min(once, keys // MIN_SPLIT, cheapest, saturating)
    splits = max(finer, min(once, keys // COARSE_SPLIT), 1)
    saved = key * (keys - keys / splits) - partial * sequences * (splits - 1)
    return splits if saved > cost.combine else 1
