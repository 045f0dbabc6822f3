"""The ways in which keys come to decode on sm_90, and the instances that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mla_suite.archs.attention import NARROW, WIDTHS
from mla_suite.archs.sm_90.tile import BLOCK_M

_TO_REDUCE = ("none", "reduce_o", "reduce_last")
CLUSTER_MODES = (*_TO_REDUCE, "exchange_p", "share_kv")


@dataclass(frozen=True)
class KvLoad:
    """One path by which keys are loaded, and the instances that have it.

    dtypes         types of queries
    cluster_modes  width of a cached row -> its cluster modes (`modes`)
    unmasked       those of them without windows and trees
    unpaired       types of queries without 'reduce_last', which would spill registers
    stages         (width, most query rows of a CTA) -> stages of its ring of keys; with 'exchange_p' EXCHANGE_STAGES
    cost_model_key width -> the kv_load whose times the cost model has (`Estimate`)
    by_box         the copy engine brings keys, 32 of one page at a time
    rotates        keys are un-rotated in the cache: 'rotated' in REGISTER_STEPS, and ROTATED_KEY_BYTES
    narrow         types of queries for rows of NARROW widths
    clusters_of    the kv_load whose instances run instead where a cluster is wanted
    instance       its name, from the members of Sm90Config
    threads        of a CTA: four warpgroups of which one loads keys, one computes P and two hold the result; or three
                   of which one loads keys and two compute P and the result
    """

    dtypes: tuple[str, ...]
    cluster_modes: Mapping[int, tuple[str, ...]]
    stages: Mapping[tuple[int, int], int]
    cost_model_key: Mapping[int, str]
    unmasked: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()
    clusters_of: str = ""
    instance: str = "decode_dtype-{dtype}_dqk-{width}_kvsource-{kv_load}_clustermode-{cluster_mode}"
    narrow: tuple[str, ...] = ()
    threads: int = 512
    by_box: bool = False
    rotates: bool = False

    def modes(self, width: int, dtype: str, masked: bool) -> tuple[str, ...]:
        """The cluster modes of rows of `width` values and queries of `dtype`, with windows and trees if `masked`."""
        without = (self.unmasked if masked else ()) + (("reduce_last",) if dtype in self.unpaired else ())
        return tuple(mode for mode in self.cluster_modes[width] if mode not in without)


_ROTATED = "decode_rotated_dtype-{{dtype}}_dqk-{{width}}_kvsource-{}_clustermode-{{cluster_mode}}_rotate-1"
_NARROW_STAGES = {(width, BLOCK_M): 9 if width > 192 else 15 for width in NARROW}
_NARROW_COSTS = dict.fromkeys(NARROW, "cp_async")  # the loads of the cost model that have no clusters
KV_LOADS = {
    "tma": KvLoad(
        dtypes=("bf16", "fp16"),
        cluster_modes=dict.fromkeys(WIDTHS, CLUSTER_MODES) | dict.fromkeys(NARROW, ("none",)),
        stages={(576, BLOCK_M): 5, (512, BLOCK_M): 5} | _NARROW_STAGES,
        cost_model_key={576: "tma", 512: "tma"} | _NARROW_COSTS,
        narrow=("bf16",),
        by_box=True,
    ),
    "cp_async": KvLoad(
        dtypes=("bf16", "fp16"),
        cluster_modes=dict.fromkeys(WIDTHS, ("none",)),
        stages={(576, BLOCK_M): 5, (512, BLOCK_M): 5} | _NARROW_STAGES,
        cost_model_key=dict.fromkeys(WIDTHS, "cp_async"),
        narrow=("bf16",),
    ),
    "fp8": KvLoad(  # beside five stages of 512 values there is no room for what a cluster needs
        dtypes=("bf16", "fp16", "fp8"),
        cluster_modes={576: _TO_REDUCE, 512: ("none",)} | dict.fromkeys(NARROW, ("none",)),
        unmasked=("reduce_last",),
        unpaired=("fp8",),
        stages={(576, BLOCK_M): 4, (512, BLOCK_M): 5} | {(width, BLOCK_M): 5 for width in NARROW},
        cost_model_key={576: "fp8", 512: "cp_async"} | _NARROW_COSTS,
        narrow=("bf16", "fp8"),
    ),
    "fp8_scores": KvLoad(
        dtypes=("fp8",),
        cluster_modes={576: _TO_REDUCE},
        stages={(576, BLOCK_M): 4},
        cost_model_key={576: "fp8_scores"},
        by_box=True,
    ),
    "swap_ab": KvLoad(
        dtypes=("bf16", "fp16", "fp8"),
        cluster_modes={576: ("none",)},
        stages={(576, 16): 11, (576, 32): 9},
        cost_model_key={576: "swap_ab"},
        clusters_of="fp8",
        instance="swap_ab_decode_dtype-{dtype}_qrows-{q_rows}",
        threads=384,
    ),
    "tma_rotated": KvLoad(  # the warp that a streaming combine needs rotates, and a peer's keys find no room
        dtypes=("bf16", "fp16"),
        cluster_modes={576: _TO_REDUCE},
        stages={(576, BLOCK_M): 4},
        cost_model_key={576: "tma_rotated"},
        instance=_ROTATED.format("tma"),
        by_box=True,
        rotates=True,
    ),
    "cp_async_rotated": KvLoad(
        dtypes=("bf16", "fp16"),
        cluster_modes={576: ("none",)},
        stages={(576, BLOCK_M): 4},
        cost_model_key={576: "cp_async"},
        instance=_ROTATED.format("cp_async"),
        rotates=True,
    ),
}
"""The ways in which keys come, by the values of `kv_load`.

tma       the copy engine brings 32 keys of one page at a time
cp_async  threads bring keys of any pages
fp8       keys of any pages are e4m3, which threads convert
fp8_scores  the copy engine brings 32 e4m3 keys of one page at a time; Q K^T multiplies them as they are stored, and
          threads convert their values
swap_ab   the same, converted where they are multiplied, as the first operand (csrc/sm_90/decode/swap_ab), for few rows
tma_rotated, cp_async_rotated  as 'tma' and 'cp_async' bring them, then their rope parts are rotated in shared memory
"""
