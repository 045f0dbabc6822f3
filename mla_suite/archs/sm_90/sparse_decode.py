"""sparse_decode on sm_90: which instance, how many splits, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch

from mla_suite.archs import ArchSpec, sparse_attention
from mla_suite.archs import combine as combine_kernels
from mla_suite.archs.attention import SPARSE_INPUTS, call_of, combined
from mla_suite.archs.combine import OUTPUTS
from mla_suite.archs.sm_90 import combine, sparse_splits, tensor_maps
from mla_suite.archs.sm_90.tile import (
    BLOCK_M,
    OUT_BYTES,
    REDUCE_BYTES,
    REDUCE_FOUR_BYTES,
    REGISTER_STEPS,
    block_bytes,
    few_heads_bytes,
    groups_of,
    sparse_swap_ab_bytes,
)
from mla_suite.archs.sparse_attention import DESCALED, VALUES
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import get_kv_format
from mla_suite.launch.spec import CallSpec, LaunchSpec, Output, Temporary
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.sparse_decode import Problem, SparseDecodeArgs

RECORDS = sparse_attention.RECORDS | {
    ("v41_interleaved", 512): "v41",
    ("v41_vllm", 512): "v41",
    ("v41_fp4_interleaved", 512): "v41any",
    ("bf16", 160): "bf16x160",
    **sparse_attention.bare_rows("fp8"),
}
"""As `archs.sparse_attention.RECORDS`."""
WIDTHS = {
    "dsv4": 512,
    "v32": 576,
    "v32nope": 512,
    "v41": 512,
    "v41any": 512,
    "bf16x512": 512,
    "bf16x576": 576,
    "bf16x160": 160,
} | DESCALED
"""Record -> values of a row."""
SLOTS = {"dsv4": (4, 2368), "v32": (4, 2624), "v32nope": (4, 2112), "v41": (4, 2112), "v41any": (4, 2112)} | {
    record: (4, 4 * width) for record, width in DESCALED.items()
}
"""Record that is dequantised before it is multiplied -> slots of four tokens that a warp has, and bytes of one."""
SCALES_APART = ("dsv4", "v41", "v41any")
STAGES = {record: 4 if record in SLOTS else 5 for record in WIDTHS} | {"bf16x160": 14}
REDUCED = ("dsv4", "v32", "v32nope", "v41", "v41any", "bf16x512", "bf16x576")
REDUCED_SPLITS = {"reduce_o": 2, "share_and_reduce": 2, "reduce_four": 4}
"""Cluster mode -> the splits whose results the blocks of a cluster add."""
CLUSTERED = {
    "none": tuple(WIDTHS),
    "share_kv": tuple(SLOTS),
    "reduce_o": REDUCED,
    "share_and_reduce": tuple([record for record in REDUCED if record in SLOTS]),
    "reduce_four": REDUCED,
}
"""What the blocks of a cluster share -> the records that there are kernels of."""
GPCS = 8  # parts of a chip whose SMs may be in one cluster, of every chip of this arch at most
REDUCING = {"none": ("reduce_o", "reduce_four"), "share_kv": ("share_and_reduce", "reduce_o", "reduce_four")}
"""Cluster mode -> those that may take its place and add the results of splits."""
LOADER_WARPS = 4
MAX_LOGITS_BYTES = 1024  # of shared memory, where gathered rows may return them
SWAP_AB = {16: (3, 14), 32: (2, 12)}
"""Most heads of a kernel with keys as the first operand -> its warpgroups that multiply, and stages of 16 records."""
TOKEN_BYTES = {"v32": 656}
"""Record that such a kernel reads -> bytes of one."""

FEW_HEADS = {"dsv4": 3, "v32": 2, "v41": 4, "v41any": 4}
"""Record that the kernel for few heads reads -> slots of four tokens that a warp has which dequantises."""
FEW_ROWS = 16  # the most heads of that kernel
FEW_WARPS = 8  # its warps that dequantise


@dataclass(frozen=True)
class Sm90SparseConfig:
    """One instance of csrc/sm_90/sparse_decode. Construction raises ValueError, in a sentence, if it is illegal.

    record   how a selected token is stored: a name of WIDTHS; v32 reads v32_pow2 too, v41any pools of V4.1's both sizes
    cluster_mode  what the blocks of a cluster share (csrc/sm_90/decode/cluster): 'share_kv', where two row tiles bring
             half of every stage each for both, of records to dequantise; 'reduce_o', where two blocks have a split of
             the token's keys each, of REDUCED; 'share_and_reduce', both at once; 'reduce_four', where four blocks have
             a split each; or 'none'
    q_rows   query rows (heads of one token) that a block holds at most; fewer than 64 are a key of SWAP_AB, where keys
             are the first operand (csrc/sm_90/sparse_decode/swap_ab)
    few_heads  keys are the first operand and dequantised once (csrc/sm_90/sparse_decode/few_heads); at most 16 rows
    max_logits  returns the largest scores too, of rows that are not dequantised; alone
    """

    arch: ArchSpec = field(repr=False)
    record: str
    cluster_mode: str = "none"
    q_rows: int = BLOCK_M
    few_heads: bool = False
    max_logits: bool = False

    def __post_init__(self) -> None:
        if self.arch.name != "sm_90":
            self._raise(f"{self.arch.name} is not sm_90")
        if self.record not in WIDTHS:
            self._raise(f"records are {', '.join(WIDTHS)}")
        if self.record not in CLUSTERED.get(self.cluster_mode, ()):
            possible = "; ".join(f"{mode} of {', '.join(records)}" for mode, records in CLUSTERED.items())
            self._raise(f"its cluster_mode is {self.cluster_mode}; there are {possible}")
        clustered = self.cluster_mode != "none"
        if self.q_rows not in (BLOCK_M, *SWAP_AB):
            self._raise(f"blocks have at most {', '.join(map(str, (*SWAP_AB, BLOCK_M)))} query rows, not {self.q_rows}")
        if self.few_heads and (self.record not in FEW_HEADS or clustered or self.q_rows != FEW_ROWS):
            self._raise(f"a kernel for few heads has {FEW_ROWS} rows of {', '.join(FEW_HEADS)} records, alone")
        if self.swaps and (self.record not in TOKEN_BYTES or clustered):
            self._raise(f"blocks of {self.q_rows} query rows take {', '.join(TOKEN_BYTES)} records, alone")
        if self.max_logits and (self.record in SLOTS or clustered or self.q_rows != BLOCK_M):
            self._raise("max_logits are returned of rows that are not dequantised, by blocks alone")
        if self.lds > self.arch.lds_bytes:
            self._raise(f"it needs {self.lds} bytes of shared memory of {self.arch.lds_bytes}")

    def _raise(self, why: str) -> None:
        raise ValueError(f"sparse_decode: no kernel of {self.record} records on {self.arch.name}: {why}")

    @property
    def swaps(self) -> bool:
        """Whether keys are the first operand."""
        return self.q_rows != BLOCK_M and not self.few_heads

    @property
    def reduced_splits(self) -> int:
        """The splits whose results, O, a cluster adds; 1 where it adds none."""
        return REDUCED_SPLITS.get(self.cluster_mode, 1)

    @cached_property
    def reducing(self) -> tuple[Sm90SparseConfig, ...]:
        """The instances for the same calls whose clusters reduce O."""
        if self.few_heads:
            return Sm90SparseConfig(self.arch, self.record).reducing
        if self.record not in REDUCED or self.q_rows != BLOCK_M or self.max_logits:
            return ()
        return tuple([replace(self, cluster_mode=mode) for mode in REDUCING.get(self.cluster_mode, ())])

    @property
    def clustered_blocks(self) -> int:
        """Blocks that can run at once in clusters that reduce O. A cluster of four takes two TPCs of one GPC, of two
        SMs each, and every GPC may have one TPC left over."""
        sms = self.arch.compute_units
        return sms // 2 * 2 if self.cluster_mode == "reduce_o" else (sms // 2 - GPCS) // 2 * 4

    @property
    def threads(self) -> int:
        if self.few_heads:
            return 32 * FEW_WARPS + 128  # eight warps dequantise, a warpgroup multiplies
        if self.swaps:
            return 128 * (1 + SWAP_AB[self.q_rows][0])  # a warpgroup loads keys, the others compute P and the result
        return 512  # four warpgroups: one loads keys, one computes P, two hold the result

    @property
    def lds(self) -> int:
        """Dynamic shared memory in bytes, as csrc/sm_90/sparse_decode/traits.hpp or swap_ab's lays it out."""
        if self.swaps:
            groups, stages = SWAP_AB[self.q_rows]
            return sparse_swap_ab_bytes(WIDTHS[self.record], TOKEN_BYTES[self.record], stages, groups, self.q_rows)
        width, stages = WIDTHS[self.record], STAGES[self.record]
        slots, slot_bytes = SLOTS.get(self.record, (0, 0))
        notes = 528 + (128 if self.record in SCALES_APART else 0)  # a warp's lists and the addresses of its tokens
        if self.few_heads:
            return few_heads_bytes(width, slot_bytes, FEW_HEADS[self.record], notes, FEW_WARPS)
        loading = 2 if self.cluster_mode.startswith("share") else 1  # blocks that bring keys
        present = 16 * loading * stages  # bits of the keys that are there
        selected = present + LOADER_WARPS * (notes + slots * slot_bytes)
        selected += MAX_LOGITS_BYTES if self.max_logits else 0
        come = "selected" if self.record in SLOTS else "gathered" if self.reduced_splits == 1 else "merged"
        block = block_bytes(width, stages, REGISTER_STEPS[come])
        block += {1: 0, 2: REDUCE_BYTES, 4: REDUCE_BYTES + REDUCE_FOUR_BYTES}[self.reduced_splits]
        if self.record in VALUES:
            block = -(-block // 128) * 128 + OUT_BYTES
        return -(-block // 16) * 16 + selected

    @property
    def returns_max_logits(self) -> bool:
        """Whether `spec` takes a third output [tokens, heads], fp32 and -inf, which the instance with `max_logits`
        raises to the largest scaled scores."""
        return self.record not in SLOTS

    @property
    def rows(self) -> int:
        """Query rows (heads of one token) that a block holds."""
        return self.q_rows

    @property
    def instance(self) -> str:
        if self.few_heads:
            return f"few_heads_sparse_decode_kvformat-{self.record}"
        if self.swaps:
            return f"swap_ab_sparse_decode_kvformat-{self.record}_qrows-{self.q_rows}"
        more = "_maxlogits-1" if self.max_logits else ""
        return f"sparse_decode_kvformat-{self.record}_clustermode-{self.cluster_mode}{more}"

    def built_from(self, heads: int) -> tuple[str, ...]:
        """Names of the instances that calls of so many heads may launch."""
        swapped = self.keys_first(heads)
        others = [swapped] if swapped else [replace(self, max_logits=True)] if self.returns_max_logits else []
        return tuple([config.instance for config in (self, *self.reducing, *others)])

    def few_heads_serve(self, heads: int) -> bool:
        """Whether there is a kernel for so few heads."""
        return heads <= FEW_ROWS and self.record in FEW_HEADS

    def keys_first(self, heads: int) -> Sm90SparseConfig | None:
        """The instance with keys as the first operand for so many heads, if there is one."""
        q_rows = next((rows for rows in SWAP_AB if heads <= rows), None)
        if q_rows is None or self.record not in TOKEN_BYTES:
            return None
        return replace(self, q_rows=q_rows, few_heads=False)

    def tiles(self, heads: int) -> int:
        """Blocks that share the keys of one query token."""
        return -(-heads // self.q_rows)

    def spec(self, outputs: tuple[torch.Tensor, ...], args: SparseDecodeArgs) -> CallSpec:
        """The launch of sparse_decode, and of the combine behind it."""
        out, lse = outputs[:2]
        if out.numel() == 0:
            return CallSpec()
        shape = sparse_attention.shape_of(args, out)
        temporaries = list[Temporary]()
        q_maps = tensor_maps.q_part_maps(SPARSE_INPUTS, shape, self.record in SLOTS and args.softmax_scale >= 0)
        reached = shape.q.in_whole_vectors and tensor_maps.pitch(shape.q.shape, shape.q.strides) is not None
        taken = bool(q_maps) or (reached and shape.q_rope is None)
        shape, query_copies, query_notes = sparse_attention.queries(args, shape, taken)
        copies = sparse_attention.copies(args) + query_copies
        if not shape.out.in_whole_vectors or not tensor_maps.within_span(1, shape.heads, shape.out.strides):
            shape = shape._replace(out=shape.out.copied())
            temporaries.append(Temporary(OUTPUTS["out"]))
        config = replace(self, max_logits=True) if len(outputs) > 2 else self
        config, splits = sparse_splits.split_call(config, args, shape)
        slots, tiles, wanted = splits.slots(shape), config.tiles(shape.heads), (LseLayout.of(lse), args.plus_inf_lse)
        groups = groups_of(config.arch, splits.tiles(shape), tiles)
        numbers = sparse_attention.numbers(args, shape, splits) | combine_kernels.lse_numbers(*wanted)
        kv_formats = tuple(args.kv_formats)
        numbers |= {"interleaved": _interleaved_pools(kv_formats), "fp4": sparse_attention.fp4_pools(kv_formats)}
        numbers |= {"grid_stride": groups, "in_parts": int(bool(q_maps))}
        pointers = sparse_attention.pointers(args, slots > 0)
        pointers["max_logits"] = Output(2) if len(outputs) > 2 else None
        maps = q_maps or {"q_map": tensor_maps.q_map(SPARSE_INPUTS["q"], shape.q, 1), "q_rope_map": None}
        launch = LaunchSpec(
            *(config.instance, (tiles, groups, 1), config.threads, config.lds, True),
            *("sparse_decode_tma", numbers, pointers, maps),
        )
        merge = None
        if slots:
            merged = shape.combine_problem(args.head_dim_v, slots)
            chosen = combine.config_for(merged, config.arch, fixed=splits.size > 0, planned=shape.plan_words > 0)
            merge = combined(chosen, args, shape, shape.out, wanted, splits.partials)
        notes = [splits.note(shape, "query token"), *query_notes]
        if config.swaps:
            swapped = f"keys are the first operand: {config.instance}, whose blocks have {config.q_rows} query rows"
            notes.append(swapped)
        if config.reduced_splits > 1:
            count = {2: "two", 4: "four"}[config.reduced_splits]
            notes.append(f"clusters add the results of {count} splits of a query token each: {config.instance}")
        return call_of(launch, merge, shape, slots, args.head_dim_v, copies, temporaries, notes)


def supports(problem: Problem, arch: ArchSpec) -> Supported | Unsupported:
    """The instance for a problem."""
    return sparse_attention.supports(problem, arch, config_for, RECORDS)


def config_for(problem: Problem, arch: ArchSpec) -> Sm90SparseConfig:
    """The instance with 64 query rows for a problem, which takes splits of any length."""
    found = sparse_attention.record_of([pool.kv_format for pool in problem.pools], problem.head_dim, RECORDS)
    record = "v32" if found == "v32pow2" else found or "none"
    if problem.heads <= FEW_ROWS and record in FEW_HEADS:
        return Sm90SparseConfig(arch, record, q_rows=FEW_ROWS, few_heads=True)
    in_pairs = record in SLOTS and -(-problem.heads // BLOCK_M) % 2 == 0
    return Sm90SparseConfig(arch, record, "share_kv" if in_pairs else "none")


@lru_cache(maxsize=256)
def _interleaved_pools(kv_formats: tuple[str, ...]) -> int:
    """A bit for each pool of V4.1's records that has each token's scales behind it."""
    formats = [get_kv_format(kv_format) for kv_format in kv_formats]
    of_v41 = [RECORDS.get((fmt.name, 512), "").startswith("v41") for fmt in formats]
    return sum(
        (v41 and fmt.by_name["scale"].per_block == 0) << i
        for i, (v41, fmt) in enumerate(zip(of_v41, formats, strict=True))
    )
