"""AITER's metadata and its reductions, one stage at a time, against the formula."""

import math

import pytest
import torch
from aiter_steps import MADE, Step, attend

from mla_suite.integrations import aiter, metadata_convert


def test_metadata_for_the_next_step_goes_into_the_same_plan():
    """So that a captured step that reads the plan replays with the new one."""
    step = Step([700, 2, 130], [1] * 3)
    made = step.metadata()
    pointers = made["work_meta_data"].view(torch.int64).tolist()
    assert pointers == [made["work_indptr"].data_ptr(), made["work_info_set"].data_ptr()]
    before = metadata_convert.lookup(made["work_info_set"], 3)
    words = before.clone()
    grown = Step([1, 1800, 9], [1] * 3)
    grown.fill(made)
    assert metadata_convert.lookup(made["work_info_set"], 3) is before
    assert not torch.equal(before, words)
    _, lse = aiter.mla_decode_fwd(*grown.args, return_lse=True, **made)
    grown.check(lse, grown.expected())


def test_steps_of_another_batch_leave_the_plan_where_a_captured_step_reads_it():
    """A server captures a step for each of several batches, all over the same buffers."""
    step, fewer = Step([700, 2, 130], [1] * 3), Step([50, 9], [1] * 2)
    made = step.metadata()
    captured = metadata_convert.lookup(made["work_info_set"], 3)
    captured.fill_(-1)
    fewer.fill(made)
    step.fill(made)
    assert metadata_convert.lookup(made["work_info_set"], 3) is captured
    read = metadata_convert.from_aiter(made["work_indptr"], made["work_info_set"], step.kv_indptr, page_size=1)
    assert torch.equal(captured, read)
    _, lse = aiter.mla_decode_fwd(*step.args, return_lse=True, **made)
    step.check(lse, step.expected())


def test_a_plan_made_in_inference_mode_is_renewed_outside_of_it():
    step = Step([700, 2, 130], [1] * 3)
    made = {name: torch.empty_like(buffer) for name, buffer in step.metadata().items()}
    with torch.inference_mode():
        step.fill(made)
    grown = Step([1, 1800, 9], [1] * 3)
    grown.fill(made)
    _, lse = aiter.mla_decode_fwd(*grown.args, return_lse=True, **made)
    grown.check(lse, grown.expected())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("work_info_set", (40, 7), r"work_info_set has shape \(40, 7\); it takes rows of 8"),
        ("reduce_final_map", (3, 1), r"reduce_final_map has shape \(3, 1\); it takes rows of 2"),
        ("work_indptr", (3, 3), r"work_indptr has shape \(3, 3\); it takes one dimension"),
        ("work_meta_data", (2,), r"work_metadata_ptrs is torch.int32 \(2,\); it takes two addresses"),
    ],
)
def test_buffers_of_another_kind_are_refused_before_any_is_written(name, shape, message):
    step = Step([700, 2, 130], [1] * 3)
    made = {key: torch.full_like(buffer, 7) for key, buffer in step.metadata().items()}
    made[name] = torch.full(shape, 7, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        step.fill(made)
    assert all(set(buffer.flatten().tolist()) == {7} for buffer in made.values())


@pytest.mark.parametrize("said", [dict(max_seqlen_qo=2), dict(uni_seqlen_qo=2), {}], ids=["most", "each", "unsaid"])
def test_two_stages_by_hand(said):
    """The works of a plan done one by one, then `mla_reduce_v1`, as a caller of AITER's low level does."""
    step = Step([700, 0, 130, 64], [2] * 4, page_size=4)
    made = step.metadata()
    step.fill(made, page_size=4, **said)
    heads, entries = 16, made["reduce_partial_map"].shape[0]
    partial_output = torch.full((entries * 2, 1, heads, 512), torch.nan)
    partial_lse = torch.full((entries * 2, 1, heads, 1), torch.nan)
    final_lse = torch.full((step.total, heads), torch.nan)
    splits = 0
    for work in made["work_info_set"][: int(made["work_indptr"][-1])].tolist():
        b, row, q_start, q_end, kv_start, kv_end, kv_offset = work[:7]
        assert kv_offset == max(step.kv_lens[b] - (kv_end - int(step.kv_indptr[b])) * 4, 0)
        for token in range(q_start, q_end):
            visible = step.kv_lens[b] - (q_end - 1 - token)
            first = (kv_start - int(step.kv_indptr[b])) * 4
            keys = step.keys(b)[first : max(min((kv_end - int(step.kv_indptr[b])) * 4, visible), first)]
            out, lse = attend(step.q[token], keys, 576**-0.5)
            if row < 0:
                step.o[token], final_lse[token] = out.bfloat16(), lse
            else:
                splits += 1
                partial_output[row + token - q_start, 0], partial_lse[row + token - q_start, 0, :, 0] = out, lse
    assert splits
    lists = (made[name] for name in MADE[3:])
    aiter.mla_reduce_v1(partial_output, partial_lse, *lists, 2, 0, step.o, final_lse)
    step.check(final_lse, step.expected())


def merge(outs, lses):
    weight = torch.softmax(lses, 0).nan_to_num(0.0)
    return (weight[..., None] * outs.nan_to_num(0.0)).sum(0), torch.logsumexp(lses, 0)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("final_map", [True, False])
def test_reduce_of_a_general_map(out_dtype, final_map):
    """Tiles out of order, partials scattered, tiles of 0 and 1 split left alone, absurd entries past the end."""
    outs, lses = torch.randn(40, 8, 128), torch.randn(40, 8) * 3
    lses[6:8] = -torch.inf
    reduce_indptr = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
    reduce_partial_map = torch.tensor([6, 0, 20, 30, 2, 4, 38, 10, 12, 2**31 - 1, -7], dtype=torch.int32)
    starts = [4, 0, 6, 2] if final_map else [0, 2, 4, 6]
    tiles = torch.tensor([[s, s + 2] for s in starts], dtype=torch.int32) if final_map else None
    final, final_lse = torch.full((9, 8, 128), 5.0, dtype=out_dtype), torch.full((9, 8), 5.0)
    aiter.mla_reduce_v1(outs, lses, reduce_indptr, tiles, reduce_partial_map, 2, 0, final, final_lse)
    untouched = torch.ones(9, dtype=torch.bool)
    for tile in (0, 3):
        rows = reduce_partial_map[reduce_indptr[tile] : reduce_indptr[tile + 1]].long()
        for i in range(2):
            token = starts[tile] + i
            expected, lse = merge(outs[rows + i], lses[rows + i])
            torch.testing.assert_close(final[token].float(), expected, rtol=2**-8, atol=1e-5)
            torch.testing.assert_close(final_lse[token], lse)
            untouched[token] = False
    assert untouched.sum() == 5
    assert bool((final[untouched] == 5).all() & (final_lse[untouched] == 5).all())


@pytest.mark.parametrize("batch", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("num_splits", [1, 5, 16])
def test_decode_reduce(num_splits, batch):
    """The standalone reduce of equal splits; a split without keys has lse -inf and may hold anything."""
    T, heads = 6, 16
    outs, lses = torch.randn(T, num_splits, heads, 512), torch.randn(T, num_splits, heads, 1) * 3
    if num_splits > 1:
        outs[:, -1], lses[:, -1] = torch.nan, -torch.inf
        lses[2] = -torch.inf
    reduced = torch.full((T, heads, 512), torch.nan, dtype=torch.bfloat16)
    kv_indptr = torch.arange(T + 1, dtype=torch.int32) * 100
    aiter.mla_decode_reduce(outs, lses, reduced, kv_indptr, T, batch, 4, num_splits)
    for t in range(T):
        expected, _ = merge(outs[t], lses[t, ..., 0])
        torch.testing.assert_close(reduced[t].float(), expected, rtol=2**-8, atol=1e-5)


def test_a_selection_of_no_sequence_is_planned():
    step = Step([20], [1])
    made = step.metadata()
    step.qo_indptr, step.kv_indptr = step.qo_indptr[:1], step.kv_indptr[:1]
    step.kv_last_page_lens = step.kv_last_page_lens[:0]
    step.fill(made, topk=4)
    used = made["work_info_set"][: int(made["work_indptr"][-1])]
    assert torch.equal(used[:, 4], used[:, 5]), "a work has keys"


def test_sizes_that_are_no_ints_are_refused():
    with pytest.raises(TypeError, match="get_mla_metadata_info_v1: batch_size is None; it takes an int"):
        aiter.get_mla_metadata_info_v1(None, 1, 16, torch.bfloat16, torch.bfloat16, is_sparse=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(final_lse=torch.full((4, 2), 7.0)),
            r"final_lse is torch.float32 \(4, 2\); it takes float32 .* = \(2, 4\)",
        ),
        (dict(final_lse=torch.full((2, 4), 7.0).bfloat16()), "final_lse is torch.bfloat16"),
        (dict(partial_output=torch.zeros(6, 2, 1024)), r"they take \[rows, 4, 512\] and \[rows, 4\]"),
        (dict(partial_lse=torch.zeros(5, 4)), r"they take \[rows, 4, 512\] and \[rows, 4\]"),
        (dict(partial_lse=torch.zeros(4, 6)), r"partial_lse \(4, 6\); they take \[rows, 4, 512\] and \[rows, 4\]"),
        (dict(reduce_final_map=torch.tensor([[0, 1]])), r"reduce_indptr has 2 tiles: it takes \[2, 2\]"),
    ],
)
def test_a_reduction_is_refused_before_it_writes(changes, message):
    final = torch.full((2, 4, 512), 7.0)
    given = dict(
        partial_output=torch.zeros(6, 4, 512),
        partial_lse=torch.zeros(6, 4),
        reduce_indptr=torch.tensor([0, 3, 6], dtype=torch.int32),
        reduce_final_map=None,
        reduce_partial_map=torch.arange(6, dtype=torch.int32),
    )
    with pytest.raises(ValueError, match=message):
        aiter.mla_reduce_v1(**{**dict(max_seqlen_q=1, num_kv_splits=3, final_output=final), **given, **changes})
    assert bool((final == 7.0).all()), "written although refused"


def test_a_reduction_of_no_partials_leaves_everything():
    final = torch.full((2, 4, 512), 7.0)
    empty, places = torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    aiter.mla_reduce_v1(torch.zeros(0, 4, 512), torch.zeros(0, 4), empty, None, places, 1, 0, final)
    assert bool((final == 7.0).all())


def test_splits_that_a_token_does_not_have_are_not_read():
    """Tokens of fewer pages than splits: what nobody wrote, or wrote for another step, changes nothing."""
    pages, num_splits, heads = [3, 0, 100, 8], 8, 16
    outs, lses = torch.randn(4, num_splits, heads, 512), torch.randn(4, num_splits, heads)
    wanted = []
    for token, count in enumerate(pages):
        used = min(count, num_splits)
        wanted.append(merge(outs[token, :used], lses[token, :used])[0] if used else torch.zeros(heads, 512))
        outs[token, used:] = torch.nan if token == 0 else 9.0
        lses[token, used:] = torch.nan if token == 0 else 20.0
    kv_indptr = torch.tensor([0, *pages]).cumsum(0).int()
    reduced = torch.full((4, heads, 512), torch.nan)
    aiter.mla_decode_reduce(outs, lses, reduced, kv_indptr, 4)
    torch.testing.assert_close(reduced, torch.stack(wanted), rtol=1e-5, atol=1e-5)
    binary = torch.full((4, heads, 512), torch.nan)
    aiter.mla_decode_reduce(outs, lses / math.log(2), binary, kv_indptr, 4, base2=True)
    torch.testing.assert_close(binary, reduced, rtol=1e-5, atol=1e-5)


def test_general_reduce_of_binary_logarithms():
    outs, lses = torch.randn(6, 4, 512), torch.randn(6, 4) * 3
    lists = torch.tensor([0, 3, 6]).int(), None, torch.arange(6).int(), 1, 3
    results = []
    for given, base2 in ((lses, False), (lses / math.log(2), True)):
        final, final_lse = torch.empty(2, 4, 512), torch.empty(2, 4)
        aiter.mla_reduce_v1(outs, given, *lists, final, final_lse, base2=base2)
        results.append((final, final_lse))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[0][1], lses.view(2, 3, 4).logsumexp(1))
