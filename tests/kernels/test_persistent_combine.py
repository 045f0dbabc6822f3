"""combine behind a decode with a plan, which sm_90 alone has: its source for gfx942, in the emulator, against fp64."""

from __future__ import annotations

import struct

import pytest
import torch
from merges import exact, partials
from own_kernels import assembly

import mla_suite
from mla_suite import archs
from mla_suite.archs.common import combine as native
from mla_suite.archs.sm_90.combine import PersistentCombineConfig
from mla_suite.build.params import load
from mla_suite.emulator import Emulator, Memory
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.plan.metadata import HEADER_WORDS, Plan
from mla_suite.testing import assert_close, poison

THREADS = 4 * 64
POINTERS = 7 * 8  # bytes of the addresses that begin the parameters


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return assembly("persistent_combine", "gfx942", tmp_path_factory.mktemp("planned"))


class Merge:
    """A plan's partials and what becomes of them; what decode would have written is poison."""

    def __init__(self, lens, heads, q_len=1, cu_seqlens_q=None, sink=False, **split):
        self.tokens = torch.arange(len(lens) + 1, dtype=torch.int32) * q_len
        if cu_seqlens_q is not None:
            self.tokens = torch.tensor(cu_seqlens_q, dtype=torch.int32)
        self.ragged, self.heads, self.q_len, self.batch = cu_seqlens_q is not None, heads, q_len, len(lens)
        lens = torch.tensor(lens, dtype=torch.int32)
        most = int(lens.max())
        self.plan = mla_suite.plan(lens, num_heads=heads * q_len, num_sm_parts=40, max_seqlen_kv=most, **split)
        self.bounds = Plan.read(self.plan).split_indptr
        self.partial_out, self.partial_lse = partials(max(self.bounds[-1], 1), heads * q_len)
        self.sink = torch.randn(heads) if sink else None
        count = int(self.tokens[-1])
        self.out, self.lse = poison(torch.empty(count, heads, 512)), poison(torch.empty(count, heads))

    @property
    def split(self):
        return [b for b in range(self.batch) if self.bounds[b + 1] > self.bounds[b]]

    def run(self, text, workgroups):
        rows = self.heads * self.q_len
        point = PersistentCombineConfig(archs.get("sm_90"), 512)
        launch = native.prepare(
            *(point, (self.batch, rows, self.heads)),
            ((rows * 512, 512), (rows, 1), (self.heads * 512, 512)),
            (LseLayout.contiguous(self.heads), False),
            *(True, torch.float32, self.heads, 1, (True, False)),
        )
        fields = load("combine")
        values = fields.unpack(bytes(POINTERS) + launch.numbers)
        assert values["workgroups"] == launch.grid[0]
        numbers = fields.pack(**{**values, "workgroups": workgroups})[POINTERS:]
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
        params = struct.pack(f"<{POINTERS // 8}Q", *places.values()) + numbers
        program = machine.load_text(text, "persistent_combine")
        report = machine.launch(program, (workgroups, 1, 1), THREADS, 0, params, memories)
        assert not report.findings, "\n".join(map(str, report.findings))
        return report

    def check(self):
        """Asserts that the sequences the plan split are merged and all else is as it was."""
        rows = self.heads * self.q_len
        sink = None if self.sink is None else self.sink.repeat(self.q_len)
        expected = exact(self.partial_out, self.partial_lse, self.bounds, sink) if self.split else None
        untouched = torch.ones(self.out.shape[0], dtype=torch.bool)
        for b in self.split:
            first, end = int(self.tokens[b]), int(self.tokens[b + 1])
            untouched[first:end] = False
            some = slice(0, (end - first) * self.heads)
            of_sequence = [part[b : b + 1, some] for part in expected]
            merged = self.out[first:end].reshape(1, -1, 512), self.lse[first:end].reshape(1, -1)
            assert rows >= merged[1].shape[1]
            assert_close(*merged, type(expected)(*of_sequence))
        assert self.out[untouched].view(torch.uint8).eq(0xFF).all()
        assert self.lse[untouched].view(torch.uint8).eq(0xFF).all()


CASES = {
    "few rows": dict(lens=(9000, 100, 60, 7000, 80), heads=16, sink=True),
    "few rows of many splits": dict(lens=(100, 60_000), heads=5),
    "long and short rows": dict(lens=(60_000, 3000, 100, 2500), heads=9, sink=True),
    "many rows": dict(lens=(3000, 100, 2000, 80, 3100, 2500), heads=40),
    "many rows, ragged tokens": dict(lens=(3000, 100, 2000, 3100), heads=11, q_len=3, cu_seqlens_q=(0, 3, 5, 6, 8)),
    "no tokens": dict(lens=(3000, 2000, 900), heads=7, q_len=2, cu_seqlens_q=(0, 1, 1, 3), num_splits=2),
    "every sequence": dict(lens=(300, 0, 70), heads=24, num_splits=3, sink=True),
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
