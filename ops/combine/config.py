"""Which combine kernel: a point in its template axes that proves itself legal, and the rule that picks one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mla_suite.core import arch as arch_records
from mla_suite.core import tuning
from mla_suite.core.arch import Arch

HEAD_DIMS_V = (512, 128)
ROWS = (1, 2, 4, 8)
VECS = (1, 2, 4, 8)
PLANNED_GROUPS = 4  # for each compute unit, that walk what a plan split
AWAITED_ROWS = 16  # that decode fills, of neighbouring compute units (csrc/sm_90/PERF.md)
AWAITING_POINTS = ((4, 8), (2, 8), (1, 8), (1, 4))  # slices, waves
AWAITED_SPLITS = 128  # of a sequence: each has a lane that keeps its weight
STATIC_LDS = {
    "amd": 65536,
    "nvidia": 49152,
}  # bytes a workgroup may declare; more needs dynamic shared memory on NVIDIA


@dataclass(frozen=True)
class Config:
    """One instance of csrc/common/combine.hpp. Construction raises ValueError, in one sentence, for an illegal point.

    rows    rows of a workgroup ("batch")
    vec     columns that a lane holds side by side
    waves   waves of a workgroup; waves x lanes of a wave / lanes of a row / rows teams share the splits of a row
    slices  workgroups that share the columns of a row
    """

    arch: Arch = field(repr=False)
    head_dim_v: int
    rows: int
    vec: int
    waves: int
    slices: int
    instance: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for name, value, possible in (
            ("head_dim_v", self.head_dim_v, HEAD_DIMS_V),
            ("rows", self.rows, ROWS),
            ("vec", self.vec, VECS),
        ):
            if value not in possible:
                self._refuse(f"{name} is one of {', '.join(map(str, possible))}")
        most = self.arch.max_threads // self.arch.wavefront
        if self.waves < 1 or self.waves > most:
            self._refuse(f"{self.arch.name} takes 1..{most} waves")
        if self.slices < 1 or self.head_dim_v % (self.slices * self.vec) != 0:
            self._refuse("slices must cut head_dim_v into whole vectors")
        lanes = self.columns // self.vec
        if lanes & (lanes - 1) or lanes < 4:
            self._refuse(f"{lanes} lanes would share a row, a power of two from 4 is needed")
        if self.parts < 1 or self.parts * self.team * self.rows != self.threads:
            self._refuse(f"{self.waves} waves hold {self.threads // self.team} rows")
        if self.lds > STATIC_LDS[self.arch.vendor]:
            self._refuse(f"it needs {self.lds} bytes of LDS of {STATIC_LDS[self.arch.vendor]}")
        point = f"rows-{self.rows}_vec-{self.vec}_waves-{self.waves}_slices-{self.slices}"
        object.__setattr__(self, "instance", f"combine_dv-{self.head_dim_v}_{point}")

    def __hash__(self) -> int:
        return hash(self.instance)  # at every launch: a str keeps its hash

    def _refuse(self, why: str) -> None:
        point = f"head_dim_v={self.head_dim_v} rows={self.rows} vec={self.vec} waves={self.waves} slices={self.slices}"
        raise ValueError(f"combine: no kernel at {point} on {self.arch.name}: {why}")

    @property
    def threads(self) -> int:
        return self.waves * self.arch.wavefront

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

    @property
    def resident(self) -> int:
        """Workgroups that a compute unit has room for: the kernel is built to leave it for this many waves."""
        return (4 if self.parts > 1 else 8) * self.arch.simds // self.waves

    def grid(self, rows: int) -> int:
        """Workgroups for so many rows over the whole batch."""
        return -(-rows // self.rows) * self.slices


@dataclass(frozen=True)
class PlannedConfig:
    """The one instance of csrc/common/persistent_combine.hpp, for rows that can be read and written 16 bytes at a time.

    Its workgroups stay and walk what the plan split, so that there are few of them however many rows there are.
    """

    arch: Arch = field(repr=False)
    head_dim_v: int

    vec = 4
    waves = 8
    slices = 2  # of a row that a workgroup merges

    @property
    def instance(self) -> str:
        resident = 8 * self.arch.simds * self.arch.compute_units
        return f"persistent_combine_dv-{self.head_dim_v}_waves-{self.waves}_slices-{self.slices}_resident-{resident}"

    @property
    def threads(self) -> int:
        return self.waves * self.arch.wavefront

    def grid(self, rows: int) -> int:
        """Workgroups for so many rows over the whole batch, were all of them split."""
        return min(rows * self.slices, PLANNED_GROUPS * self.arch.compute_units)


@dataclass(frozen=True)
class AwaitingConfig:
    """An instance of csrc/sm_90/combine/streaming_combine.cu, for rows that are read and written 16 bytes at a time.

    It merges partials word by word while decode stores them; `slices` workgroups share the columns of a row, of which
    decode stores `runs` at the same time.
    """

    arch: Arch = field(repr=False)
    head_dim_v: int
    slices: int
    waves: int
    runs: int

    vec = 4

    @property
    def instance(self) -> str:
        return f"streaming_combine_dv-{self.head_dim_v}_waves-{self.waves}_slices-{self.slices}_runs-{self.runs}"

    @property
    def threads(self) -> int:
        return self.waves * self.arch.wavefront

    @property
    def resident(self) -> int:
        """Workgroups that a compute unit has room for."""
        return 4 * self.arch.simds // self.waves

    def grid(self, rows: int) -> int:
        """Workgroups for so many rows over the whole batch."""
        return rows * self.slices


def rule(arch: Arch, head_dim_v: int, rows: int, splits: int) -> Config:
    """The point for so many rows over the batch with so many splits each, where no table says otherwise.

    Measured on an H200 over 16 to 16384 rows and 1 to 132 splits; for other archs it is that result, by rows per
    compute unit. Many rows keep the device busy with a wave per row; fewer need their splits, then their columns,
    spread over more waves. On NVIDIA a merge is placed beside decode, on the units that it leaves free: workgroups that
    find no room there cost more than waves that a row does not have.
    """
    beside = arch.vendor == "nvidia" and head_dim_v == 512
    if rows >= 3 * arch.compute_units:
        return Config(arch, head_dim_v, rows=4, vec=4, waves=4, slices=1)
    if 4 * rows >= 3 * arch.compute_units or head_dim_v == 128:
        return Config(arch, head_dim_v, rows=1, vec=4, waves=4 if beside and splits < 32 else 8, slices=1)
    if beside and 4 * rows > arch.compute_units:
        return Config(arch, head_dim_v, rows=1, vec=4, waves=8, slices=1)
    return Config(arch, head_dim_v, rows=1, vec=4, waves=16 if splits > 96 else 8, slices=4)


def invariant(arch: Arch, head_dim_v: int) -> Config:
    """The point whose merge order is the same in every batch: it may not depend on how many rows there are."""
    return Config(arch, head_dim_v, rows=1, vec=4, waves=8, slices=1)


def planned(arch: Arch, head_dim_v: int, rows: int, batch: int) -> PlannedConfig | None:
    """The point that merges what a plan split, where the arch has one and others would need more workgroups than the
    device holds at once, most of them for nothing."""
    if arch.name != "sm_90" or head_dim_v != 512:
        return None
    every_row = rule(arch, head_dim_v, rows * batch, 2)
    fits = every_row.grid(rows * batch) <= every_row.resident * arch.compute_units
    return None if fits else PlannedConfig(arch, head_dim_v)


def awaiting(
    arch: Arch, head_dim_v: int, rows: int, batch: int, splits: int, busy: int, runs: int
) -> AwaitingConfig | None:
    """The point that merges `splits` of each sequence of `rows` rows while decode, on `busy` compute units, goes on.

    All its workgroups must find room beside decode. Decode stores `runs` of a row at the same time: 2 where a block has
    whole rows, 4 where two blocks share them. None for more than AWAITED_ROWS of whole rows of units that are
    neighbours: they have one way to memory, which then takes longer to fill what is awaited than the end of a kernel.
    """
    if arch.name != "sm_90" or head_dim_v != 512 or splits > AWAITED_SPLITS:
        return None
    if busy > arch.compute_units // 2 and 2 * rows > AWAITED_ROWS and runs == 2:
        return None
    points = (AwaitingConfig(arch, head_dim_v, *point, runs) for point in AWAITING_POINTS)
    return next((p for p in points if p.grid(rows * batch) <= p.resident * (arch.compute_units - busy)), None)


def unaligned(arch: Arch, head_dim_v: int) -> Config:
    """The point that takes any address and stride."""
    return Config(arch, head_dim_v, rows=4, vec=1, waves=4, slices=1)


def _refuse_row(arch: str, values: Mapping[str, int | str]) -> str | None:
    """Why a row of a table cannot run: its point, as one sentence."""
    try:
        _of_row(arch_records.get(arch), values)
    except ValueError as error:
        return str(error)
    return None


def _of_row(arch: Arch, values: Mapping[str, int | str]) -> Config:
    point = {name: int(values[name]) for name in ("head_dim_v", "rows_per_group", "vec", "waves", "slices")}
    return Config(
        arch, point["head_dim_v"], point["rows_per_group"], point["vec"], waves=point["waves"], slices=point["slices"]
    )


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
        tuning.Integer("num_splits", 0, 1024),  # that decode makes of a sequence; 0: by its own rule
    ),
    refuse=_refuse_row,
)
"""Tables of combine: the shape, then rows per workgroup, vector width, waves, slices and decode's split count."""


def choose(arch: Arch, head_dim_v: int, out_dtype: str, rows: int, batch: int, splits: int) -> tuple[Config, str]:
    """The point for a problem, and why: a row of a table within a factor of two, else the rule."""
    facts: dict[str, int | str] = dict(
        head_dim_v=head_dim_v,
        out_dtype=out_dtype,
        device_units=arch.compute_units,
        rows=max(rows, 1),
        batch=max(batch, 1),
        splits=max(splits, 1),
    )
    match = tuning.find(FORMAT, arch.name, facts)
    if match is not None and all(theirs <= 2 * asked and asked <= 2 * theirs for _, asked, theirs in match.moved):
        return _of_row(arch, match.row.values), match.reason
    reason = f"rule for {rows * batch} rows on {arch.compute_units} compute units"
    return rule(arch, head_dim_v, rows * batch, splits), reason


def split_count(arch: Arch, head_dim_v: int, out_dtype: str, rows: int, batch: int) -> int:
    """Splits that a table wants of each of `batch` sequences of `rows` query rows; 0 where none says so for them."""
    facts: dict[str, int | str] = dict(
        head_dim_v=head_dim_v,
        out_dtype=out_dtype,
        device_units=arch.compute_units,
        rows=max(rows, 1),
        batch=max(batch, 1),
        splits=1,
    )
    match = tuning.find(FORMAT, arch.name, facts)
    if match is None or any(name in ("device_units", "rows", "batch") for name, _, _ in match.moved):
        return 0
    return int(match.row.values["num_splits"])
