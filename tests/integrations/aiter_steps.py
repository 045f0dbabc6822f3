"""One decode step in AITER's names, and its exact result."""

import itertools

import torch

from mla_suite import testing
from mla_suite.integrations import aiter

ARGUMENTS = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q")
MADE = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
"""What get_mla_metadata_info_v1 sizes; get_mla_metadata_v1 takes the third before the second."""


def attend(q, keys, scale):
    """One query token [heads, d] over keys [n, d]: out and lse."""
    none, every = torch.full((len(q),), -torch.inf), torch.ones(len(q), len(keys), dtype=torch.bool)
    found = testing.attention(q, keys, every, scale, 512, none)
    return found.out.float(), found.lse.float()


class Step:
    """The tensors of one decode step, named as AITER names them; rows past a sequence's end are NaN."""

    def __init__(self, kv_lens, q_lens, page_size=1, heads=16, width=576, q_dtype=torch.bfloat16, dtype=None):
        dtype = dtype or q_dtype
        counts = [-(-n // page_size) for n in kv_lens]
        self.kv_lens, self.q_lens, self.page_size = kv_lens, q_lens, page_size
        self.num_page = sum(counts) + 3
        self.kv_indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        self.qo_indptr = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
        self.kv_indices = torch.randperm(self.num_page)[: sum(counts)].int()
        last = [n - (count - 1) * page_size if n else 1 for n, count in zip(kv_lens, counts, strict=True)]
        self.kv_last_page_lens = torch.tensor(last, dtype=torch.int32)
        self.kv_buffer = torch.full((self.num_page, page_size, 1, width), torch.nan).to(dtype)
        for b, n in enumerate(kv_lens):
            rows = torch.arange(n)
            pages = self.kv_indices[int(self.kv_indptr[b]) + rows // page_size].long()
            self.kv_buffer[pages, rows % page_size, 0] = torch.randn(n, width).to(dtype)
        self.total = sum(q_lens)
        self.max_seqlen_q = max(q_lens)
        self.q = torch.randn(self.total, heads, width).to(q_dtype)
        out_dtype = torch.bfloat16 if self.q.dtype.itemsize == 1 else q_dtype
        self.o = torch.full((self.total, heads, 512), torch.nan, dtype=out_dtype)

    @property
    def args(self):
        return tuple(getattr(self, name) for name in ARGUMENTS)

    @property
    def named(self):
        return dict(zip(ARGUMENTS, self.args, strict=True))

    def keys(self, b):
        pages = self.kv_indices[self.kv_indptr[b] : self.kv_indptr[b + 1]].long()
        return self.kv_buffer[pages].flatten(0, 2)[: self.kv_lens[b]]

    def expected(self, scale=None, causal=True):
        scale = self.q.shape[-1] ** -0.5 if scale is None else scale
        cache, lens = self.kv_buffer.squeeze(2).float(), torch.tensor(self.kv_lens)
        lists = dict(kv_indptr=self.kv_indptr, kv_indices=self.kv_indices, cu_seqlens_q=self.qo_indptr)
        found = testing.exact_decode(self.q, cache, lens, **lists, softmax_scale=scale, causal=causal, kv_format="fp32")
        return found.out.float(), found.lse.float()

    def check(self, lse, expected):
        torch.testing.assert_close(self.o.float(), expected[0], rtol=2**-8, atol=2e-5)
        torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)

    def metadata(self, heads=16):
        """Buffers as `get_mla_metadata_info_v1` sizes them, filled by `get_mla_metadata_v1`."""
        sizes = aiter.get_mla_metadata_info_v1(
            len(self.kv_lens), self.max_seqlen_q, heads, self.q.dtype, self.kv_buffer.dtype, is_sparse=False
        )
        made = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in zip(MADE, sizes, strict=True)}
        for buffer in made.values():
            buffer.view(torch.uint8).fill_(0x7F)
        self.fill(
            made,
            heads,
            page_size=self.page_size,
            kv_granularity=max(self.page_size, 16),
            max_seqlen_qo=self.max_seqlen_q,
            uni_seqlen_qo=self.max_seqlen_q if len(set(self.q_lens)) == 1 else -1,
            fast_mode=True,
            dtype_q=self.q.dtype,
            dtype_kv=self.kv_buffer.dtype,
        )
        return made

    def fill(self, made, heads=16, **options):
        """Plan the step into such buffers."""
        work_metadata, work_indptr, work_info_set, *reduce = (made[name] for name in MADE)
        lengths = self.qo_indptr, self.kv_indptr, self.kv_last_page_lens
        aiter.get_mla_metadata_v1(
            *lengths, heads, 1, True, work_metadata, work_info_set, work_indptr, *reduce, **options
        )
