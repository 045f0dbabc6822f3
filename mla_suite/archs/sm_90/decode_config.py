"""The instances of decode on sm_90: the legal points, and what each costs in threads and shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.sm_90.tile import BLOCK_M, BLOCK_N, P_BYTES, REGISTER_STEPS, block_bytes, swap_ab_bytes
from mla_suite.core.dispatch import Launch
from mla_suite.ops.decode import DecodeArgs

REDUCE_BYTES = 5 * 4 * BLOCK_M + 8 * (4 + 4 * 4)  # cluster_mode reduce_o: the statistics of both splits, and barriers
SENTINEL_BYTES = 16 + 4096  # streaming combine: one mbarrier and the pattern that the sentinels are filled from
EXCHANGE_STAGES = 4
RAW_STAGES = 2  # stages of keys as they are stored, which the producer of e4m3 rows copies ahead
# cluster_mode exchange_p: two stages of 256 columns of the other CTA's keys, two buffers of its P, the statistics of
# both splits, barriers, and the sentinel pattern of one row's half.
EXCHANGE_BYTES = 2 * BLOCK_N * 512 + 2 * P_BYTES + 5 * 4 * BLOCK_M + 8 * (2 + 2 * 2 + 2 * 2 + 2 * 4) + 16 + 1024
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
CLUSTER_MODES = ("none", "reduce_o", "reduce_last", "exchange_p")
WIDTHS = (576, 512)
ROPE = 64
ROTATED_KEY_BYTES = 2 * ROPE + 4 * ROPE  # beside an un-rotated key: what rounding its rope part leaves, and its angles


@dataclass(frozen=True)
class KvLoad:
    """One way in which keys come, and the instances that have it.

    dtypes         types of queries
    cluster_modes  width of a cached row -> its cluster modes
    stages         (width, most query rows of a CTA) -> stages of its ring of keys; with 'exchange_p' EXCHANGE_STAGES
    costs_as       width -> the kv_load whose times the cost model has (`Estimate`)
    by_box         the copy engine brings keys, 32 of one page at a time
    rotates        keys are un-rotated in the cache: 'rotated' in REGISTER_STEPS, and ROTATED_KEY_BYTES
    instance       its name, from the members of Sm90Config
    threads        of a CTA: four warpgroups of which one loads keys, one computes P and two hold the result; or three
                   of which one loads keys and two compute P and the result
    """

    dtypes: tuple[str, ...]
    cluster_modes: Mapping[int, tuple[str, ...]]
    stages: Mapping[tuple[int, int], int]
    costs_as: Mapping[int, str]
    instance: str = "decode_dtype-{dtype}_dqk-{width}_kvsource-{kv_load}_clustermode-{cluster_mode}"
    threads: int = 512
    by_box: bool = False
    rotates: bool = False


_ROTATED = "decode_rotated_dtype-{{dtype}}_dqk-{{width}}_kvsource-{}_clustermode-{{cluster_mode}}_rotate-1"
KV_LOADS = {
    "tma": KvLoad(
        dtypes=("bf16", "fp16"),
        cluster_modes=dict.fromkeys(WIDTHS, CLUSTER_MODES),
        stages={(576, BLOCK_M): 5, (512, BLOCK_M): 5},
        costs_as={576: "tma", 512: "tma"},
        by_box=True,
    ),
    "cp_async": KvLoad(
        dtypes=("bf16", "fp16"),
        cluster_modes=dict.fromkeys(WIDTHS, ("none",)),
        stages={(576, BLOCK_M): 5, (512, BLOCK_M): 5},
        costs_as={576: "cp_async", 512: "cp_async"},
    ),
    "fp8": KvLoad(  # beside five stages of 512 values there is no room for what a cluster needs
        dtypes=("bf16", "fp16", "fp8"),
        cluster_modes={576: ("none", "reduce_o"), 512: ("none",)},
        stages={(576, BLOCK_M): 4, (512, BLOCK_M): 5},
        costs_as={576: "fp8", 512: "cp_async"},
    ),
    "swap_ab": KvLoad(
        dtypes=("bf16", "fp16", "fp8"),
        cluster_modes={576: ("none",)},
        stages={(576, 16): 11, (576, 32): 9},
        costs_as={576: "fp8"},
        instance="swap_ab_decode_dtype-{dtype}_qrows-{q_rows}",
        threads=384,
    ),
    "tma_rotated": KvLoad(  # the warp that a streaming combine needs rotates, and a peer's keys find no room
        dtypes=("bf16", "fp16"),
        cluster_modes={576: ("none", "reduce_o", "reduce_last")},
        stages={(576, BLOCK_M): 4},
        costs_as={576: "tma_rotated"},
        instance=_ROTATED.format("tma"),
        by_box=True,
        rotates=True,
    ),
    "cp_async_rotated": KvLoad(
        dtypes=("bf16", "fp16"),
        cluster_modes={576: ("none",)},
        stages={(576, BLOCK_M): 4},
        costs_as={576: "cp_async"},
        instance=_ROTATED.format("cp_async"),
        rotates=True,
    ),
}
"""The ways in which keys come, by the values of `kv_load`.

tma       the copy engine brings 32 keys of one page at a time
cp_async  threads bring keys of any pages
fp8       keys of any pages are e4m3, which threads convert
swap_ab   the same, converted where they are multiplied, as the first operand (csrc/sm_90/decode/swap_ab), for few rows
tma_rotated, cp_async_rotated  as 'tma' and 'cp_async' bring them, then their rope parts are rotated in shared memory
"""


@dataclass(frozen=True)
class Sm90Config:
    """One instance of csrc/sm_90/decode. Construction raises ValueError, in a sentence, for an illegal point.

    dtype     type of queries; the result has it, too, or bf16 for fp8
    width     values of a cached row
    kv_load   how keys come, one of KV_LOADS; but for 'fp8' and 'swap_ab' they have the queries' type
    cluster_mode  each CTA of a cluster of two processes one split of a sequence, and the two write one result or
              partial: they reduce O ('reduce_o') or exchange P ('exchange_p') over DSMEM; with a plan they reduce O
              of their last work tiles where these are splits of one sequence ('reduce_last'); 'none' without a
              cluster
    q_rows    query rows of a CTA at most; fewer than 64 only with 'swap_ab'
    """

    arch: ArchSpec = field(repr=False)
    dtype: str
    width: int
    kv_load: str
    cluster_mode: str = "none"
    q_rows: int = BLOCK_M

    def __post_init__(self) -> None:
        if self.arch.name != "sm_90":
            self._raise(f"{self.arch.name} is not sm_90")
        self._check("kv_load", tuple(KV_LOADS))
        self._check("dtype", self.load.dtypes)
        self._check("width", tuple(self.load.cluster_modes))
        self._check("cluster_mode", self.load.cluster_modes[self.width])
        self._check("q_rows", tuple(rows for width, rows in self.load.stages if width == self.width))
        if self.lds > self.arch.lds_bytes:
            self._raise(f"it needs {self.lds} bytes of shared memory of {self.arch.lds_bytes}")

    def _check(self, name: str, possible: tuple[str | int, ...]) -> None:
        if getattr(self, name) not in possible:
            self._raise(f"{name} is one of {', '.join(map(str, possible))}")

    def _raise(self, why: str) -> None:
        point = f"dtype={self.dtype} width={self.width} kv_load={self.kv_load}"
        raise ValueError(f"decode: no kernel at {point} on {self.arch.name}: {why}")

    @property
    def load(self) -> KvLoad:
        return KV_LOADS[self.kv_load]

    @property
    def threads(self) -> int:
        return self.load.threads

    @property
    def stages(self) -> int:
        return EXCHANGE_STAGES if self.cluster_mode == "exchange_p" else self.load.stages[self.width, self.q_rows]

    @property
    def lds(self) -> int:
        """Dynamic shared memory in bytes, as csrc/sm_90/decode/shared_storage.hpp lays it out."""
        if self.kv_load == "swap_ab":
            return swap_ab_bytes(self.width, self.stages, self.q_rows)
        if self.load.rotates:
            rotated = block_bytes(self.width, self.stages, REGISTER_STEPS["rotated"], ROTATED_KEY_BYTES)
            return rotated + (0 if self.cluster_mode == "none" else REDUCE_BYTES) + 8 * self.stages
        alone = block_bytes(self.width, self.stages, REGISTER_STEPS[self.kv_load])
        reduced = dict.fromkeys(("reduce_o", "reduce_last"), REDUCE_BYTES)
        beside = {"none": SENTINEL_BYTES, "exchange_p": EXCHANGE_BYTES, **reduced}[self.cluster_mode]
        if self.kv_load == "fp8":
            cluster = 0 if self.cluster_mode == "none" else beside
            raw = RAW_STAGES * (BLOCK_N * self.width + 2 * 8)
            return -(-(alone + cluster) // 128) * 128 + raw
        return alone + (beside if self.kv_load == "tma" else 0)

    @property
    def instance(self) -> str:
        return self.load.instance.format_map(vars(self))

    @property
    def costs_as(self) -> str:
        """The kv_load whose times the cost model has."""
        return self.load.costs_as[self.width]

    @property
    def cluster_modes(self) -> tuple[str, ...]:
        """The modes that `clustered` takes."""
        return KV_LOADS[self.costs_as].cluster_modes[self.width]

    def clustered(self, cluster_mode: str) -> Sm90Config:
        """The instance with a cluster mode. One without clusters gives way to the one that it costs as."""
        if cluster_mode in self.load.cluster_modes[self.width]:
            return replace(self, cluster_mode=cluster_mode)
        return Sm90Config(self.arch, self.dtype, self.width, self.costs_as, cluster_mode)

    @property
    def box_blocks(self) -> int:
        """Blocks of 64 values of 32 keys that the copy engine brings at a time."""
        return 1 if self.cluster_mode == "exchange_p" or self.load.rotates else self.width // 64

    def tiles(self, rows: int) -> int:
        """CTAs that share the keys of one work tile."""
        return -(-rows // BLOCK_M)

    def notes(self, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> tuple[str, ...]:
        """Returns what `explain` says of a call: how its keys are split."""
        from mla_suite.archs.sm_90 import decode  # which imports this module

        return decode.notes(self, outputs, args)

    def prepare(self, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> Launch:
        """The launch of decode."""
        from mla_suite.archs.sm_90 import decode  # which imports this module

        return decode.prepare(self, outputs, args)
