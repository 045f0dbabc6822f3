"""Every plan format is read as its owner describes it: each key counts once, and each partial result is merged."""

import itertools

import pytest
import torch

import mla_suite
from mla_suite import archs
from mla_suite.integrations import metadata_convert
from mla_suite.ops.plan import reference
from mla_suite.ops.plan.metadata import OPEN, Plan

LENGTHS = {
    "ragged": [700, 0, 64, 1, 3000],
    "one": [5000],
    "equal": [256] * 6,
    "empty": [0, 0, 0],
    "short": [1, 2, 3, 4, 5, 6, 7],
}


def as_tensor(lengths):
    return torch.tensor(lengths, dtype=torch.int32)


def plan_of(lengths, num_sm_parts, **choices):
    """A plan for 16 query rows of each sequence; a balanced one needs not know the longest."""
    options = dict(num_heads=16, num_sm_parts=num_sm_parts, max_seqlen_kv=max(lengths) or 1 if choices else 0)
    return mla_suite.plan(as_tensor(lengths), **options, **choices)


def rows_between(splits):
    return [list(range(first, end)) for first, end in itertools.pairwise(splits)]


def ours(plan):
    """Works (sequence, first key, end, row of a partial result or -1), and the rows that each sequence merges."""
    read = Plan.read(plan)
    assert read.work_indptr[0] == 0
    assert read.work_indptr[-1] == len(read.work_tiles)
    assert [tile[2] for tile in read.work_tiles].count(OPEN) == len(read.split_indptr) - 1
    return read.work_tiles, rows_between(read.split_indptr)


def flash_mlas(metadata, num_splits, lengths):
    """Every part walks its requests: from its first block, through whole requests, to its last block."""
    works, splits = [], num_splits.tolist()
    for begin, end, begin_block, end_block, begin_split, first_split, last_split, _ in metadata.tolist():
        if begin >= len(lengths):
            continue
        for b in range(begin, end + 1):
            alone = splits[b + 1] - splits[b] == 1
            if b == begin:
                assert bool(first_split) != alone
            if b == end:
                assert bool(last_split) != alone
            first, stop = begin_block * 64 if b == begin else 0, end_block * 64 if b == end else lengths[b]
            works.append((b, first, stop, splits[b] + (begin_split if b == begin else 0)))
    return works, rows_between(splits)


def aiters(made, kv_indptr, page, lengths):
    """Every cluster does its works; the reduction merges the partials of each tile that has some."""
    works, merged = [], [[] for _ in lengths]
    for begin, end in itertools.pairwise(made.work_indptr.tolist()):
        for b, row, q_start, q_end, kv_start, kv_end, kv_offset, _ in made.work_info_set[begin:end].tolist():
            assert (q_start, q_end) == (b, b + 1)
            first, stop = ((index - int(kv_indptr[b])) * page for index in (kv_start, kv_end))
            assert kv_offset == max(lengths[b] - stop, 0)
            works.append((b, first, stop, row))
    for tile, (begin, end) in enumerate(itertools.pairwise(made.reduce_indptr.tolist())):
        if end > begin:
            merged[int(made.reduce_final_map[tile, 0])] = made.reduce_partial_map[begin:end].tolist()
    return works, merged


def check(read, lengths):
    """Each key of each sequence is in one work, and its partial results are merged; a work alone may need no merge."""
    works, merged = read
    for b, length in enumerate(lengths):
        own = [work[1:] for work in works if work[0] == b]
        keys = sorted(key for first, stop, _ in own for key in range(first, min(stop, length)))
        assert keys == list(range(length))
        rows = [row for *_, row in own if row >= 0]
        assert rows == merged[b]
        assert len(rows) == len(own) > 0 or len(own) == 1


def to_aiter(plan, lengths, num_sm_parts, page):
    """AITER's lists, and the kv_indptr that they were made for."""
    pages = (as_tensor(lengths) + page - 1) // page
    kv_indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    last = as_tensor(lengths) - (pages - 1) * page  # tokens in the last page; read of no sequence without pages
    sizes = dict(num_sm_parts=num_sm_parts, page_size=page, max_seqlen_q=1, kv_last_page_lens=last)
    return metadata_convert.to_aiter(plan, torch.arange(len(lengths) + 1).int(), kv_indptr, **sizes), kv_indptr


CHOICES = [{}, {"num_splits": 3}, {"split_size": 192}]


@pytest.mark.parametrize("choices", CHOICES, ids=["balanced", "num_splits", "split_size"])
@pytest.mark.parametrize("num_sm_parts", [1, 5, 20])
@pytest.mark.parametrize("name", LENGTHS)
def test_flash_mla_and_back(name, num_sm_parts, choices):
    lengths = LENGTHS[name]
    plan = plan_of(lengths, num_sm_parts, **choices)
    check(ours(plan), lengths)
    theirs = metadata_convert.to_flash_mla(plan, as_tensor(lengths), num_sm_parts=num_sm_parts)
    assert theirs.tile_scheduler_metadata.shape == (num_sm_parts, 8)
    check(flash_mlas(*theirs, lengths), lengths)
    back = metadata_convert.from_flash_mla(theirs.tile_scheduler_metadata, len(lengths))
    check(ours(back), lengths)
    assert choices or torch.equal(back, plan), "a balanced plan survives word for word"


def test_columns_of_the_older_format():
    lengths, older = LENGTHS["ragged"], dict(columns=metadata_convert.OlderFlashMlaColumn)
    plan = plan_of(lengths, 5)
    now, splits = metadata_convert.to_flash_mla(plan, as_tensor(lengths), num_sm_parts=5)
    then, same = metadata_convert.to_flash_mla(plan, as_tensor(lengths), num_sm_parts=5, **older)
    assert torch.equal(then[:, :5], now[:, [0, 2, 1, 3, 4]])
    assert torch.equal(splits, same)
    assert torch.equal(metadata_convert.from_flash_mla(then, len(lengths), **older), plan)


@pytest.mark.parametrize("choices", CHOICES, ids=["balanced", "num_splits", "split_size"])
@pytest.mark.parametrize("page", [1, 16, 61, 64, 256])
@pytest.mark.parametrize("name", LENGTHS)
def test_aiter_and_back(name, page, choices):
    lengths = LENGTHS[name]
    plan = plan_of(lengths, 5, **choices)
    theirs, kv_indptr = to_aiter(plan, lengths, 5, page)
    check(aiters(theirs, kv_indptr, page, lengths), lengths)
    back = metadata_convert.from_aiter(theirs.work_indptr, theirs.work_info_set, kv_indptr, page_size=page)
    check(ours(back), lengths)
    assert choices or page != 64 or torch.equal(back, plan), "a balanced plan survives word for word"


def test_sequences_dealt_out_of_order(monkeypatch):
    """FlashMLA's format cannot say so: its lists are those of another plan, with the sequences in order."""
    for module in (reference, metadata_convert):
        monkeypatch.setattr(module, "current_arch", lambda tensor: archs.get("sm_90"))
    lengths, num_sm_parts = [50 * i % 700 for i in range(1, 40)], 20
    plan = plan_of(lengths, num_sm_parts)
    sequences = [tile[0] for tile in Plan.read(plan).work_tiles]
    assert sequences != sorted(sequences)
    check(ours(plan), lengths)
    in_order = metadata_convert.in_order(plan, as_tensor(lengths), num_q_rows=16, num_sm_parts=num_sm_parts)
    sequences = [tile[0] for tile in Plan.read(in_order).work_tiles]
    assert sequences == sorted(sequences)
    theirs = metadata_convert.to_flash_mla(in_order, as_tensor(lengths), num_sm_parts=num_sm_parts)
    check(flash_mlas(*theirs, lengths), lengths)
    # AITER's lists name a sequence with every work, so they keep any order.
    theirs, kv_indptr = to_aiter(plan, lengths, num_sm_parts, 64)
    check(aiters(theirs, kv_indptr, 64, lengths), lengths)
    back = metadata_convert.from_aiter(theirs.work_indptr, theirs.work_info_set, kv_indptr, page_size=64)
    check(ours(back), lengths)


def test_a_plan_that_is_never_dealt_is_the_same_plan():
    plan = plan_of(LENGTHS["ragged"], 20)
    lens = as_tensor(LENGTHS["ragged"])
    assert metadata_convert.in_order(plan, lens, num_q_rows=16, num_sm_parts=20) is plan


def flash_mla_planner(lengths, parts):
    """A plan as FlashMLA's own planner makes it: an even payload of blocks, a fixed overhead for every request."""
    overhead = 5
    blocks = [max(-(-n // 64), 1) for n in lengths]
    payload = -(-sum(n + overhead for n in blocks) // parts) + overhead
    request, block, split, rows, counts = 0, 0, 0, [], []
    for _ in range(parts):
        begin, left = (request, block, split), payload
        while request < len(lengths):
            remaining = blocks[request] - block
            if left >= remaining + overhead:
                left -= remaining + overhead
                counts.append(split + 1)
                request, block, split = request + 1, 0, 0
                continue
            if left > overhead:
                block, split = block + left - overhead, split + 1
            break
        last = request if block else request - 1
        end_block = block or (0 if lengths[last] == 0 else blocks[last])
        rows.append((begin[0], last, begin[1], end_block, begin[2], 0, 0, 0))
    return torch.tensor(rows, dtype=torch.int32), torch.tensor([0, *counts]).cumsum(0)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_plan_made_by_flash_mla(name):
    metadata, num_splits = flash_mla_planner(LENGTHS[name], parts=12)
    plan = metadata_convert.from_flash_mla(metadata, len(LENGTHS[name]))
    check(ours(plan), LENGTHS[name])
    theirs = num_splits.diff()
    assert torch.equal(torch.tensor(Plan.read(plan).split_indptr).diff(), torch.where(theirs > 1, theirs, 0))


def test_several_query_tiles_per_sequence():
    """A cluster that returns to the first key for a second tile moves no split backwards."""
    works = [(0, 0, 0, 1, 0, 256), (0, 1, 0, 1, 256, 512), (0, 2, 0, 1, 0, 256), (0, 3, 0, 1, 256, 512)]
    info = torch.tensor([(*work, 512 - work[-1], 0) for work in works], dtype=torch.int32)
    plan = metadata_convert.from_aiter(torch.arange(5).int(), info, as_tensor([0, 512]), page_size=1)
    check(ours(plan), [512])


@pytest.mark.parametrize("seed", range(8))
def test_lists_that_nobody_filled_make_a_right_plan(seed):
    """As an engine's warm-up passes them: anything may stand there, and every key is read once all the same."""
    draw = torch.Generator().manual_seed(seed)

    def anything(*shape):
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=draw)

    pages = as_tensor([0, 300, 300, 364])
    for plan in (
        metadata_convert.from_aiter(anything(9), anything(12, 8), pages, page_size=1),
        metadata_convert.from_aiter(torch.arange(9, dtype=torch.int32), anything(12, 8), pages, page_size=2**10),
        metadata_convert.from_flash_mla(anything(6, 8), 3),
    ):
        check(ours(plan), [300, 0, 64])


def test_a_plan_of_another_size_is_refused():
    with pytest.raises(ValueError, match="give the batch and num_sm_parts that mla_suite.plan was given"):
        metadata_convert.to_flash_mla(plan_of([100, 200], 4)[:20], as_tensor([100, 200]), num_sm_parts=4)


@pytest.mark.parametrize(("batch", "parts"), [(2, 5), (2, 8), (1, 4)])
def test_a_plan_of_other_sequences_or_parts_is_refused(batch, parts):
    said = f"plan is one of 2 sequences and 4 SM parts, and {batch} and {parts} were given"
    with pytest.raises(ValueError, match=said):
        metadata_convert.to_flash_mla(plan_of([100, 200], 4), as_tensor([100, 200])[:batch], num_sm_parts=parts)


def test_pages_of_several_tokens_need_the_tokens_of_the_last():
    given = plan_of([100, 200], 4), as_tensor([0, 1, 2]), as_tensor([0, 7, 20])
    with pytest.raises(ValueError, match="page_size is 16; give kv_last_page_lens"):
        metadata_convert.to_aiter(*given, num_sm_parts=4, page_size=16, max_seqlen_q=1)


def test_a_remembered_plan_lives_as_long_as_its_tensor_and_stays_in_place():
    key, first = torch.zeros(4), torch.arange(6)
    metadata_convert.store(key, first, 2)
    assert metadata_convert.lookup(key, 2) is first
    assert metadata_convert.lookup(key, 3) is None
    metadata_convert.store(key, torch.arange(6) + 1, 2)
    assert metadata_convert.lookup(key, 2) is first
    assert first.tolist() == [1, 2, 3, 4, 5, 6]
    assert metadata_convert.lookup(torch.zeros(4), 2) is None
