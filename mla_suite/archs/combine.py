"""combine: the legal points of its kernel, which every arch has, the choice among them, and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from mla_suite import archs
from mla_suite.archs import ArchSpec
from mla_suite.build.instances import instance_id
from mla_suite.build.params import divisor
from mla_suite.core import dispatch, tuning
from mla_suite.core.dispatch import Supported, Unsupported, cached
from mla_suite.launch import has_kernel, missing
from mla_suite.launch.spec import CallSpec, LaunchSpec, Output, Slot, inputs, present
from mla_suite.ops.combine import CombineArgs, Problem
from mla_suite.ops.combine.reference import LseLayout, empty_lse

_INPUTS = inputs(CombineArgs)
OUTPUTS = {"out": Output(0), "lse": Output(1)}
OUT_TYPES = {torch.bfloat16: (0, "bf16"), torch.float16: (1, "fp16"), torch.float32: (2, "fp32")}
MAY_BE_MERGED = 2
"""The first of `skip` behind a decode that may have merged rows itself (csrc/sm_90/combine/merged_rows.hpp)."""
MAX_ROWS = 2**31 - 1  # over the batch: the kernel's row numbers are 31 bits
HEAD_DIMS_V = (512, 256, 128)
ROW_COUNTS = (1, 2, 4, 8)
VECS = (1, 2, 4, 8)
FIXED_SPLITS = (0, 16)
"""Numbers of splits that a kernel may be compiled for; 0: it takes any, also of sequences that differ."""
STATIC_LDS = {"amd": 65536, "nvidia": 49152}
"""Vendor -> bytes that a workgroup may declare; more needs dynamic shared memory on NVIDIA."""


class CombineKernel:
    """The configuration of any kernel that takes the parameters of combine.

    vec    columns that a lane holds side by side
    waves  of a workgroup
    """

    arch: ArchSpec
    head_dim_v: int
    vec: int
    waves: int

    @property
    def instance(self) -> str:
        raise NotImplementedError

    @property
    def threads(self) -> int:
        return self.waves * self.arch.wavefront

    def grid(self, rows: int) -> int:
        """Workgroups for `rows` rows over the whole batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class CombineConfig(CombineKernel):
    """One instance of csrc/common/combine.hpp. Construction raises ValueError, in one sentence, for an illegal point.

    rows          rows of a workgroup ("batch")
    vec           columns that a lane holds side by side
    waves         waves of a workgroup; waves x lanes of a wave / lanes of a row / rows teams share the splits of a row
    slices        workgroups that share the columns of a row
    fixed_splits  splits of every sequence, compiled in (csrc/common/combine_fixed_splits.hpp); 0: any number
    """

    arch: ArchSpec = field(repr=False)
    head_dim_v: int
    rows: int
    vec: int
    waves: int
    slices: int
    fixed_splits: int = 0

    def __post_init__(self) -> None:
        listed = dict(head_dim_v=HEAD_DIMS_V, rows=ROW_COUNTS, vec=VECS, fixed_splits=FIXED_SPLITS)
        for name, possible in listed.items():
            if getattr(self, name) not in possible:
                self._raise(f"{name} is one of {', '.join(map(str, possible))}")
        most = self.arch.max_threads // self.arch.wavefront
        if self.waves < 1 or self.waves > most:
            self._raise(f"{self.arch.name} takes 1..{most} waves")
        if self.slices < 1 or self.head_dim_v % (self.slices * self.vec) != 0:
            self._raise("slices must divide head_dim_v into whole vectors")
        lanes = self.columns // self.vec
        if lanes & (lanes - 1) or lanes < 4:
            self._raise(f"{lanes} lanes would share a row, a power of two from 4 is needed")
        if self.parts < 1 or self.parts * self.team * self.rows != self.threads:
            self._raise(f"{self.waves} waves hold {self.threads // self.team} rows")
        if self.rows > 1 and self.parts > 1 and self.arch.vendor == "nvidia":
            self._raise(
                f"{self.parts} teams share a row's splits, and its kernels have one row in a block that does so"
            )
        if self.lds > STATIC_LDS[self.arch.vendor]:
            self._raise(f"it needs {self.lds} bytes of LDS of {STATIC_LDS[self.arch.vendor]}")
        if self.fixed_splits and self.arch.vendor != "amd":
            self._raise("its kernels take any number of splits; fixed_splits is 0")
        if self.fixed_splits > self.team:
            self._raise(f"{self.fixed_splits} splits need a lane each of the {self.team} that hold a row")

    def __hash__(self) -> int:
        return hash(self.instance)  # at every launch: a str keeps its hash

    def _raise(self, why: str) -> None:
        point = f"head_dim_v={self.head_dim_v} rows={self.rows} vec={self.vec} waves={self.waves} slices={self.slices}"
        point += f" fixed_splits={self.fixed_splits}" if self.fixed_splits else ""
        raise ValueError(f"combine: no kernel at {point} on {self.arch.name}: {why}")

    @cached_property
    def instance(self) -> str:
        return instance_id("combine", self.constants)

    @property
    def constants(self) -> dict[str, int | str]:
        """The macros of the instance, in the order of its name."""
        point: dict[str, int | str] = dict(D_V=self.head_dim_v, ROWS=self.rows, VEC=self.vec)
        point |= dict(WAVES=self.waves, SLICES=self.slices)
        return point | ({"SPLITS": self.fixed_splits} if self.fixed_splits else {})

    @property
    def columns(self) -> int:
        """Columns of a row per workgroup."""
        return self.head_dim_v // self.slices

    @property
    def team(self) -> int:
        """Lanes that hold one row."""
        return min(self.columns // self.vec, self.arch.wavefront)

    @property
    def parts(self) -> int:
        """Teams that share the splits of one row."""
        return self.threads // self.team // self.rows

    @property
    def lds(self) -> int:
        """Static LDS in bytes: a partial row and a pair per part, where there is more than one."""
        return self.rows * self.parts * (self.columns * 4 + 8) if self.parts > 1 else 0

    @cached_property
    def resident(self) -> int:
        """Workgroups that a compute unit has room for: the kernel is built to leave it for this many waves."""
        few = self.waves == 1 or self.parts > 1 or self.fixed_splits
        return (4 if few else 8) * self.arch.simds // self.waves

    def grid(self, rows: int) -> int:
        return -(-rows // self.rows) * self.slices

    def spec(self, outputs: tuple[torch.Tensor, ...], args: CombineArgs) -> CallSpec:
        """The launch of the operator."""
        out, lse = outputs
        partial_out, partial_lse = args.partial_out, args.partial_lse
        batch, rows = lse.shape
        if batch == 0 or rows == 0:
            return CallSpec()
        launch = launch_of(
            self,
            (batch, rows, rows),
            (partial_out.stride(), partial_lse.stride(), out.stride()),
            (LseLayout.of(lse), args.plus_inf_lse),
            (partial_out.data_ptr() | out.data_ptr()) % 16 == 0,
            out.dtype,
            1 if args.attn_sink is None else args.attn_sink.shape[0],
            args.num_splits,
            (0, args.skip_single),
            {**present(args, _INPUTS), "cu_seqlens_q": None, **OUTPUTS},
        )
        return CallSpec((launch,))


def launch_of(
    config: CombineKernel,
    shape: tuple[int, int, int],
    strides: tuple[tuple[int, ...], ...],
    lse: tuple[LseLayout, bool],
    aligned: bool,
    out_dtype: torch.dtype,
    sink_heads: int,
    num_splits: int,
    skip: tuple[int, bool],
    pointers: Mapping[str, Slot],
) -> LaunchSpec:
    """A combine of tensors with this metadata, by itself as an operator or behind a decode that left partials.

    shape       (batch, rows, heads), with rows = q_len x heads
    strides     those of partial_out and of partial_lse, which begin with [splits, rows], and of out: [tokens, heads]
    lse         where it lies, and whether a row without keys has +inf there instead of -inf
    num_splits  splits of every sequence where there is no split_indptr, which says which splits a sequence owns; behind
                a decode that merges rows itself (MAY_BE_MERGED), the SM parts that it walks at once
    skip        which sequences are left as they are: those without a split (MAY_BE_MERGED: and rows that decode has
                marked as merged), and those with one split
    """
    batch, rows, heads = shape
    partial, partial_lse, out = strides
    # 16-byte accesses must reach every vector of every row.
    whole = (partial[0] | partial[1]) % 4 == 0 and (out[0] | out[1]) * out_dtype.itemsize % 16 == 0
    if config.vec > 1 and not (aligned and whole):
        config = unaligned(config.arch, config.head_dim_v)
    grid = config.grid(batch * rows)
    numbers = dict(
        partial_split_stride=partial[0],
        partial_row_stride=partial[1],
        partial_lse_split_stride=partial_lse[0],
        partial_lse_row_stride=partial_lse[1],
        out_token_stride=out[0],
        out_head_stride=out[1],
        **lse_numbers(*lse),
        batch=batch,
        q_len=rows // heads,
        heads=heads,
        sink_heads=sink_heads,
        num_splits=num_splits,
        out_type=OUT_TYPES[out_dtype][0],
        skip_none=skip[0],
        skip_single=int(skip[1]),
        **divisor("rows", rows),
        **divisor("heads", heads),
        workgroups=grid,
    )
    some = any(skip) or pointers["cu_seqlens_q"] is not None
    fills = () if some else ("out", "lse")
    return LaunchSpec(config.instance, (grid, 1, 1), config.threads, 0, True, "combine", numbers, pointers, {}, fills)


def lse_numbers(layout: LseLayout, plus_inf: bool) -> dict[str, int | float]:
    """The parameters that say where and how a kernel stores lse."""
    return dict(
        lse_token_stride=layout.token,
        lse_head_stride=layout.head,
        lse_batch_stride=layout.batch,
        **divisor("lse_tokens", layout.tokens),
        empty_lse=empty_lse(plus_inf),
    )


def rule(arch: ArchSpec, head_dim_v: int, rows: int, splits: int) -> CombineConfig:
    """The configuration for `rows` over the batch with `splits` each, where no tuned row decides.

    Measured on an H200 over 16 to 16384 rows and 1 to 132 splits; for other archs it is that result, by rows per
    compute unit. Many rows keep the device busy with a wave per row; fewer need their splits, then their columns,
    spread over more waves. On NVIDIA a merge is placed beside decode, on the units that it leaves free: workgroups that
    find no room there cost more than waves that a row does not have. On AMD it is the least modelled time of the
    kernels that ship (csrc/gfx950/PERF.md, K25): a wave alone reads up to eight splits at once.
    """
    beside = arch.vendor == "nvidia" and head_dim_v == 512
    if rows >= 3 * arch.compute_units:
        return _config(arch, head_dim_v, 4, 4, 4, 1)
    if arch.vendor == "amd" and head_dim_v == 512:
        if splits <= 8 or 4 * rows >= 3 * arch.compute_units:
            return _config(arch, head_dim_v, 1, 4, 1, 2)
        if 4 * rows > arch.compute_units:
            return _config(arch, head_dim_v, 1, 4, 8, 1)
    if 4 * rows >= 3 * arch.compute_units or head_dim_v != 512:
        return _config(arch, head_dim_v, 1, 4, 4 if beside and splits < 32 else 8, 1)
    if beside and 4 * rows > arch.compute_units:
        return _config(arch, head_dim_v, 1, 4, 8, 1)
    return _config(arch, head_dim_v, 1, 4, 16 if splits > 96 else 8, 4)


@lru_cache(maxsize=256)
def _config(arch: ArchSpec, head_dim_v: int, rows: int, vec: int, waves: int, slices: int) -> CombineConfig:
    """A configuration, which takes 15 us to prove itself legal: the rule has few."""
    return CombineConfig(arch, head_dim_v, rows, vec, waves, slices)


def invariant(arch: ArchSpec, head_dim_v: int, rows: int) -> CombineConfig:
    """The configuration for `rows` over the batch where the order of combining must be the same in every batch.

    Each column's splits are summed in turn by one lane, and the lanes of a whole wave have the weights, whether a wave
    has all columns of a row or, while all workgroups find room at once, only some.
    """
    few_rows, many_rows = _invariants(arch, head_dim_v)
    return few_rows if few_rows.grid(rows) <= few_rows.resident * arch.compute_units else many_rows


@lru_cache(maxsize=256)
def invariant_instances(arch: ArchSpec, head_dim_v: int) -> tuple[str, ...]:
    """The instances that `invariant` names."""
    return tuple(dict.fromkeys([config.instance for config in _invariants(arch, head_dim_v)]))


def _invariants(arch: ArchSpec, head_dim_v: int) -> tuple[CombineConfig, CombineConfig]:
    """For few and for many rows."""
    if head_dim_v != 512:
        only = _config(arch, head_dim_v, 1, 4, 8, 1)
        return only, only
    slices = head_dim_v // (4 * arch.wavefront)
    return _config(arch, head_dim_v, 1, 4, 1, slices), _config(arch, head_dim_v, 4, 4, 4, 1)


def unaligned(arch: ArchSpec, head_dim_v: int) -> CombineConfig:
    """The configuration that takes any address and stride."""
    return CombineConfig(arch, head_dim_v, rows=4, vec=1, waves=4, slices=1)


def _illegal_row(arch: str, values: Mapping[str, int | str]) -> str | None:
    """Why a row of a table cannot run: its point, as one sentence."""
    try:
        config_of_row(archs.get(arch), values)
    except ValueError as error:
        return str(error)
    return None


def config_of_row(arch: ArchSpec, values: Mapping[str, int | str]) -> CombineConfig:
    columns = ("head_dim_v", "rows_per_group", "vec", "waves", "slices", "fixed_splits")
    return CombineConfig(arch, *(int(values[name]) for name in columns))


FORMAT = tuning.Format(
    op="combine",
    exact=(tuning.Integer("head_dim_v", 1, 4096), tuning.Choice("out_dtype", ("bf16", "fp16", "fp32"))),
    near=(
        tuning.Integer("device_units", 1, 4096),  # compute units of the device the row is for
        tuning.Integer("rows", 1, 1 << 20),  # of a sequence: q_len x heads
        tuning.Integer("batch", 1, 1 << 20),
        tuning.Integer("splits", 1, 1 << 16),  # of a sequence, in the mean
    ),
    config=(
        tuning.Integer("rows_per_group", 1, 8),
        tuning.Integer("vec", 1, 8),
        tuning.Integer("waves", 1, 32),
        tuning.Integer("slices", 1, 128),
        tuning.Integer("fixed_splits", 0, 64),
    ),
    refuse=_illegal_row,
)
"""Tables of combine: the shape, then rows per workgroup, vector width, waves, slices and the splits compiled in."""


def table_key(problem: Problem, arch: ArchSpec) -> dict[str, int | str]:
    """The values of a table's key columns for a problem."""
    key = dict(rows=max(problem.rows, 1), batch=max(problem.batch, 1), splits=max(problem.mean_splits, 1))
    out_dtype = OUT_TYPES[problem.out_dtype][1]
    return dict(head_dim_v=problem.head_dim_v, out_dtype=out_dtype, device_units=arch.compute_units, **key)


def choose(problem: Problem, arch: ArchSpec) -> tuple[CombineConfig, str]:
    """The point for a problem, and why: a row of a table within a factor of two, else the rule.

    A row whose kernel was not built leaves the problem to the rule, with one warning in the log.
    """
    rows = problem.rows * problem.batch
    ruled = rule(arch, problem.head_dim_v, rows, problem.mean_splits)
    reason = f"rule for {rows} rows on {arch.compute_units} compute units"
    match = tuning.find(FORMAT, arch.name, table_key(problem, arch))
    if match is None or not match.within(2):
        return ruled, reason
    tuned = config_of_row(arch, match.row.values)
    if tuned.fixed_splits not in (0, problem.uniform_splits):
        return ruled, f"{reason}, since {match.reason} is for {tuned.fixed_splits} splits of every sequence"
    if tuned != ruled and not has_kernel(arch, tuned.instance):
        dispatch.warn_once(
            tuned.instance,
            f"combine: {match.reason} names kernel {tuned.instance}, which is not built for {arch.name}; the rule's "
            "kernel runs instead. `python -m mla_suite tune --build` compiles what tables name",
        )
        return ruled, f"{reason}, since {tuned.instance} of {match.reason} is not built"
    return tuned, match.reason


def supports(problem: Problem, arch: ArchSpec) -> Supported | Unsupported:
    if problem.head_dim_v not in HEAD_DIMS_V:
        possible = " or ".join(map(str, HEAD_DIMS_V))
        return Unsupported(f"head_dim_v {problem.head_dim_v}; its kernels hold rows of {possible}")
    if problem.rows * problem.batch > MAX_ROWS:
        return Unsupported(f"{problem.rows} rows x {problem.batch} sequences; it takes {MAX_ROWS} rows")
    config, reason = choose(problem, arch)
    answer = Supported(config, f"{config.instance}, {reason}; one value at a time where an address or stride is odd")
    return missing(arch, config.instance, unaligned(arch, problem.head_dim_v).instance) or answer


@cached
def config_for(problem: Problem, arch: ArchSpec, fixed: bool) -> CombineConfig:
    """The kernel for partials that an attention kernel leaves; `fixed` asks for the one that does not depend on the
    batch."""
    if fixed:
        return invariant(arch, problem.head_dim_v, problem.rows * problem.batch)
    return choose(problem, arch)[0]
