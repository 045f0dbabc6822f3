"""Caches as FlashMLA takes them, and its documented formulas."""

import torch


def attend(q, keys, scale, d_v=512, sink=None):
    """One query token [heads, d] over keys [n, d]: out and natural lse, 0 and +inf where there is no key."""
    if len(keys) == 0:
        return torch.zeros(q.shape[0], d_v), torch.full((q.shape[0],), torch.inf)
    scores = q.float() @ keys.float().T * scale
    lse = scores.logsumexp(-1)
    out = torch.softmax(scores, -1) @ keys[:, :d_v].float()
    if sink is not None:
        out = out * torch.sigmoid(lse - sink)[:, None]
    return out, lse


def dense_expected(q, rows, block_table, lengths, scale, causal, sink=None):
    """rows [num_pages, page_size, d]: the values the cache stands for."""
    batch, q_len, heads, _ = q.shape
    out, lse = torch.empty(batch, q_len, heads, 512), torch.empty(batch, heads, q_len)
    for b, length in enumerate(lengths):
        used = block_table[b, : -(-length // rows.shape[1])].long()
        keys = rows[used].flatten(0, 1)[:length]
        for i in range(q_len):
            visible = max(length - (q_len - 1 - i), 0) if causal else length
            out[b, i], lse[b, :, i] = attend(q[b, i], keys[:visible], scale, sink=sink)
    return out, lse


def several_expected(q, rows, block_table, lengths, scale, causal):
    """rows [num_pages, page_size, kv_heads, d]: query heads that follow each other share a KV head."""
    shared = q.unflatten(2, (rows.shape[2], -1))
    each = [
        dense_expected(shared[:, :, k], rows[:, :, k], block_table, lengths, scale, causal)
        for k in range(rows.shape[2])
    ]
    return torch.cat([out for out, _ in each], 2), torch.cat([lse for _, lse in each], 1)


def paged(lengths, page, width=576, dtype=torch.bfloat16, kv_heads=1):
    """A shuffled cache [num_pages, page_size, kv_heads, width], NaN past every sequence, absurd spare table entries."""
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts) + 2).int()
    table = torch.full((len(lengths), max(*counts, 1)), 2**31 - 1, dtype=torch.int32)
    cache = torch.full((len(order), page, kv_heads, width), torch.nan, dtype=dtype)
    first = 0
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[b, :count] = order[first : first + count]
        rows = torch.arange(length)
        cache[table[b, rows // page].long(), rows % page] = torch.randn(length, kv_heads, width).to(dtype)
        first += count
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


def check(out, lse, expected, dtype=torch.bfloat16):
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    # 2^-8 relative is half an ulp of bf16 above the fp32 reference's own 1e-5
    torch.testing.assert_close(out.float(), expected[0], rtol=2**-8, atol=2e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)
