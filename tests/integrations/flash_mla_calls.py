"""Caches as FlashMLA takes them, its dense calls, and their exact results."""

import torch

from mla_suite import testing
from mla_suite.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata


def dense_expected(q, rows, block_table, lengths, scale, causal, sink=None):
    """rows [num_pages, page_size, d] are the values that the cache stands for; FlashMLA's lse of no keys is +inf.

    With [num_pages, page_size, kv_heads, d] query heads that follow each other share a KV head.
    """
    if rows.dim() == 4:
        shared = zip(q.chunk(rows.shape[2], dim=2), rows.unbind(2), strict=True)
        each = [dense_expected(own, keys, block_table, lengths, scale, causal, sink) for own, keys in shared]
        return torch.cat([out for out, _ in each], 2), torch.cat([lse for _, lse in each], 1)
    given = q, rows.float(), torch.tensor(lengths), block_table
    found = testing.exact_decode(*given, attn_sink=sink, softmax_scale=scale, causal=causal, kv_format="fp32")
    lse = found.lse.masked_fill(found.lse == -torch.inf, torch.inf)
    return found.out.float(), lse.transpose(1, 2).float()


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


class Dense:
    """A problem of dense calls: sequences of these lengths in a cache of `paged`."""

    def __init__(self, lengths, page=64, **options):
        self.lengths = lengths
        self.cache, self.table, self.lens = paged(lengths, page, **options)

    def queries(self, q_len=1, heads=16):
        return torch.randn(len(self.lengths), q_len, heads, 576).to(self.cache.dtype)

    def call(self, q, *metadata, **options):
        """(out, lse); without metadata, with a new holder."""
        given = metadata or get_mla_metadata()
        return flash_mla_with_kvcache(q, self.cache, self.table, self.lens, 512, *given, **options)

    def expected(self, q, causal=False, scale=576**-0.5, lengths=None, sink=None):
        return dense_expected(q, self.cache, self.table, lengths or self.lengths, scale, causal, sink)

    def check(self, q, *metadata, causal=False, **options):
        """Calls it, and compares what it gives."""
        found = self.call(q, *metadata, causal=causal, **options)
        check(*found, self.expected(q, causal, sink=options.get("attn_sink")), q.dtype)
