"""csrc/sm_90/combine/streaming_combine.hpp, executed on a CPU while decode stores its partials in any order, against
fp64. What nvcc makes of the source, visibility of memory and time are not seen.
"""

from __future__ import annotations

from pathlib import Path

import kernels_on_host
import pytest
import torch
from kernels_on_host import HOST, with_a_fault
from kernels_on_host import compiled as compiled_program
from merges import exact, partials, special
from plan_merges import POINTERS
from planted import each_of, plant

from mla_suite import archs
from mla_suite.archs import combine as native
from mla_suite.archs.sm_90 import combine as sm_90_combine
from mla_suite.archs.sm_90.combine import WholeRowsConfig, streamed
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.testing import assert_close, poison

CONFIGS = {
    (slices, waves, runs): streamed(archs.get("sm_90"), 512, slices, waves, runs)
    for slices, waves in sm_90_combine.STREAMING_POINTS
    for runs in (2, 4)
}


def compiled(folder: Path, config: WholeRowsConfig, *first: Path) -> Path:
    constants = {"HOST_BLOCK_THREADS": config.threads, "MLA_SUITE_KERNEL": "streaming_combine", "D_V": 512}
    constants |= {"WAVES": config.waves, "SLICES": config.slices, "RUNS": config.instance.rpartition("-")[2]}
    folder.mkdir(exist_ok=True)
    return compiled_program("combine/streaming.cpp", folder / "streaming", constants, *first, HOST / "combine")


class Merge:
    """`batch` sequences of `splits` splits; with `sink` rows have sinks."""

    def __init__(self, splits, heads, batch=1, sink=False, parts=None, nan=()):
        self.splits, self.heads, self.batch = splits, heads, batch
        self.partial_out, self.partial_lse = parts or partials(batch * splits, heads)
        self.sink, self.nan = torch.randn(heads) if sink else None, list(nan)
        self.out, self.lse = poison(torch.empty(batch, heads, 512)), poison(torch.empty(batch, heads))

    def run(self, program: Path, config: WholeRowsConfig, seconds: int = 20, seed: int = 1, missing=None):
        """The program's end; `missing` is a word of partial_out that decode never stores."""
        launch = native.launch_of(
            *(config, (self.batch, self.heads, self.heads)),
            ((self.heads * 512, 512), (self.heads, 1), (self.heads * 512, 512)),
            (LseLayout.contiguous(self.heads), False),
            *(True, torch.float32, self.heads, self.splits, (0, False), POINTERS),
        )
        params = kernels_on_host.packed("combine", launch, workgroups=seconds)
        words = self.partial_out.clone().view(torch.int32)
        if missing is not None:
            words.view(-1)[missing] = -1
        none = torch.empty(0)  # no plan, and no ragged tokens
        arrays = words, self.partial_lse, none, none, none if self.sink is None else self.sink, self.out, self.lse
        return kernels_on_host.merged(program, config.grid(self.batch * self.heads), params, arrays, seed)

    def run_and_check(self, program, config, seed=1):
        done = self.run(program, config, seed=seed)
        assert done.returncode == 0, done.stdout + done.stderr
        bounds = [b * self.splits for b in range(self.batch + 1)]
        rows = [row for row in range(self.heads) if not self.partial_out[:, row].isinf().any() and row not in self.nan]
        expected = exact(self.partial_out[:, rows], self.partial_lse[:, rows], bounds, self.sink)
        assert_close(self.out[:, rows], self.lse[:, rows], expected)
        assert self.out[:, self.nan].isnan().any(dim=-1).all()


CASES = {
    "few rows": dict(splits=9, heads=2, sink=True),
    "many splits": dict(splits=100, heads=1),
    "sequences": dict(splits=3, heads=2, batch=3),
    "what is not to be added": dict(splits=6, heads=9, parts=special(), nan=(1, 4, 6)),
}


@pytest.fixture(scope="module", params=[(4, 8, 2), pytest.param((1, 4, 4), marks=pytest.mark.full)], ids=str)
def built(request, tmp_path_factory):
    config = CONFIGS[request.param]
    return compiled(tmp_path_factory.mktemp("combine"), config), config


@pytest.mark.parametrize("case", CASES)
def test_what_arrives_is_merged(built, case):
    Merge(**CASES[case]).run_and_check(*built)


def test_a_word_that_never_comes_ends_in_a_trap(tmp_path):
    config, header = CONFIGS[1, 4, 2], "sm_90/spin_limit.hpp"
    quick = with_a_fault(tmp_path / "csrc", header, "UNITS_PER_SECOND = 976'563;", "UNITS_PER_SECOND = 9'999;")
    plant(quick / header, "TRIES_BETWEEN_LOOKS = 256;", "TRIES_BETWEEN_LOOKS = 8;")
    done = Merge(splits=4, heads=1).run(compiled(tmp_path, config, quick), config, seconds=1, missing=700)
    assert done.returncode == 3, done.stdout
    assert "streaming_combine.hpp" in done.stderr
    assert "Assertion `decode has stored the columns of a partial` failed" in done.stderr


SOURCE = "sm_90/combine/streaming_combine.hpp"
FAULTS = {
    "columns are not waited for": (
        "while (load_missing(from, apart, words) && limit.again()) __nanosleep(PAUSE);",
        "load_missing(from, apart, words);",
    ),
    "log-sum-exps are not waited for": ("while (word == SENTINEL && limit.again());", "while (false);"),
    "part of a word group is enough": (
        "words.x == SENTINEL || words.y == SENTINEL || words.z == SENTINEL || words.w == SENTINEL",
        "words.x == SENTINEL",
    ),
    "no wait": ("    Wave::wait_for_producer();", ""),
}


@each_of(FAULTS, "columns are not waited for", "no wait", place=lambda right, broken: (SOURCE, right))
def test_a_broken_kernel_is_found(tmp_path, name):
    right, broken = FAULTS[name]
    config = CONFIGS[4, 8, 2]
    own = with_a_fault(tmp_path / "csrc", SOURCE, right, broken)
    program = compiled(tmp_path, config, own)
    with pytest.raises(AssertionError):
        Merge(**CASES["few rows"]).run_and_check(program, config)
