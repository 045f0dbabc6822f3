"""decode on sm_90: its instances, and which of them runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from mla_suite.archs import ArchSpec, decode_table
from mla_suite.archs import combine as combine_kernels
from mla_suite.archs.attention import NARROW, WIDTHS
from mla_suite.archs.sm_90 import decode_launches
from mla_suite.archs.sm_90.kv_loads import KV_LOADS, KvLoad
from mla_suite.archs.sm_90.tile import (
    BLOCK_M,
    BLOCK_N,
    OUT_BYTES,
    P_BYTES,
    REDUCE_BYTES,
    REGISTER_STEPS,
    block_bytes,
    fp8_scores_bytes,
    swap_ab_bytes,
)
from mla_suite.core.dispatch import Supported, Unsupported, cached
from mla_suite.launch import missing, tensor_map
from mla_suite.launch.spec import CallSpec
from mla_suite.ops.decode import DecodeArgs, Problem

MAX_M = 2**25 - 1  # query rows of a sequence: 32 bits count its partial results in 16 bytes
SENTINEL_BYTES = 16 + 4096  # streaming combine: one mbarrier and the pattern that the sentinels are filled from
EXCHANGE_STAGES = FOLDING_STAGES = 4
NODE_SUM_BYTES = 14 * 256 * 16  # variant folding: a part of the sum of a node's splits
RAW_STAGES = 2  # stages of keys as they are stored, which the producer of e4m3 rows copies ahead
NARROW_RAW_STAGES = 8
# cluster_mode exchange_p: two stages of 256 columns of the other CTA's keys, two buffers of its P, the statistics of
# both splits, barriers, and the sentinel pattern of one row's half.
EXCHANGE_BYTES = 2 * BLOCK_N * 512 + 2 * P_BYTES + 5 * 4 * BLOCK_M + 8 * (2 + 2 * 2 + 2 * 2 + 2 * 4) + 16 + 1024
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
ROPE = 64
MASKED_WIDTH = SCALED_WIDTH = FOLDED_WIDTH = 576
FOLDING_MODES = ("none", "share_kv")
VARIANTS = {"plain": "{}", "masked": "masked_{}_masked-1", "scaled": "scaled_{}_scaleq-1", "folding": "fold_{}_fold-1"}
"""Variants of an instance, and how each is named after the plain one."""
_NARROW = "decode_narrow_dtype-{dtype}_dqk-{width}_kvsource-{kv_load}_clustermode-none_dv-{head_dim_v}"
ROTATED_KEY_BYTES = 4 * ROPE  # beside an un-rotated key: its angles


@dataclass(frozen=True)
class Sm90Config:
    """One instance of csrc/sm_90/decode. Construction raises ValueError, in a sentence, for an illegal point.

    dtype     type of queries; the result has it, too, or bf16 for fp8
    width     values of a cached row
    kv_load   how keys come, one of KV_LOADS; but for 'fp8' and 'swap_ab' they have the queries' type
    cluster_mode  each CTA of a cluster of two processes one split of a sequence, and the two write one result or
              partial: they reduce O ('reduce_o') or exchange P ('exchange_p') over DSMEM; with a plan they reduce O
              of their last work tiles where these are splits of one sequence ('reduce_last'). Or they have two row
              tiles of a sequence, whose keys each loads half of for both ('share_kv'); 'none' without a cluster
    q_rows    query rows of a CTA at most; fewer than 64 only with 'swap_ab'
    variant   one of VARIANTS:
              'masked' has windows and trees, whose code would make a short call of the others longer;
              'scaled' multiplies bf16 queries of e4m3 rows as fp16, to which keys are converted in fewer instructions,
              and scales each row to it first, which only long work tiles repay (csrc/sm_90/decode/scaled_queries.hpp);
              work tiles of 'folding' are nodes of batch-invariant splits, whose results a CTA adds
              (csrc/sm_90/decode/fold.hpp)
    """

    arch: ArchSpec = field(repr=False)
    dtype: str
    width: int
    kv_load: str
    cluster_mode: str = "none"
    q_rows: int = BLOCK_M
    variant: str = "plain"

    def __post_init__(self) -> None:
        if self.arch.name != "sm_90":
            self._raise(f"{self.arch.name} is not sm_90")
        self._check("kv_load", tuple(KV_LOADS))
        self._check("width", tuple(self.load.cluster_modes))
        self._check("dtype", self.load.narrow if self.narrow else self.load.dtypes)
        self._check("cluster_mode", self.load.modes(self.width, self.dtype, self.masked))
        self._check("q_rows", tuple([rows for width, rows in self.load.stages if width == self.width]))
        self._check("variant", tuple(VARIANTS))
        if self.masked and (self.width != MASKED_WIDTH or self.load.rotates):
            self._raise(f"windows and trees are of rotated rows of {MASKED_WIDTH}")
        if self.masked and self.fp8_scores:
            self._raise("windows and trees are of keys in full precision")
        if self.variant == "scaled" and not self.may_scale:
            self._raise(f"only bf16 queries of e4m3 rows of {SCALED_WIDTH} without windows and trees are scaled")
        if self.folds and not (self.may_fold and self.cluster_mode in FOLDING_MODES):
            modes = " and ".join(FOLDING_MODES)
            self._raise(f"splits are folded with cluster_mode {modes}, of bf16 and fp16 rows of {FOLDED_WIDTH} by TMA")
        if self.lds > self.arch.lds_bytes:
            self._raise(f"it needs {self.lds} bytes of shared memory of {self.arch.lds_bytes}")

    def _check(self, name: str, possible: tuple[str | int, ...]) -> None:
        if getattr(self, name) not in possible:
            self._raise(f"{name} is one of {', '.join(map(str, possible))}")

    def _raise(self, why: str) -> None:
        point = f"dtype={self.dtype} width={self.width} kv_load={self.kv_load}"
        raise ValueError(f"decode: no kernel at {point} on {self.arch.name}: {why}")

    @property
    def masked(self) -> bool:
        return self.variant == "masked"

    @property
    def folds(self) -> bool:
        return self.variant == "folding"

    @property
    def may_scale(self) -> bool:
        """Whether an instance like this one scales queries."""
        return (self.dtype, self.width, self.kv_load, self.masked) == ("bf16", SCALED_WIDTH, "fp8", False)

    @property
    def may_fold(self) -> bool:
        """Whether an instance like this one folds splits."""
        return (self.width, self.kv_load, self.masked) == (FOLDED_WIDTH, "tma", False)

    @property
    def fp8_scores(self) -> bool:
        """Whether scores are sums of e4m3 products, which keep fewer bits than fp32 has (precision 'fp8')."""
        return self.kv_load == "fp8_scores"

    @property
    def head_dim_v(self) -> int:
        return WIDTHS[self.width]

    @property
    def narrow(self) -> bool:
        return self.width in NARROW

    @cached_property
    def load(self) -> KvLoad:
        return KV_LOADS[self.kv_load]

    @property
    def threads(self) -> int:
        return self.load.threads

    @property
    def stages(self) -> int:
        if self.folds:
            return FOLDING_STAGES
        return EXCHANGE_STAGES if self.cluster_mode == "exchange_p" else self.load.stages[self.width, self.q_rows]

    @cached_property
    def lds(self) -> int:
        """Dynamic shared memory in bytes, as csrc/sm_90/decode/shared_storage.hpp lays it out."""
        if self.kv_load == "swap_ab":
            return swap_ab_bytes(self.width, self.stages, self.q_rows)
        if self.fp8_scores:
            beside = 0 if self.cluster_mode == "none" else REDUCE_BYTES
            return fp8_scores_bytes(self.width, self.head_dim_v, self.stages, beside)
        if self.load.rotates:
            rotated = block_bytes(self.width, self.stages, REGISTER_STEPS["rotated"], ROTATED_KEY_BYTES)
            return rotated + (0 if self.cluster_mode == "none" else REDUCE_BYTES) + 8 * self.stages
        alone = block_bytes(self.width, self.stages, REGISTER_STEPS[self.kv_load])
        reduced = dict.fromkeys(("reduce_o", "reduce_last"), REDUCE_BYTES)
        others = {"none": SENTINEL_BYTES, "exchange_p": EXCHANGE_BYTES, "share_kv": 0}
        beside = NODE_SUM_BYTES if self.folds else (others | reduced)[self.cluster_mode]
        if self.kv_load == "fp8":
            cluster = 0 if self.cluster_mode == "none" else beside
            raw = (NARROW_RAW_STAGES if self.narrow else RAW_STAGES) * (BLOCK_N * self.width + 2 * 8)
            alone = -(-(alone + cluster) // 128) * 128 + raw
        if self.narrow:
            return -(-alone // 128) * 128 + OUT_BYTES
        if self.kv_load == "fp8":
            return alone
        return alone + (beside if self.kv_load == "tma" else 0)

    @cached_property
    def instance(self) -> str:
        if self.narrow:
            return _NARROW.format_map({**vars(self), "head_dim_v": self.head_dim_v})
        return VARIANTS[self.variant].format(self.load.instance.format_map(vars(self)))

    @cached_property
    def cost_model_key(self) -> str:
        """The kv_load whose times the cost model has."""
        return self.load.cost_model_key[self.width]

    @cached_property
    def clustered(self) -> dict[str, Sm90Config]:
        """The instance with each cluster mode. Another kernel may replace one without clusters."""
        own, replacement = self.load, self.load.clusters_of or self.kv_load
        variant = "masked" if self.masked else "plain"

        def with_mode(mode: str) -> Sm90Config:
            replaced = mode not in own.modes(self.width, self.dtype, self.masked)
            kv_load, q_rows = (replacement, BLOCK_M) if replaced else (self.kv_load, self.q_rows)
            return _config(self.arch, self.dtype, self.width, kv_load, mode, q_rows, variant)

        return {mode: with_mode(mode) for mode in KV_LOADS[replacement].modes(self.width, self.dtype, self.masked)}

    @cached_property
    def scaling(self) -> Sm90Config:
        """The instance that scales queries; the same one where there is none."""
        return self._variant("scaled", self.cluster_mode) if self.may_scale else self

    @cached_property
    def folding(self) -> dict[str, Sm90Config]:
        """Cluster modes -> the instance that folds splits with each; none where there is none."""
        return {mode: self._variant("folding", mode) for mode in FOLDING_MODES} if self.may_fold else {}

    def _variant(self, variant: str, cluster_mode: str) -> Sm90Config:
        return _config(self.arch, self.dtype, self.width, self.kv_load, cluster_mode, self.q_rows, variant)

    @cached_property
    def built_from(self) -> tuple[str, ...]:
        """Names of the instances that may run in its place, and of the combines behind them."""
        combines = combine_kernels.invariant_instances(self.arch, self.head_dim_v)
        if self.may_fold:
            combines += tuple([f"fold_{name}" for name in combines])
        variants = [variant for config in self.clustered.values() for variant in (config, config.scaling)]
        return (*dict.fromkeys(variant.instance for variant in (*variants, *self.folding.values())), *combines)

    @property
    def box_blocks(self) -> int:
        """Blocks of 64 values of 32 keys that the copy engine brings at a time: BOX_BLOCKS in decode/traits.hpp. Of two
        CTAs that share keys one brings so many, and the other `rest_blocks`."""
        if self.cluster_mode == "exchange_p" or self.load.rotates or self.width % 64:
            return 1
        blocks = self.width // 64
        return -(-blocks // 2) if self.cluster_mode == "share_kv" else blocks

    @property
    def rest_blocks(self) -> int:
        return self.width // 64 - self.box_blocks if self.cluster_mode == "share_kv" else 0

    @property
    def takes_parts(self) -> bool:
        """Whether the kernel reads the latent and the rope part of queries by maps of their own."""
        return self.kv_load != "swap_ab" and self.dtype != "fp8"

    def tiles(self, rows: int) -> int:
        """CTAs that share the keys of one work tile."""
        return -(-rows // BLOCK_M)

    def spec(self, outputs: tuple[torch.Tensor, ...], args: DecodeArgs) -> CallSpec:
        """The launch of decode, and of the combine behind it."""
        return decode_launches.spec(self, outputs, args)


@cached
def _config(
    arch: ArchSpec,
    dtype: str,
    width: int,
    kv_load: str,
    cluster_mode: str = "none",
    q_rows: int = BLOCK_M,
    variant: str = "plain",
) -> Sm90Config:
    """A configuration, which takes 15 us to prove itself legal: calls share those that there are."""
    return Sm90Config(arch, dtype, width, kv_load, cluster_mode, q_rows, variant)


def config_for(problem: Problem, arch: ArchSpec) -> Sm90Config:
    """The instance for a problem. It sees neither batch nor lengths, so a batch-invariant call may use it."""
    element, width = ELEMENTS[problem.q_dtype], problem.head_dim
    masked, whole_stages = problem.window or problem.tree, problem.page_size % BLOCK_N == 0
    q_rows = BLOCK_M
    if problem.kv_format == "fp8":
        rows = problem.heads * problem.q_len
        few = [most for of_width, most in KV_LOADS["swap_ab"].stages if of_width == width and rows <= most]
        fits = element == "fp8" and width == SCALED_WIDTH and whole_stages and not masked
        kv_load = "fp8_scores" if fits and problem.precision == "fp8" else "fp8"
        if few:
            kv_load, q_rows = "swap_ab", few[0]
    else:
        kv_load = ("tma" if whole_stages else "cp_async") + ("_rotated" if problem.rope else "")
    return _config(arch, element, width, kv_load, q_rows=q_rows, variant="masked" if masked else "plain")


def supports(problem: Problem, arch: ArchSpec) -> Supported | Unsupported:
    why = _unsupported(problem)
    if why is not None:
        return Unsupported(why)
    row = decode_table.row_of(arch, problem)
    if row is not None and row.values["use"] == decode_table.TRITON:
        return Unsupported(f"{decode_table.reason(row)} leaves it to the triton kernel")
    config = config_for(problem, arch)
    reason = f"tiles of {config.q_rows} rows for {problem.q_len} x {problem.heads} query rows"
    answer = Supported(config, reason if row is None else f"{reason}, by {decode_table.reason(row)}")
    return missing(arch, *config.built_from) or answer


def _unsupported(problem: Problem) -> str | None:
    """Why the kernels cannot take a problem; None when they can."""
    if problem.q_dtype not in ELEMENTS:
        return f"q is {problem.q_dtype}; it takes bfloat16, float16 or float8_e4m3fn"
    if problem.kv_format not in ("fp8", ELEMENTS[problem.q_dtype]):
        known = " or ".join(dict.fromkeys((ELEMENTS[problem.q_dtype], "fp8")))
        return f"kv_format {problem.kv_format} with {problem.q_dtype} queries; it takes {known}"
    if WIDTHS.get(problem.head_dim) != problem.head_dim_v:
        possible = ", ".join(f"{width} with {head_dim_v}" for width, head_dim_v in WIDTHS.items())
        return f"rows of {problem.head_dim} values with head_dim_v {problem.head_dim_v}; it takes {possible}"
    if problem.head_dim in NARROW and problem.q_dtype == torch.float16:
        return f"float16 queries of {problem.head_dim} values; it takes bfloat16 or float8_e4m3fn"
    if (problem.window or problem.tree) and (problem.rope or problem.head_dim != MASKED_WIDTH):
        given = "rope_cos_sin" if problem.rope else f"rows of {problem.head_dim} values"
        return f"window_left or tree_mask with {given}; it has them for rotated rows of {MASKED_WIDTH}"
    if problem.rope and (problem.rope != ROPE or problem.head_dim != 576 or problem.kv_format == "fp8"):
        given = f"rope_cos_sin of {problem.rope} values with {problem.kv_format} rows of {problem.head_dim}"
        return f"{given}; it rotates {ROPE} of bf16 or fp16 rows of 576"
    if problem.alignment < tensor_map.ALIGNMENT:
        return f"kv_cache is aligned to {problem.alignment} bytes; its address and block stride must be multiples of 16"
    rows = problem.heads * problem.q_len
    if rows < 1 or rows > MAX_M or rows * problem.heads >= 2**32:
        return f"{rows} query rows of {problem.heads} heads; it takes 1 to {MAX_M}, rows x heads below {2**32}"
    return None
