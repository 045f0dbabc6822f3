"""Which of sm_90's merges a call of decode gets: by combine behind it or beside it, or by clusters before it."""

from __future__ import annotations

import pytest
import torch
from decode_launches import launched, long_call

from mla_suite.archs import combine
from mla_suite.archs.attention import DECODE_INPUTS
from mla_suite.archs.sm_90.costs import Estimate
from mla_suite.core import dispatch
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.metadata import Layout


@pytest.mark.parametrize(
    ("options", "streamed"),
    [
        (dict(heads=16, num_splits=8), True),
        (dict(heads=64, num_splits=4), True),
        (dict(heads=5, q_len=3, num_splits=8, varlen=True), True),
        (dict(heads=16, num_splits=8, page=7), False),  # gathered: the warps that would fill bring keys
        (dict(heads=33, num_splits=8), False),  # 33 rows take as long to fill as four stages, and a split has three
        (dict(heads=128, num_splits=4), True),
        (dict(heads=128, num_splits=3), True),
        (dict(heads=128, q_len=2, num_splits=4), False),  # no room for a workgroup of each row beside
        (dict(heads=16, num_splits=39), False),  # neighbours
        (dict(heads=16, num_splits=40), True),  # neighbours that have one side each
        (dict(heads=8, num_splits=66), False),  # two items for some blocks
        (dict(heads=16, split_size=64), False),  # the order of the merge may not depend on the batch
        (dict(heads=16, planned=True), True),  # sequences are too short for a plan
        (dict(heads=16, planned=True, page=24), False),
    ],
)
def test_which_partials_are_streamed(monkeypatch, options, streamed):
    call = launched(monkeypatch, decode_sample((700, 90, 5), **options))
    assert call.fields["streaming"] == int(streamed)
    assert ("streaming" in call.merges[0]["kernel"]) is streamed


@pytest.mark.parametrize(("given", "seconds"), [(None, 20), ("", 20), ("0", 0), ("300", 300)])
def test_how_long_a_streaming_combine_waits(monkeypatch, given, seconds):
    dispatch.clear_caches()
    if given is not None:
        monkeypatch.setenv("MLA_SUITE_WAIT_SECONDS", given)
    (merge,) = launched(monkeypatch, decode_sample((700, 90, 5), heads=16, num_splits=8)).merges
    assert merge["workgroups"] == seconds


@pytest.mark.parametrize("given", ["-1", "soon", "4001", "1.5"])
def test_a_limit_that_is_none_is_refused(monkeypatch, given):
    dispatch.clear_caches()
    monkeypatch.setenv("MLA_SUITE_WAIT_SECONDS", given)
    with pytest.raises(ValueError, match=f"MLA_SUITE_WAIT_SECONDS={given}: it is a whole number of seconds up to 4000"):
        launched(monkeypatch, decode_sample((700, 90, 5), heads=16, num_splits=8))


@pytest.mark.parametrize(
    ("options", "exchange"),
    [
        (dict(heads=33), "exchange_p"),
        (dict(heads=16, q_len=4, varlen=True, sink=True), "exchange_p"),
        (dict(lens=(4000, 700, 5), heads=33), "reduce_o"),
        (dict(heads=33, num_splits=3), "none"),
        (dict(heads=33, page=24), "none"),  # gathered
        (dict(heads=33, split_size=256), "none"),  # the order of the merge may not depend on the batch
        (dict(heads=128, q_len=12), "share_kv"),  # 24 tiles: two items for some blocks
        (dict(lens=(700,), heads=16, num_splits=20), "none"),  # combine merges so few rows beside decode
    ],
)
def test_which_cuts_a_cluster_merges(monkeypatch, options, exchange):
    """Two take no scratch, and nothing is launched behind them."""
    merged = exchange in ("reduce_o", "exchange_p")
    split = {} if "split_size" in options else dict(num_splits=2)
    sample = decode_sample(**dict(lens=(700, 90, 5)) | split | options)
    call = launched(monkeypatch, sample)
    fields = call.fields
    assert call.kernel.endswith(f"_clustermode-{exchange}")
    assert len(call.merges) == (not merged)
    assert (fields["partial_out"] == 0, "partial_out" not in call.buffers) == (merged, merged)
    if merged:
        assert (call.grid[1], fields["num_splits"], fields["grid_stride"]) == (6, 2, 6)
        assert call.smem == (210992 + 5 * 4 * 64 + 8 * 20 if exchange == "reduce_o" else 219328)


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        (dict(heads=128, num_splits=1), True),
        (dict(heads=65, num_splits=3), True),
        (dict(heads=32, q_len=4, split_size=64), True),
        (dict(heads=32, q_len=4, split_size=64, planned=True), True),
        (dict(heads=128, planned=True), True),  # balanced
        (dict(heads=128, q_len=2, planned=True), False),
        (dict(heads=128, num_splits=1, lens=(700, 90) * 28), False),  # 56 of 66 pairs of SMs
        (dict(heads=64, num_splits=1), False),  # one tile
        (dict(heads=64, q_len=3, num_splits=1), False),  # three
        (dict(heads=128, rope=0, num_splits=1), True),
        (dict(heads=128, num_splits=1, window_left=70), True),
        (dict(heads=128, num_splits=1, rotate=True), False),
        (dict(heads=128, num_splits=1, page=48), False),
    ],
)
def test_two_row_tiles_share_keys(monkeypatch, options, shared):
    """A sequence's, of a batch that leaves few SMs free and has no splits that a cluster merges."""
    args, kwargs = long_call(**{"lens": (700, 90) * 70} | options)
    kwargs["max_seqlen_kv"] = 50_000 if options.get("planned") else 0
    call = launched(monkeypatch, (args, kwargs))
    assert ("clustermode-share_kv" in call.kernel) == shared
    if shared:
        assert call.grid[0] % 2 == 0
        of_keys = {box[2] for *_, box in call.maps if box[0] == 64}
        assert of_keys == ({4} if options.get("rope") == 0 else {5, 4}), "column blocks, of which each CTA loads a box"


@pytest.mark.parametrize(("keys", "exchange", "blocks"), [(4000, "reduce_o", 9), (1000, "exchange_p", 1)])
def test_more_cuts_leave_half_as_many_partials(monkeypatch, keys, exchange, blocks):
    """Which combine merges: each two splits are one partial."""
    call = launched(monkeypatch, long_call((keys,) * 16, heads=128, num_splits=4))
    assert call.kernel.endswith(f"_clustermode-{exchange}")
    assert (call.grid, call.fields["num_splits"], call.fields["streaming"]) == ((2, 64, 1), 4, 0)
    assert call.buffers["partial_out"].shape == (32, 128, 512)
    assert [merge["num_splits"] for merge in call.merges] == [2], "partials of each sequence"
    assert call.maps[0][-1] == (64, 32, blocks, 1), "keys of a box"


def with_plan(options, batch, parts, bound):
    """The arguments of a call with a plan of this size, whose words a launch does not depend on."""
    args, kwargs = decode_sample((100,) * batch, **options).make(torch.device("cpu"))
    at = DECODE_INPUTS["plan"].position
    plan = torch.zeros(Layout(batch, parts, batch + parts).words, dtype=torch.int32)
    return (*args[:at], plan, *args[at + 1 :]), {**kwargs, "max_seqlen_kv": bound}


@pytest.mark.parametrize(
    ("batch", "options", "parts", "bound", "mode"),
    [
        (33, dict(heads=128), 66, 8000, "share_kv"),  # two row tiles
        (33, dict(heads=128, kv_format="fp8"), 66, 8000, "reduce_last"),  # two SM parts for each sequence
        (34, dict(heads=128, kv_format="fp8"), 66, 8000, "none"),  # most sequences have one
        (16, dict(heads=128, kv_format="fp8"), 66, 8000, "none"),  # not worth two row tiles apart
        (16, dict(heads=64), 132, 8000, "reduce_last"),
        (16, dict(heads=16), 132, 8000, "none"),  # few rows: partials are small
        (66, dict(heads=16), 132, 8000, "reduce_last"),
        (66, dict(heads=16, kv_format="fp8"), 132, 8000, "swap_ab"),  # another kernel would have to take its place
        (66, dict(heads=16), 132, 250, "none"),  # too short to be split
        (33, dict(heads=128, page=24), 66, 8000, "none"),  # gathered
        (33, dict(heads=128, split_size=64), 66, 8000, "share_kv"),  # an order that is the same in any batch
    ],
)
def test_which_plans_are_walked_in_pairs(monkeypatch, batch, options, parts, bound, mode):
    """By sizes alone, since the plan is on the device; combine then looks for rows that were merged."""
    monkeypatch.setattr(Estimate, "plan_saves_little", lambda self, splits: False)
    call = launched(monkeypatch, with_plan(options, batch, parts, bound))
    assert mode in call.kernel
    pairs = mode == "reduce_last"
    skipped = [(merge["skip_none"], merge["skip_single"]) for merge in call.merges]
    assert skipped == [(combine.MAY_BE_MERGED if pairs else 1, 0)]
    assert call.grid[:2] == (-(-options["heads"] // 64), parts)
    if pairs and "kv_format" not in options:
        assert call.smem == 210992 + 5 * 4 * 64 + 8 * 20


@pytest.mark.parametrize(
    ("batch", "options", "bound", "used"),
    [
        (1, {}, 100_000, False),  # nothing to share
        (1, dict(num_splits=4), 100_000, True),
        (8, {}, 1000, False),
        (8, {}, 16_000, True),
        (32, {}, 500, False),
        (32, {}, 2000, True),
        (200, {}, 500, True),  # two sequences for some CTAs
        (8, dict(page=24), 1000, True),  # gathered keys have no clusters
        (8, dict(split_size=256), 1000, True),
    ],
)
def test_which_plans_are_needed(monkeypatch, batch, options, bound, used):
    call = launched(monkeypatch, with_plan(dict(heads=128) | options, batch, 66, bound))
    assert (call.fields["plan"] != 0) is used
