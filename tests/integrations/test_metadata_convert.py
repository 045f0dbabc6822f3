"""Every plan format is executed as its owner describes it, over a toy attention, and must give the same result."""

import itertools

import pytest
import torch

import mla_suite
from mla_suite import archs
from mla_suite.integrations import metadata_convert
from mla_suite.ops.plan import reference
from mla_suite.ops.plan.metadata import OPEN, Plan

DIM = 8
LENGTHS = {
    "ragged": [700, 0, 64, 1, 3000],
    "one": [5000],
    "equal": [256] * 6,
    "empty": [0, 0, 0],
    "short": [1, 2, 3, 4, 5, 6, 7],
}


class Toy:
    """One query of one head per sequence: keys are values, and a split is (softmax-weighted mean, lse)."""

    def __init__(self, lengths):
        generator = torch.Generator().manual_seed(sum(lengths))
        self.lengths = lengths
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.queries = torch.randn(len(lengths), DIM, generator=generator, dtype=torch.float64)
        self.keys = [torch.randn(n, DIM, generator=generator, dtype=torch.float64) for n in lengths]

    def attend(self, b, first, end):
        rows = self.keys[b][first:end]
        if len(rows) == 0:
            return torch.zeros(DIM, dtype=torch.float64), torch.tensor(-torch.inf, dtype=torch.float64)
        scores = rows @ self.queries[b]
        return torch.softmax(scores, 0) @ rows, torch.logsumexp(scores, 0)

    def expected(self):
        return torch.stack([self.attend(b, 0, n)[0] for b, n in enumerate(self.lengths)])

    def plan(self, num_sm_parts, **choices):
        return mla_suite.plan(
            self.seq_lens, num_heads=16, num_sm_parts=num_sm_parts, max_seqlen_kv=max(self.lengths) or 1, **choices
        )


def merged(partials):
    outs, lses = (torch.stack(parts) for parts in zip(*partials, strict=True))
    if bool((lses == -torch.inf).all()):
        return torch.zeros(DIM, dtype=torch.float64)
    return torch.softmax(lses, 0) @ outs


def run_ours(plan, toy):
    read = Plan.read(plan)
    rows, out = {}, torch.full((len(toy.lengths), DIM), torch.nan, dtype=torch.float64)
    assert read.work_indptr[0] == 0
    assert read.work_indptr[-1] == len(read.work_tiles)
    for begin, end in itertools.pairwise(read.work_indptr):
        for b, first, stop, row in read.work_tiles[begin:end]:
            part = toy.attend(b, first, min(stop, toy.lengths[b]))
            if row < 0:
                out[b] = part[0]
            else:
                rows[row] = part
    for b in range(len(toy.lengths)):
        first, end = read.split_indptr[b : b + 2]
        if end > first:
            out[b] = merged([rows[row] for row in range(first, end)])
    assert [tile[2] for tile in read.work_tiles].count(OPEN) == len(toy.lengths)
    return out


def run_flash_mla(metadata, num_splits, toy):
    """Every part walks its requests: from its first block, through whole requests, to its last block."""
    batch, rows, splits = len(toy.lengths), {}, num_splits.tolist()
    out = torch.full((batch, DIM), torch.nan, dtype=torch.float64)
    for begin, end, begin_block, end_block, begin_split, first_split, last_split, _ in metadata.tolist():
        if begin >= batch:
            continue
        for b in range(begin, end + 1):
            first = begin_block * 64 if b == begin else 0
            stop = end_block * 64 if b == end else toy.lengths[b]
            part = toy.attend(b, first, min(stop, toy.lengths[b]))
            alone = splits[b + 1] - splits[b] == 1
            if b == begin:
                assert bool(first_split) != alone
            if b == end:
                assert bool(last_split) != alone
            row = splits[b] + (begin_split if b == begin else 0)
            assert row not in rows
            assert splits[b] <= row < splits[b + 1]
            rows[row] = part
    for b in range(batch):
        out[b] = merged([rows[row] for row in range(splits[b], splits[b + 1])])
    return out


def run_aiter(made, kv_indptr, page, toy):
    """Every cluster does its works; the reduction merges the partials of each tile that has some."""
    out, rows = torch.full((len(toy.lengths), DIM), torch.nan, dtype=torch.float64), {}
    starts, works = made.work_indptr.tolist(), made.work_info_set.tolist()
    for begin, end in itertools.pairwise(starts):
        for b, row, q_start, q_end, kv_start, kv_end, kv_offset, _ in works[begin:end]:
            assert (q_start, q_end) == (b, b + 1)
            first, stop = ((index - int(kv_indptr[b])) * page for index in (kv_start, kv_end))
            assert kv_offset == max(toy.lengths[b] - stop, 0)
            part = toy.attend(b, first, min(stop, toy.lengths[b]))
            if row < 0:
                out[q_start] = part[0]
            else:
                rows[row] = part
    bounds = made.reduce_indptr.tolist()
    for tile, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if end > begin:
            q_start, _ = made.reduce_final_map[tile].tolist()
            out[q_start] = merged([rows[row] for row in made.reduce_partial_map[begin:end].tolist()])
    return out


def paged(toy, page):
    pages = (toy.seq_lens + page - 1) // page
    kv_indptr = torch.cat((pages.new_zeros(1), pages.cumsum(0))).int()
    last = toy.seq_lens - (pages - 1) * page  # tokens in the last page; read of no sequence without pages
    return torch.arange(len(toy.lengths) + 1, dtype=torch.int32), kv_indptr, last


CHOICES = [{}, {"num_splits": 3}, {"split_size": 192}]


@pytest.mark.parametrize("choices", CHOICES, ids=["balanced", "num_splits", "split_size"])
@pytest.mark.parametrize("num_sm_parts", [1, 5, 20])
@pytest.mark.parametrize("name", LENGTHS)
def test_flash_mla_and_back(name, num_sm_parts, choices):
    toy = Toy(LENGTHS[name])
    plan, expected = toy.plan(num_sm_parts, **choices), toy.expected()
    torch.testing.assert_close(run_ours(plan, toy), expected)
    theirs = metadata_convert.to_flash_mla(plan, toy.seq_lens, num_sm_parts=num_sm_parts)
    assert theirs.tile_scheduler_metadata.shape == (num_sm_parts, 8)
    torch.testing.assert_close(run_flash_mla(*theirs, toy), expected)
    back = metadata_convert.from_flash_mla(theirs.tile_scheduler_metadata, len(toy.lengths))
    torch.testing.assert_close(run_ours(back, toy), expected)


def test_columns_of_the_older_format():
    toy, num_sm_parts = Toy(LENGTHS["ragged"]), 5
    plan = toy.plan(num_sm_parts)
    now, splits = metadata_convert.to_flash_mla(plan, toy.seq_lens, num_sm_parts=num_sm_parts)
    then, same = metadata_convert.to_flash_mla(
        plan, toy.seq_lens, num_sm_parts=num_sm_parts, columns=metadata_convert.OlderFlashMlaColumn
    )
    assert torch.equal(then[:, :5], now[:, [0, 2, 1, 3, 4]])
    assert torch.equal(splits, same)
    back = metadata_convert.from_flash_mla(then, len(toy.lengths), columns=metadata_convert.OlderFlashMlaColumn)
    torch.testing.assert_close(run_ours(back, toy), toy.expected())
    assert torch.equal(back, metadata_convert.from_flash_mla(now, len(toy.lengths)))


@pytest.mark.parametrize("choices", CHOICES, ids=["balanced", "num_splits", "split_size"])
@pytest.mark.parametrize("page", [1, 16, 61, 256])
@pytest.mark.parametrize("name", LENGTHS)
def test_aiter_and_back(name, page, choices):
    toy, num_sm_parts = Toy(LENGTHS[name]), 5
    plan, expected = toy.plan(num_sm_parts, **choices), toy.expected()
    qo_indptr, kv_indptr, last = paged(toy, page)
    theirs = metadata_convert.to_aiter(
        plan, qo_indptr, kv_indptr, num_sm_parts=num_sm_parts, page_size=page, max_seqlen_q=1, kv_last_page_lens=last
    )
    torch.testing.assert_close(run_aiter(theirs, kv_indptr, page, toy), expected)
    back = metadata_convert.from_aiter(theirs.work_indptr, theirs.work_info_set, kv_indptr, page_size=page)
    torch.testing.assert_close(run_ours(back, toy), expected)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_balanced_plan_survives_both_ways_word_for_word(name):
    toy, num_sm_parts = Toy(LENGTHS[name]), 7
    plan = mla_suite.plan(toy.seq_lens, num_heads=16, num_sm_parts=num_sm_parts, max_seqlen_kv=0)
    qo_indptr, kv_indptr, last = paged(toy, 64)
    flash = metadata_convert.to_flash_mla(plan, toy.seq_lens, num_sm_parts=num_sm_parts)
    aiter = metadata_convert.to_aiter(
        plan, qo_indptr, kv_indptr, num_sm_parts=num_sm_parts, page_size=64, max_seqlen_q=1, kv_last_page_lens=last
    )
    assert torch.equal(metadata_convert.from_flash_mla(flash.tile_scheduler_metadata, len(toy.lengths)), plan)
    assert torch.equal(
        metadata_convert.from_aiter(aiter.work_indptr, aiter.work_info_set, kv_indptr, page_size=64), plan
    )


def test_sequences_dealt_out_of_order(monkeypatch):
    """FlashMLA's format cannot say so: its lists are those of another plan, with the sequences in order."""
    for module in (reference, metadata_convert):
        monkeypatch.setattr(module, "current_arch", lambda tensor: archs.get("sm_90"))
    toy, num_sm_parts = Toy([50 * i % 700 for i in range(1, 40)]), 20
    plan = toy.plan(num_sm_parts)
    sequences = [tile[0] for tile in Plan.read(plan).work_tiles]
    assert sequences != sorted(sequences)
    torch.testing.assert_close(run_ours(plan, toy), toy.expected())
    in_order = metadata_convert.in_order(plan, toy.seq_lens, num_q_rows=16, num_sm_parts=num_sm_parts)
    sequences = [tile[0] for tile in Plan.read(in_order).work_tiles]
    assert sequences == sorted(sequences)
    theirs = metadata_convert.to_flash_mla(in_order, toy.seq_lens, num_sm_parts=num_sm_parts)
    torch.testing.assert_close(run_flash_mla(*theirs, toy), toy.expected())
    # AITER's lists name a sequence with every work, so they keep any order.
    qo_indptr, kv_indptr, last = paged(toy, 64)
    theirs = metadata_convert.to_aiter(
        plan, qo_indptr, kv_indptr, num_sm_parts=num_sm_parts, page_size=64, max_seqlen_q=1, kv_last_page_lens=last
    )
    torch.testing.assert_close(run_aiter(theirs, kv_indptr, 64, toy), toy.expected())
    back = metadata_convert.from_aiter(theirs.work_indptr, theirs.work_info_set, kv_indptr, page_size=64)
    torch.testing.assert_close(run_ours(back, toy), toy.expected())


def test_a_plan_that_is_never_dealt_is_the_same_plan():
    toy = Toy(LENGTHS["ragged"])
    plan = toy.plan(20)
    assert metadata_convert.in_order(plan, toy.seq_lens, num_q_rows=16, num_sm_parts=20) is plan


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
    toy = Toy(LENGTHS[name])
    metadata, num_splits = flash_mla_planner(toy.lengths, parts=12)
    plan = metadata_convert.from_flash_mla(metadata, len(toy.lengths))
    torch.testing.assert_close(run_ours(plan, toy), toy.expected())
    ours = torch.tensor(Plan.read(plan).split_indptr).diff()
    theirs = num_splits.diff()
    assert torch.equal(ours, torch.where(theirs > 1, theirs, 0))


def test_several_query_tiles_per_sequence():
    """A cluster that returns to the first key for a second tile moves no split backwards."""
    toy = Toy([512])
    works = [(0, 0, 0, 1, 0, 256), (0, 1, 0, 1, 256, 512), (0, 2, 0, 1, 0, 256), (0, 3, 0, 1, 256, 512)]
    info = torch.tensor([(*work, 512 - work[-1], 0) for work in works], dtype=torch.int32)
    work_indptr = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    plan = metadata_convert.from_aiter(work_indptr, info, torch.tensor([0, 512], dtype=torch.int32), page_size=1)
    torch.testing.assert_close(run_ours(plan, toy), toy.expected())


@pytest.mark.parametrize("seed", range(8))
def test_lists_that_nobody_filled_make_a_right_plan(seed):
    """As an engine's warm-up passes them: anything may stand there, and every key is read once all the same."""
    toy, draw = Toy([300, 0, 64]), torch.Generator().manual_seed(seed)

    def anything(*shape):
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=draw)

    pages = torch.tensor([0, 300, 300, 364], dtype=torch.int32)
    for plan in (
        metadata_convert.from_aiter(anything(9), anything(12, 8), pages, page_size=1),
        metadata_convert.from_aiter(torch.arange(9, dtype=torch.int32), anything(12, 8), pages, page_size=2**10),
        metadata_convert.from_flash_mla(anything(6, 8), 3),
    ):
        torch.testing.assert_close(run_ours(plan, toy), toy.expected())


def test_a_plan_of_another_size_is_refused():
    toy = Toy([100, 200])
    with pytest.raises(ValueError, match="give the batch and num_sm_parts that mla_suite.plan was given"):
        metadata_convert.to_flash_mla(toy.plan(4)[:20], toy.seq_lens, num_sm_parts=4)


@pytest.mark.parametrize(("batch", "parts"), [(2, 5), (2, 8), (1, 4)])
def test_a_plan_of_other_sequences_or_parts_is_refused(batch, parts):
    toy = Toy([100, 200])
    with pytest.raises(
        ValueError, match=f"plan is one of 2 sequences and 4 SM parts, and {batch} and {parts} were given"
    ):
        metadata_convert.to_flash_mla(toy.plan(4), toy.seq_lens[:batch], num_sm_parts=parts)


def test_pages_of_several_tokens_need_the_tokens_of_the_last():
    toy = Toy([100, 200])
    qo_indptr, kv_indptr, _ = paged(toy, 16)
    with pytest.raises(ValueError, match="page_size is 16; give kv_last_page_lens"):
        metadata_convert.to_aiter(toy.plan(4), qo_indptr, kv_indptr, num_sm_parts=4, page_size=16, max_seqlen_q=1)


def test_a_remembered_plan_lives_as_long_as_its_tensor_and_stays_in_place():
    key, first = torch.zeros(4), torch.arange(6)
    metadata_convert.store(key, first, 2)
    assert metadata_convert.lookup(key, 2) is first
    assert metadata_convert.lookup(key, 3) is None
    metadata_convert.store(key, torch.arange(6) + 1, 2)
    assert metadata_convert.lookup(key, 2) is first
    assert first.tolist() == [1, 2, 3, 4, 5, 6]
    assert metadata_convert.lookup(torch.zeros(4), 2) is None
