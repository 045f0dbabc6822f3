"""Splits of a plan, to be merged by a combine behind decode; the tests of these kernels share them."""

from __future__ import annotations

import kernels_on_host
import torch
from merges import exact, partials

import mla_suite
from mla_suite.archs import combine as native
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.plan.metadata import Plan
from mla_suite.testing import assert_close, poison

NAMES = ("partial_out", "partial_lse", "split_indptr", "cu_seqlens_q", "attn_sink", "out", "lse")
POINTERS = dict.fromkeys(NAMES)
CASES = {
    "few rows": dict(lens=(9000, 100, 60, 7000, 80), heads=16, sink=True),
    "long and short rows": dict(lens=(60_000, 3000, 100, 2500), heads=9, sink=True),
    "many rows": dict(lens=(3000, 100, 2000, 80, 3100, 2500), heads=40),
    "ragged tokens": dict(lens=(3000, 100, 2000, 3100), heads=11, q_len=3, cu_seqlens_q=(0, 3, 5, 6, 8)),
    "no tokens": dict(lens=(3000, 2000, 900), heads=7, q_len=2, cu_seqlens_q=(0, 1, 1, 3), num_splits=2),
    "every sequence": dict(lens=(300, 0, 70), heads=24, num_splits=3, sink=True),
}
"""Arguments of `PlanMerge` for every kernel that merges what a plan split."""


class PlanMerge:
    """A plan's partials and what becomes of them; what decode would have written is poison."""

    def __init__(self, lens, heads, q_len=1, cu_seqlens_q=None, sink=False, parts=40, **split):
        self.tokens = torch.arange(len(lens) + 1, dtype=torch.int32) * q_len
        if cu_seqlens_q is not None:
            self.tokens = torch.tensor(cu_seqlens_q, dtype=torch.int32)
        self.ragged, self.heads, self.q_len, self.batch = cu_seqlens_q is not None, heads, q_len, len(lens)
        lens = torch.tensor(lens, dtype=torch.int32)
        most = int(lens.max())
        self.plan = mla_suite.plan(lens, num_heads=heads * q_len, num_sm_parts=parts, max_seqlen_kv=most, **split)
        self.bounds = Plan.read(self.plan).split_indptr
        self.final: set[int] = set()  # split sequences whose results decode has stored
        self.partial_out, self.partial_lse = partials(max(self.bounds[-1], 1), heads * q_len)
        self.sink = torch.randn(heads) if sink else None
        count = int(self.tokens[-1])
        self.out, self.lse = poison(torch.empty(count, heads, 512)), poison(torch.empty(count, heads))

    @property
    def split(self):
        return [b for b in range(self.batch) if self.bounds[b + 1] > self.bounds[b] and b not in self.final]

    def prepared(self, config, num_splits=1, skip_none=1):
        """The launch of a combine with this configuration."""
        rows = self.heads * self.q_len
        return native.launch_of(
            *(config, (self.batch, rows, self.heads)),
            ((rows * 512, 512), (rows, 1), (self.heads * 512, 512)),
            (LseLayout.contiguous(self.heads), False),
            *(True, torch.float32, self.heads, num_splits, (skip_none, False), POINTERS),
        )

    def run_on_host(self, program, launch, blocks, parts=None):
        """Runs a launch in `blocks` blocks by a program of cuda_on_host/combine; `parts` stand for the partials."""
        params = kernels_on_host.packed("combine", launch, workgroups=blocks)
        nothing = torch.zeros(0, dtype=torch.int32)
        tokens, sink = self.tokens if self.ragged else nothing, nothing if self.sink is None else self.sink
        arrays = *(parts or (self.partial_out, self.partial_lse)), self.plan, tokens, sink, self.out, self.lse
        done = kernels_on_host.merged(program, blocks, params, arrays, seed=1)
        assert done.returncode == 0, done.stdout + done.stderr

    def check(self):
        """Asserts that `split` sequences are merged and all else is as it was."""
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
