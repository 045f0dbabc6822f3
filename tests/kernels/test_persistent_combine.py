"""combine behind a decode with a plan, which sm_90 alone has: its source for gfx942, in the emulator, against fp64."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import plan_merges
import pytest
from plan_merges import POINTERS, PlanMerge

from mla_suite import archs
from mla_suite.archs import CSRC
from mla_suite.archs.sm_90.combine import PersistentCombineConfig
from mla_suite.build import compilers
from mla_suite.build.params import load
from mla_suite.emulator import Emulator, Memory
from mla_suite.ops.plan.metadata import HEADER_WORDS

THREADS = 4 * 64


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """Its assembly text."""
    out = tmp_path_factory.mktemp("planned") / "persistent_combine.s"
    source = Path(__file__).with_name("persistent_combine.hip")
    command = [*compilers.packaged().to_assembly("gfx942"), f"-I{CSRC}", "-S", str(source), "-o", str(out)]
    subprocess.run(command, check=True)
    return out.read_text()


class Merge(PlanMerge):
    def run(self, text, workgroups):
        launch = self.prepared(PersistentCombineConfig(archs.get("sm_90"), 512))
        fields = load("combine")
        values = {**launch.numbers, **dict.fromkeys(POINTERS, 0)}
        assert values["workgroups"] == launch.grid[0]
        numbers = fields.pack(**{**values, "workgroups": workgroups})[8 * len(POINTERS) :]
        named = dict(partial_out=self.partial_out, partial_lse=self.partial_lse, plan=self.plan)
        named |= dict(tokens=self.tokens if self.ragged else None, sink=self.sink, out=self.out, lse=self.lse)
        places = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in named.items()}
        places["plan"] += 4 * HEADER_WORDS
        memories = [
            Memory.of(name, tensor, "rw" if name in ("out", "lse") else "r")
            for name, tensor in named.items()
            if tensor is not None
        ]
        machine = Emulator("gfx942")
        params = struct.pack(f"<{len(POINTERS)}Q", *places.values()) + numbers
        program = machine.load_text(text, "persistent_combine")
        report = machine.launch(program, (workgroups, 1, 1), THREADS, 0, params, memories)
        assert not report.findings, "\n".join(map(str, report.findings))
        return report


CASES = plan_merges.CASES | {
    "few rows of many splits": dict(lens=(100, 60_000), heads=5),
    "one long among more than are looked at together": dict(lens=(*[50] * 280, 9000, *[50] * 30, 8000), heads=3),
    "the same, many rows": dict(lens=(*[50] * 280, 9000, *[50] * 30, 8000), heads=25),
}


@pytest.mark.parametrize("workgroups", [1, 7])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_was_split_is_merged(kernel, case, workgroups):
    merge = Merge(**case)
    assert merge.split
    merge.run(kernel, workgroups)
    merge.check()


@pytest.mark.parametrize("lens", [(512,) * 80, (0,), (64,) * 300], ids=len)
def test_where_nothing_was_split_nothing_is_done(kernel, lens):
    """Two words and the bounds of the first sequences are read, and nothing else."""
    merge = Merge(lens, heads=16)
    assert not merge.split
    workgroups, looked_at = 3, min(len(lens), 4 * 64)
    report = merge.run(kernel, workgroups)
    merge.check()
    assert not any(report.stored.values())
    assert {name for name, count in report.loaded.items() if count} == {"plan", "kernel arguments"}
    assert report.loaded["plan"] <= workgroups * 4 * (8 + 8 * looked_at)  # bytes of four waves each
