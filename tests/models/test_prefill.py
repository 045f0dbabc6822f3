"""Prefill attention: tiles of queries join, and neither padding nor other sequences are attended to."""

import pytest
import torch

from mla_suite.models.prefill import QUERY_TILE, causal_attention, causal_attention_with_lse

SCALE = 0.1


def exact(q, k, v):
    """fp64 [tokens, heads, dim]: each token attends to itself and those before it."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * SCALE
    tokens = q.shape[1]
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def random_qkv(*shape):
    return torch.randn(*shape, 3, 48), torch.randn(*shape, 3, 48), torch.randn(*shape, 3, 32)


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 7, QUERY_TILE, QUERY_TILE + 1, 600])
def test_tiles_of_queries_join(tokens):
    q, k, v = random_qkv(1, tokens)
    expected = exact(q[0], k[0], v[0])
    for found, own in zip(causal_attention_with_lse(q, k, v, softmax_scale=SCALE), expected, strict=True):
        close(found[0], own)
    close(causal_attention(q, k, v, softmax_scale=SCALE)[0], expected[0])


def test_left_padding_is_never_attended():
    q, k, v = random_qkv(3, 300)
    lens = [300, 1, 280]
    valid = torch.arange(300) >= 300 - torch.tensor(lens)[:, None]
    k[~valid] = 1e4
    v[~valid] = 1e4
    plain = causal_attention(q, k, v, softmax_scale=SCALE, valid=valid)
    tiled, lse = causal_attention_with_lse(q, k, v, softmax_scale=SCALE, valid=valid)
    for b, n in enumerate(lens):
        expected, expected_lse = exact(q[b, -n:], k[b, -n:], v[b, -n:])
        close(plain[b, -n:], expected)
        close(tiled[b, -n:], expected)
        close(lse[b, -n:], expected_lse)
    assert plain.isfinite().all()
    assert tiled.isfinite().all()


@pytest.mark.parametrize("hidden", [[], [0, 1, 2], [0, 11, 12, 20, 29]], ids=["none", "left", "between"])
def test_a_window_counts_the_real_tokens_alone(hidden):
    q, k, v = random_qkv(1, 30)
    valid = torch.ones(1, 30, dtype=torch.bool)
    valid[0, hidden] = False
    out = causal_attention(q, k, v, softmax_scale=SCALE, valid=valid if hidden else None, window=5)[valid]
    q, k, v = q[valid], k[valid], v[valid]
    packed = causal_attention(
        *(torch.cat((x, x[:7])) for x in (q, k, v)), softmax_scale=SCALE, q_lens=[len(q), 7], window=5
    )
    spans = [slice(max(i - 4, 0), i + 1) for i in range(len(q))]
    expected = torch.stack([exact(q[own], k[own], v[own])[0][-1] for own in spans])
    close(out, expected)
    close(packed, torch.cat((expected, expected[:7])))


def test_packed_sequences_do_not_see_each_other():
    lens = [5, 1, 0, 290, 33]
    q, k, v = random_qkv(sum(lens))
    parts = [exact(*part) for part in zip(q.split(lens), k.split(lens), v.split(lens), strict=True) if len(part[0])]
    expected = [torch.cat(column) for column in zip(*parts, strict=True)]
    for found, own in zip(causal_attention_with_lse(q, k, v, softmax_scale=SCALE, q_lens=lens), expected, strict=True):
        close(found, own)
    close(causal_attention(q, k, v, softmax_scale=SCALE, q_lens=lens), expected[0])
