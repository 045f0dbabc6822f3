"""Ragged batches as batches of single tokens."""

import pytest
import torch

import mla_suite
from mla_suite.integrations import by_token
from mla_suite.ops.plan import scheduler

PAGE, OPTIONS = 4, {"softmax_scale": 0.07, "kv_format": "fp32"}


def starts_of(q_lens):
    return torch.nn.functional.pad(torch.tensor(q_lens).cumsum(0), (1, 0)).int()


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("q_lens", [[1, 3, 1], [2, 0, 5], [0, 4, 0]], ids=str)
def test_tokens_see_what_they_see_in_their_sequence(monkeypatch, q_lens, padding):
    heads = 3
    monkeypatch.setattr(scheduler, "TILE_ROWS", heads)
    kv_cache, tokens = torch.randn(9, PAGE, 576), sum(q_lens) + padding
    block_table = torch.randperm(9).int().view(3, 3)
    given = by_token.Batch(torch.tensor([9, 6, 5]).int(), block_table, starts_of(q_lens), max(q_lens))
    taken = by_token.arranged(given, tokens, heads)
    assert (taken.cu_seqlens_q, taken.max_seqlen_q, len(taken.seq_lens)) == (None, 1, tokens)
    assert taken.seq_lens.dtype == taken.block_table.dtype == torch.int32
    q = torch.randn(tokens, heads, 576)
    seq_lens, block_table, cu_seqlens_q, max_seqlen_q = given
    bounds = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    packed = mla_suite.decode(q, kv_cache, seq_lens, block_table, **bounds, **OPTIONS)
    apart = mla_suite.decode(q[:, None], kv_cache, taken.seq_lens, taken.block_table, **OPTIONS)
    for found, expected in zip(apart, packed, strict=True):
        torch.testing.assert_close(found[: sum(q_lens), 0], expected[: sum(q_lens)])


@pytest.mark.parametrize(
    ("q_lens", "heads", "width", "apart"),
    [
        ([8] + [1] * 31, 128, 64, True),  # a prompt of 8 tokens among decodes
        ([8] + [1] * 31, 32, 64, True),
        ([4] * 8 + [1] * 24, 128, 64, True),  # from one to four drafts a sequence
        ([4] * 8 + [1] * 24, 32, 64, False),  # all rows of a sequence are one tile
        ([4] * 32, 128, 64, False),  # no sequence has fewer
        ([8] + [1] * 31, 128, 2**20, False),  # a table of 160 MB
    ],
)
def test_tokens_are_taken_apart_where_most_sequences_have_fewer(q_lens, heads, width, apart):
    table = torch.zeros(1, 1, dtype=torch.int32).expand(len(q_lens), width)
    given = by_token.Batch(torch.ones(len(q_lens)).int(), table, starts_of(q_lens), max(q_lens))
    assert (by_token.arranged(given, sum(q_lens), heads) is not given) is apart


def test_sequences_of_as_many_tokens_stay_as_they_are():
    given = by_token.Batch(torch.ones(2).int(), torch.zeros(2, 1).int(), None, 4)
    assert by_token.arranged(given, 8, 128) is given
