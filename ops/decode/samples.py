"""Named decode problems: small ones for tests; `decode_sample` makes any for benchmarks and the demo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mla_suite import kv_formats
from mla_suite.core.op import Sample
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.decode.reference import keys_of_rank
from mla_suite.ops.plan.samples import sample as plan_sample


def decode_sample(
    lens: Sequence[int],
    *,
    heads: int = 16,
    q_len: int = 1,
    page: int = 64,
    latent: int = 512,
    rope: int = 64,
    kv_format: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    sink: bool = False,
    rotate: bool = False,
    varlen: bool = False,
    ragged_pages: bool = False,
    num_splits: int = 0,
    split_size: int = 0,
    planned: bool = False,
    num_sm_parts: int = 8,
    ranks: tuple[int, int, int] = (1, 0, 1),
    window_left: int = -1,
    tree: bool = False,
    parts: bool = False,
    precision: str = "full",
    pages: int = 0,
    seed: int = 0,
) -> Sample:
    """Sequences of `lens` keys in shuffled pages, out of `pages` or, when 0, one more than they need.

    In varlen mode sequence b has 1 + b % q_len query tokens. With `ranks`, which is the number of ranks, a rank and the
    keys in a row on one, `lens` count the keys of all ranks, and the problem is that rank's. With `tree` the query
    tokens are a random tree of drafts. With `parts` queries are two tensors, as the product with absorbed weights and
    a slice of the un-absorbed queries are.
    Values are drawn on the device they are for: a CPU takes seconds for the caches of long contexts.
    """
    batch, head_dim = len(lens), latent + rope
    totals, lens = lens, [int(n) for n in keys_of_rank(torch.tensor(list(lens)), *ranks)]
    fmt = kv_formats.get_kv_format(kv_format)
    head_dim_v = latent if fmt.dense else fmt.head_dim_v
    counts = [-(-length // page) for length in lens]
    pages = pages or sum(counts) + 1
    q_lens = [1 + b % q_len for b in range(batch)] if varlen else [q_len] * batch
    longest = max(lens)

    def make(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator(device).manual_seed(seed)
        draw: dict[str, Any] = dict(generator=generator, device=device)
        shape = (sum(q_lens), heads, head_dim) if varlen else (batch, q_len, heads, head_dim)
        q = torch.randn(shape, **draw).to(dtype)
        q, q_rope = in_parts(q, head_dim_v) if parts else (q, None)
        descale = torch.tensor(0.02, device=device) if fmt.per_tensor_descale else None
        kv_cache = caches.as_bytes(caches.pack(fmt, torch.randn(pages, page, head_dim, **draw), descale=descale))
        order = torch.randperm(pages, **draw).to(torch.int32).cpu()
        indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        block_table = torch.zeros(batch, max(*counts, 1), dtype=torch.int32)
        for b, count in enumerate(counts):
            block_table[b, :count] = order[indptr[b] : indptr[b + 1]]
        paging = (None, indptr, order) if ragged_pages else (block_table, None, None)
        cu_seqlens_q = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32) if varlen else None
        attn_sink = torch.randn(heads, **draw) if sink else None
        cos_sin = _cos_sin(max(lens), rope) if rotate else None
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        plan = None
        if planned:
            made = plan_sample(
                lens,
                num_heads=heads,
                max_seqlen_q=q_len,
                num_sm_parts=num_sm_parts,
                max_seqlen_kv=max(lens),
                num_splits=num_splits,
                split_size=split_size,
                window_left=window_left,
            )
            args, kwargs = made.make(torch.device("cpu"))
            plan = torch.ops.mla_suite.plan(*args, **kwargs)
        cp_tot_seq_lens = torch.tensor(totals, dtype=torch.int32) if ranks[0] > 1 else None
        tensors = (
            *(q, kv_cache, seq_lens, *paging, cu_seqlens_q, None, descale, attn_sink, cos_sin, plan),
            *(cp_tot_seq_lens, random_tree(q_lens, varlen, seed) if tree else None, q_rope),
        )
        moved = tuple(None if tensor is None else tensor.to(device) for tensor in tensors)
        options: dict[str, Any] = {"kv_format": kv_format, "num_splits": num_splits, "split_size": split_size}
        if window_left >= 0:
            options["window_left"] = window_left
        if precision != "full":
            options["precision"] = precision
        if ranks[0] > 1:
            options |= dict(zip(("cp_world_size", "cp_rank", "cp_interleave"), ranks, strict=True))
        if varlen:
            options["max_seqlen_q"] = max(q_lens)
        return moved, dict(softmax_scale=head_dim**-0.5, head_dim_v=head_dim_v, causal=causal, **options)

    token_bytes = fmt.token_bytes if (latent, rope) == (fmt.latent, fmt.rope) else head_dim * fmt.element_bytes
    rows = sum(q_lens) * heads
    read = lens if window_left < 0 else [min(n, window_left + each) for n, each in zip(lens, q_lens, strict=True)]
    moved_bytes = sum(read) * token_bytes + rows * (head_dim * dtype.itemsize + head_dim_v * dtype.itemsize + 4)
    pairs = sum(_seen(length, n, causal and not tree, window_left) for length, n in zip(lens, q_lens, strict=True))
    flops = 2 * heads * pairs * (head_dim + head_dim_v)
    flags = [
        *(["sink"] if sink else []),
        *(["rope"] if rotate else []),
        *(["varlen"] if varlen else []),
        *(["indices"] if ragged_pages else []),
        *(["full"] if not causal else []),
        *([f"n{num_splits}"] if num_splits else []),
        *([f"s{split_size}"] if split_size else []),
        *(["plan"] if planned else []),
        *([f"rank{ranks[1]}of{ranks[0]}"] if ranks[0] > 1 else []),
        *([f"w{window_left}"] if window_left >= 0 else []),
        *(["tree"] if tree else []),
        *(["parts"] if parts else []),
        *([precision] if precision != "full" else []),
    ]
    shape_name = f"b{batch}-h{heads}-q{q_len}-kv{longest}-p{page}-{kv_format}"
    return Sample("-".join((shape_name, *flags)), make, moved_bytes, flops)


def _seen(length: int, tokens: int, causal: bool, window_left: int) -> int:
    """Pairs of one of a sequence's last `tokens` and a key that it sees."""
    ends = [max(length - later, 0) if causal else length for later in range(tokens)]
    firsts = [max(length - later - 1 - window_left, 0) if window_left >= 0 else 0 for later in range(tokens)]
    return sum(max(end - first, 0) for end, first in zip(ends, firsts, strict=True))


def in_parts(q: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent part in the order [heads, ..., latent], and the rope part at the end of rows three times as wide."""
    by_head = q[..., :latent].movedim(-2, 0).contiguous().movedim(0, -2)
    rope = q[..., latent:]
    return by_head, torch.cat((rope, rope, rope), dim=-1)[..., -rope.shape[-1] :]


def _cos_sin(positions: int, rope: int) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, rope, 2) / rope)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def random_tree(q_lens: Sequence[int], varlen: bool, seed: int) -> torch.Tensor:
    """A tree_mask whose query tokens each hang on an earlier one or on the cached keys, and see their ancestors."""
    generator = torch.Generator().manual_seed(seed)
    words = []
    for q_len in q_lens:
        own: list[int] = []
        for token in range(q_len):
            parent = int(torch.randint(-1, token, (), generator=generator)) if token else -1
            word = 1 << token | (own[parent] if parent >= 0 else 0)
            own.append(word - 2**64 if word >= 2**63 else word)
        words.append(own)
    if varlen:
        return torch.tensor([word for own in words for word in own], dtype=torch.int64)
    return torch.tensor(words, dtype=torch.int64)


def samples() -> Sequence[Sample]:
    return (
        decode_sample([130, 0, 7], planned=True),
        decode_sample([70, 200, 33, 5], heads=8, q_len=3, page=16, sink=True, varlen=True, ragged_pages=True),
        decode_sample([300, 129], heads=24, q_len=2, kv_format="fp8", num_splits=3),
        decode_sample([147, 18, 0, 400], heads=8, q_len=4, page=16, ranks=(4, 1, 16)),
        decode_sample([96, 40], q_len=2, page=1, rotate=True, causal=False, split_size=64),
        decode_sample([500, 0, 90, 131], heads=8, q_len=3, page=16, window_left=100, varlen=True),
        decode_sample([300, 5], heads=8, q_len=5, tree=True, num_splits=2),
        decode_sample([70, 0, 300], heads=32, q_len=2, parts=True, num_splits=2),
    )
