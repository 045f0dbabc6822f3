"""How sm_90's sparse_decode splits selections: counts, clusters, and keys as the first operand."""

from __future__ import annotations

import pytest
import torch
from backend_calls import BackendCalls
from sparse_problems import problem

import mla_suite
from mla_suite import archs
from mla_suite.archs.sm_90 import sparse_decode as sm_90
from mla_suite.archs.sm_90 import sparse_splits
from mla_suite.archs.sm_90.sparse_decode import FEW_ROWS, SLOTS, Sm90SparseConfig
from mla_suite.core.explain import explain_on
from mla_suite.launch.launcher import read_rate
from mla_suite.ops.sparse_decode import SPARSE_DECODE

NATIVE = BackendCalls(SPARSE_DECODE, "native")

H200 = archs.get("sm_90")


def best_splits(arch, record, tokens, heads, keys):
    """What the cost model chooses now, whatever it did before."""
    config = Sm90SparseConfig(arch, record, "share_kv" if heads == 128 else "none")
    return sparse_splits.best_splits.__wrapped__(config, tokens, heads, keys)


H100 = H200.on_device(132, memory_bytes_per_s=3_100_000_000_000)


@pytest.mark.parametrize(
    ("card", "record", "tokens", "heads", "keys", "splits"),
    [
        (H200, "v32", 128, 128, 2048, 1),
        (H200, "v32", 32, 128, 2048, 2),
        (H200, "v32", 8, 128, 2048, 8),
        (H200, "v32", 1, 128, 2048, 22),
        (H200, "dsv4", 128, 128, 1152, 1),
        (H200, "dsv4", 8, 128, 1152, 6),
        (H200, "dsv4", 1, 128, 1152, 18),
        (H200, "v32", 128, 64, 2048, 1),
        (H200, "v32", 32, 64, 2048, 4),
        (H200, "v32", 1, 64, 2048, 32),
        (H200, "v32", 1, 16, 2048, 64),
        (H200, "dsv4", 32, 64, 640, 4),
        (H200, "dsv4", 1, 64, 640, 20),
        (H100, "v32", 8, 128, 2048, 6),  # 8 leave combine too few SMs, as in the next two
        (H100, "v32", 16, 64, 2048, 6),
        (H100, "dsv4", 24, 64, 640, 3),
        (H100, "dsv4", 32, 64, 640, 2),  # on an H200 partials cost less, and 4 are faster
        (H100, "dsv4", 16, 128, 1152, 4),
        (H100, "v32", 1, 64, 2048, 32),
    ],
)
def test_split_counts_are_the_best_that_were_measured(monkeypatch, card, record, tokens, heads, keys, splits):
    """csrc/sm_90/sparse_decode/PERF.md: of half, as many and twice as many on an H200, of 8 to 16 on an H100."""
    monkeypatch.setattr(sm_90, "REDUCED", ())
    assert best_splits(card, record, tokens, heads, keys) == splits


@pytest.mark.parametrize(
    ("record", "tokens", "heads", "keys", "splits", "mode"),
    [
        ("dsv4", 4, 64, 640, 10, "none"),
        ("dsv4", 32, 64, 640, 2, "reduce_o"),
        ("v41", 64, 64, 640, 2, "reduce_o"),
        ("dsv4", 66, 64, 640, 2, "reduce_o"),
        ("dsv4", 67, 64, 640, 1, "none"),  # more clusters than there is room for
        ("dsv4", 8, 64, 640, 4, "reduce_four"),
        ("dsv4", 29, 64, 640, 4, "reduce_four"),
        ("dsv4", 30, 64, 640, 2, "reduce_o"),  # there may be room for no more than 29 clusters of four
        ("v32", 16, 64, 2048, 8, "reduce_o"),
        ("v32", 24, 64, 2048, 4, "reduce_four"),
        ("v32", 32, 64, 2048, 4, "reduce_o"),
        ("dsv4", 8, 128, 1152, 6, "share_and_reduce"),
        ("dsv4", 14, 128, 1152, 4, "reduce_four"),
        ("v32", 12, 128, 2048, 4, "reduce_four"),
        ("dsv4", 20, 16, 640, 5, "none"),
        ("dsv4", 24, 16, 640, 4, "reduce_four"),
        ("v41", 24, 8, 640, 5, "none"),
        ("dsv4", 32, 16, 640, 4, "none"),
        ("v41", 64, 16, 640, 2, "reduce_o"),
        ("v32", 64, 16, 2048, 2, "none"),
        ("dsv4", 24, 128, 1152, 2, "share_and_reduce"),
        ("v32", 29, 128, 2048, 2, "share_and_reduce"),
        ("v32", 30, 128, 2048, 2, "reduce_o"),
        ("dsv4", 34, 128, 1152, 1, "share_kv"),
        ("fp8x576", 24, 128, 2048, 2, "share_kv"),
        ("bf16x576", 1, 64, 2048, 32, "none"),
        ("bf16x576", 20, 64, 2048, 4, "reduce_four"),
        ("bf16x576", 32, 64, 2048, 4, "reduce_o"),
        ("bf16x576", 64, 64, 2048, 2, "reduce_o"),
        ("bf16x576", 8, 64, 512, 4, "reduce_four"),
        ("bf16x576", 12, 128, 2048, 4, "reduce_four"),
        ("bf16x576", 8, 128, 2048, 6, "none"),
        ("bf16x576", 24, 128, 2048, 2, "none"),
        ("bf16x576", 32, 128, 512, 2, "reduce_o"),
        ("bf16x576", 64, 128, 2048, 1, "none"),
    ],
)
def test_clusters_reduce_where_that_was_faster(record, tokens, heads, keys, splits, mode):
    """On an H200 (S36, S39 and S40 in csrc/sm_90/sparse_decode/PERF.md)."""
    config = Sm90SparseConfig(H200, record, "share_kv" if heads == 128 and record in SLOTS else "none")
    if heads <= FEW_ROWS:
        config = Sm90SparseConfig(H200, record, q_rows=FEW_ROWS, few_heads=True)
    assert sparse_splits.best_splits(config, tokens, heads, keys) == splits
    assert sparse_splits.fastest(config, tokens, heads, keys, splits).cluster_mode == mode


@pytest.mark.parametrize(
    ("record", "tokens", "keys", "splits"),
    [("dsv4", 128, 640, 1), ("dsv4", 32, 640, 4), ("v41any", 8, 640, 10), ("v41", 1, 640, 10), ("v32", 1, 2048, 32)],
)
def test_split_counts_of_few_heads_are_whole_stages(record, tokens, keys, splits):
    """The best, or within 2 % of it, among five counts on an H100: a split shorter than 64 keys saves no time."""
    few = Sm90SparseConfig(H100, record, q_rows=FEW_ROWS, few_heads=True)
    assert sparse_splits.best_splits(few, tokens, 16, keys) == splits


@pytest.mark.parametrize(
    ("heads", "topk", "options", "rows"),
    [
        (1, 640, {"num_splits": 1}, 16),
        (16, 2048, {"num_splits": 3}, 16),
        (16, 2048, {"num_splits": 4}, 64),
        (17, 2048, {"num_splits": 1}, 32),
        (32, 2047, {"num_splits": 1}, 64),
        (33, 4096, {"num_splits": 1}, 64),
        (16, 40, {"split_size": 1024}, 16),
        (16, 4096, {"split_size": 512}, 64),
        (17, 40, {"split_size": 2048}, 32),
    ],
)
def test_long_splits_of_few_heads_have_keys_as_the_first_operand(heads, topk, options, rows):
    args, kwargs = problem([("v32", 3, 64, topk)], 2, heads)
    seen = explain_on(H200, "sparse_decode", *args, **kwargs | options)
    assert any(f"qrows-{rows}" in note for note in seen.notes) == (rows != 64), seen.notes


@pytest.mark.parametrize(
    ("heads", "topk", "first"), [(16, 512, False), (16, 16384, False), (32, 4095, False), (32, 4096, True)]
)
def test_splits_are_longer_where_memory_is_slower(heads, topk, first):
    h100 = H200.on_device(132, read_rate(2_619_000, 5120))
    assert read_rate(3_201_000, 6144) == pytest.approx(H200.memory_bytes_per_s, rel=0.01)
    assert read_rate(0, 0) is None
    args, kwargs = problem([("v32", 3, 64, topk)], 2, heads)
    notes = explain_on(h100, "sparse_decode", *args, **kwargs, num_splits=1).notes
    assert any("qrows" in note for note in notes) == first, notes


@pytest.mark.parametrize("split_size", [512, 1024, 1536, 2048, 4096])
def test_batch_invariant_calls_do_not_depend_on_the_card(split_size):
    h100 = H200.on_device(132, read_rate(2_619_000, 5120), 1755)
    for heads in (16, 32):
        args, kwargs = problem([("v32", 3, 64, 4096)], 2, heads)
        of_cards = [
            explain_on(card, "sparse_decode", *args, **kwargs, split_size=split_size).notes for card in (H200, h100)
        ]
        assert of_cards[0] == of_cards[1]


def test_a_planned_batch_has_keys_as_the_first_operand_where_its_parts_are_long():
    for tokens, first in ((2, False), (64, True)):
        args, kwargs = problem([("v32", 3, 64, 2048)], tokens, 16)
        args[6] = mla_suite.plan(torch.full((tokens,), 2048, dtype=torch.int32), num_heads=16, num_sm_parts=64)
        notes = explain_on(H200, "sparse_decode", *args, **kwargs).notes
        assert any("qrows-16" in note for note in notes) == first, notes
