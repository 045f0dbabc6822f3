"""sparse_decode on sm_90: which instance, its shared memory, and its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from mla_suite.core.arch import Arch
from mla_suite.launch import tensor_map
from mla_suite.ops.decode import hopper
from mla_suite.ops.sparse_decode.config import record_of

WIDTHS = {"dsv4": 512, "v32": 576, "bf16x512": 512, "bf16x576": 576}
"""Record -> values of a row."""
STAGES = {"dsv4": 4, "v32": 4, "bf16x512": 5, "bf16x576": 5}
SLOTS = {"dsv4": (4, 2368), "v32": (4, 2624)}
"""Record that is not stored as it is multiplied -> slots of four tokens that a warp has, and bytes of one."""
LOADER_WARPS = 4
MAP = tuple(f"q_map_{word}" for word in range(tensor_map.WORDS))

# What a launch takes, in microseconds; only differences between split counts matter. Fitted to 44 times of 18 shapes on
# an H200 (csrc/sm_90/PERF.md), which the sum meets within 7 % on average.
STAGE_US = {1: 1.23, 2: 1.0}
"""Blocks that bring keys together -> 32 keys on one SM, with every SM busy."""
ITEM_US = (
    7.5  # of each further item of a block: its first keys are looked up, copied and dequantised before any product
)
PARTIAL_BYTES_PER_US = 1.8e6  # written and read


@dataclass(frozen=True)
class HopperSparseConfig:
    """One instance of csrc/sm_90/sparse_decode. Construction raises ValueError, in a sentence, if it is illegal.

    record   how a selected token is stored: a name of WIDTHS; v32 reads v32_pow2 too
    cluster  blocks that bring keys together, each a part of every stage for all: 1, or 2 of records to dequantise
    """

    arch: Arch = field(repr=False)
    record: str
    cluster: int = 1

    def __post_init__(self) -> None:
        if self.arch.name != "sm_90":
            self._refuse(f"{self.arch.name} is not sm_90")
        if self.record not in WIDTHS:
            self._refuse(f"records are {', '.join(WIDTHS)}")
        if self.cluster != 1 and (self.cluster != 2 or self.record not in SLOTS):
            self._refuse(f"{self.cluster} blocks share no keys; 2 do, of {', '.join(SLOTS)}")
        if self.lds > self.arch.lds_bytes:
            self._refuse(f"it needs {self.lds} bytes of shared memory of {self.arch.lds_bytes}")

    def _refuse(self, why: str) -> None:
        raise ValueError(f"sparse_decode: no kernel of {self.record} records on {self.arch.name}: {why}")

    @property
    def threads(self) -> int:
        return 512  # four warpgroups: one brings keys, one makes probabilities, two hold the result

    @property
    def lds(self) -> int:
        """Dynamic shared memory in bytes, as csrc/sm_90/sparse_decode/traits.hpp lays it out."""
        width, stages = WIDTHS[self.record], STAGES[self.record]
        slots, slot_bytes = SLOTS.get(self.record, (0, 0))
        notes = 528 + (128 if self.record == "dsv4" else 0)  # of a warp: its lists, its tokens' addresses
        present = 16 * self.cluster * stages  # bits of the keys that are there
        selected = present + LOADER_WARPS * (notes + slots * slot_bytes)
        block = hopper.block_bytes(width, stages, hopper.REGISTER_STEPS["selected"])
        return -(-block // 16) * 16 + selected

    @property
    def rows(self) -> int:
        """Query rows (heads of one token) that a block holds."""
        return hopper.ROWS

    @property
    def instance(self) -> str:
        return f"sparse_decode_kvformat-{self.record}_cluster-{self.cluster}"

    def tiles(self, heads: int) -> int:
        """Blocks that share the keys of one query token."""
        return -(-heads // hopper.ROWS)


def hopper_sparse_config(problem: Any, arch: Arch) -> HopperSparseConfig:
    """The instance for a problem; it depends on heads and kv_formats alone, so a batch-invariant call may use it."""
    found = record_of([pool.kv_format for pool in problem.pools], problem.head_dim)
    record = "v32" if found == "v32pow2" else found or "none"
    in_pairs = record in SLOTS and -(-problem.heads // hopper.ROWS) % 2 == 0
    return HopperSparseConfig(arch, record, 2 if in_pairs else 1)


@lru_cache(maxsize=4096)
def splits(config: HopperSparseConfig, tokens: int, heads: int, keys: int) -> int:
    """Cuts per query token of about `keys` keys where no number was asked for: what should take the least time."""
    tiles = config.tiles(heads)
    stages = max(1, -(-keys // hopper.KEYS))

    def microseconds(cuts: int) -> float:
        rounds = -(-tokens * cuts // hopper.workers(config.arch, tokens * cuts, tiles))
        spent = rounds * -(-stages // cuts) * STAGE_US[config.cluster] + (rounds - 1) * ITEM_US
        partials = tokens * heads * cuts * 2048 if cuts > 1 else 0
        return spent + partials / PARTIAL_BYTES_PER_US

    return hopper.least(config.arch, tokens * tiles, stages, microseconds)
