"""combine behind a decode with a plan: csrc/sm_90/combine/resident_combine.hpp and, for more rows,
csrc/common/persistent_combine.hpp, executed on a CPU with warps of 32 lanes, against fp64.

Partials are NaN until a block has waited for decode. What nvcc makes of the source, visibility of memory and time are
not seen.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import plan_merges
import pytest
import torch
from hostile_inputs import in_turn
from kernels_on_host import HOST, with_a_fault
from kernels_on_host import compiled as compiled_program
from plan_merges import PlanMerge
from planted import each_of

from mla_suite import archs
from mla_suite.archs import combine as native
from mla_suite.archs.sm_90.combine import persistent, resident
from mla_suite.ops.plan.metadata import HEADER_WORDS, OPEN, Plan, Word

RESIDENT, PERSISTENT = KERNELS = ("sm_90/combine/resident_combine.hpp", "common/persistent_combine.hpp")
CONFIGS = {
    RESIDENT: resident(archs.get("sm_90"), 512, merges=False),
    PERSISTENT: persistent(archs.get("sm_90"), 512),
}


def compiled(kernel: str, folder: Path, *first: Path) -> Path:
    """As if the device held 48 warps: few enough that waves and blocks take rows."""
    name, config = Path(kernel).stem, CONFIGS[kernel]
    constants = {"HOST_BLOCK_THREADS": config.threads, "MLA_SUITE_KERNEL": name, "RESIDENT": 48}
    constants |= {"COMBINE": f'"sm_90/combine/{name}.cu"', "D_V": 512, "WAVES": config.waves, "SLICES": 2}
    return compiled_program("combine/combine.cpp", folder / name, constants, *first, HOST / "combine")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return {kernel: compiled(kernel, tmp_path_factory.mktemp("combine")) for kernel in KERNELS}


class Merge(PlanMerge):
    """One that decode may have begun, in pairs of the `groups` SM parts that it walks at once."""

    def __init__(self, *given, groups=0, **options):
        super().__init__(*given, **options)
        self.groups, self.merged = groups, set()
        if groups:
            self.merge_in_decode()

    def merge_in_decode(self):
        """Leaves what a decode in pairs leaves: sequences that it has merged, and partials that are part of another."""
        plan = Plan.read(self.plan)
        if len(plan.work_indptr) - 1 > self.groups or plan.header[Word.SPLIT_SIZE]:
            return
        for part in range(0, len(plan.work_indptr) - 2, 2):
            begin, middle, end = plan.work_indptr[part : part + 3]
            if not begin < middle < end or plan.work_tiles[middle - 1][0] != plan.work_tiles[middle][0]:
                continue
            (sequence, first_key, _, row), (_, _, end_key, other) = plan.work_tiles[middle - 1 : middle + 1]
            for stale in (row, other):
                self.partial_out[stale] = torch.nan
            if first_key == 0 and end_key == OPEN:
                self.merged.add(sequence)
                self.partial_lse[[row, other]] = torch.nan
            else:
                self.partial_out[row] = torch.randn(self.partial_out.shape[1:])
                self.partial_lse[other] = -torch.inf

    @property
    def split(self):
        return [b for b in super().split if b not in self.merged]


def run_and_check(kernel, program, merge, blocks):
    launch = merge.prepared(CONFIGS[kernel], merge.groups, native.MAY_BE_MERGED if merge.groups else 1)
    merge.run_on_host(program, launch, blocks)
    merge.check()


CASES = plan_merges.CASES | {
    "rows of more splits than lanes": dict(lens=(100, 60_000), heads=5, parts=100),
    "row after row of many splits": dict(lens=(60_000,), heads=23),
    "more sequences than threads": dict(lens=(*[50] * 580, 9000, *[50] * 30, 8000), heads=3),
    "the same, many rows": dict(lens=(*[50] * 580, 9000, *[50] * 30, 8000), heads=25),
    "more sequences than are listed": dict(lens=(9000, *[50] * 2100, 7000, *[50] * 30, 8000), heads=2, parts=400),
}
PAIRS = {
    "two splits of all": dict(lens=(3000,) * 4, heads=9, parts=8, groups=8),
    "more splits": dict(lens=(9000, 100, 60, 7000, 80), heads=5, parts=24, groups=24, sink=True),
    "an odd number of splits": dict(lens=(4096,) * 3, heads=4, parts=9, groups=12),
    "more splits than lanes": dict(lens=(200, 90_000), heads=2, parts=120, groups=132),
    "more sequences than are listed, in pairs": dict(
        lens=(9000, *[50] * 2100, 7000, *[50] * 30, 8000), heads=2, parts=400, groups=400
    ),
    "a plan of more parts": dict(lens=(3000,) * 4, heads=3, parts=8, groups=6),
    "forced splits": dict(lens=(3000, 2000), heads=3, parts=8, groups=8, num_splits=4),
    "sizes of splits": dict(lens=(3000, 2000), heads=3, parts=8, groups=8, split_size=1024),
    "forced splits whose merging is not known in advance": dict(
        lens=(2000,) * 3, heads=1, parts=4, groups=4, num_splits=1000
    ),
}


@pytest.mark.parametrize(
    ("blocks", "case"), in_turn([1, 7], [*itertools.product(KERNELS, CASES), *itertools.product([RESIDENT], PAIRS)])
)
def test_what_was_split_is_merged(programs, case, blocks):
    kernel, name = case
    merge = Merge(**(CASES | PAIRS)[name])
    assert merge.split or merge.merged
    run_and_check(kernel, programs[kernel], merge, blocks)


def test_pairs_merge_all_of_some_and_part_of_others():
    """The cases above have each kind."""
    whole = {name for name, case in PAIRS.items() if Merge(**case).merged}
    assert whole >= {"two splits of all"}
    assert not whole & {"a plan of more parts", "sizes of splits"}


@pytest.mark.parametrize("lens", [(512,) * 80, (0,), (64,) * 600], ids=len)
@pytest.mark.parametrize("kernel", KERNELS)
def test_where_nothing_was_split_nothing_is_done(programs, kernel, lens):
    """The persistent kernel does not look beyond the sequences that one wave reads at first."""
    merge = Merge(lens, heads=4)
    assert not merge.split
    if kernel == PERSISTENT:
        merge.plan[HEADER_WORDS + 4 * 32 + 1 : HEADER_WORDS + len(lens) + 1] = 1 << 30
    run_and_check(kernel, programs[kernel], merge, 3)


FAULTS = {
    "no wait": (RESIDENT, "    Wave::wait_for_producer();\n", "", "few rows"),
    "no block waits": (RESIDENT, "rows && !waits) return;", "rows) return;", "two splits of all"),
    "another partial is empty": (RESIDENT, "set_bit(s.empty, row);", "set_bit(s.empty, row - 1);", "more splits"),
    "parts": (RESIDENT, "parts > p.num_splits || ", "", "a plan of more parts"),
    "split size": (RESIDENT, "|| split_size != 0 ", "", "sizes of splits"),
    "the first splits alone": (RESIDENT, "if (begin >= at.splits) break;", "break;", "rows of more splits than lanes"),
    "late sums": (PERSISTENT, "if constexpr (Merge::parts > 1) block_sync();", "", "row after row of many splits"),
    "one row a block": (PERSISTENT, "(rows + waves_ - 1) / waves_", "rows / waves_", "long and short rows"),
    "sequences of one wave": (PERSISTENT, "      count(turns);\n", "", "more sequences than threads"),
}


@each_of(FAULTS, "no wait", "late sums", place=lambda kernel, right, *_: (kernel, right))
def test_a_broken_kernel_is_found(tmp_path, name):
    kernel, right, broken, case = FAULTS[name]
    program = compiled(kernel, tmp_path, with_a_fault(tmp_path / "csrc", kernel, right, broken))
    with pytest.raises(AssertionError):
        run_and_check(kernel, program, Merge(**{**CASES, **PAIRS}[case]), 1)
