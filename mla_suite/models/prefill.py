"""Un-absorbed causal attention among new tokens, through torch, and its merge with an attended prefix.

Queries, keys and values are [batch, tokens, heads, dim]; `valid` [batch, tokens] marks real tokens in a left- or
right-padded batch. Padding attends to nothing but itself and nothing attends to padding, so its rows are defined and
unused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

import mla_suite
from mla_suite.models.cache import Step

# Bounds the fp32 scores held at once to batch x heads x 256 x tokens.
QUERY_TILE = 256


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    valid: torch.Tensor | None = None,
    q_lens: Sequence[int] | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """softmax(q k^T softmax_scale) v over each token and those before it, in the inputs' dtype.

    With `window` over that number of newest tokens, each token itself among them.
    With `q_lens` within each of the sequences packed along tokens: [tokens, heads, dim] in and out.
    """
    if q_lens is not None:
        parts = _packed(q, k, v, q_lens)
        return torch.cat([causal_attention(*p, softmax_scale=softmax_scale, window=window) for p in parts], 1)[0]
    mask = None
    if valid is not None or window is not None:
        mask = visible(0, q.shape[1], q.shape[1], q.device, valid, window)
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=softmax_scale,
    )
    return out.transpose(1, 2)


def causal_attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    valid: torch.Tensor | None = None,
    q_lens: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in fp32 with its natural-log lse [batch, tokens, heads], tile by tile of queries.

    torch's public attention returns no lse, and merging with a prefix needs one.
    """
    if q_lens is not None:
        parts = [causal_attention_with_lse(*p, softmax_scale=softmax_scale) for p in _packed(q, k, v, q_lens)]
        out, lse = (torch.cat(each, dim=1)[0] for each in zip(*parts, strict=True))
        return out, lse
    queries, keys, values = (t.transpose(1, 2).float() for t in (q, k, v))
    tokens = q.shape[1]
    if not tokens:
        return v.float(), v.new_empty(v.shape[:-1], dtype=torch.float32)
    outs, lses = [], []
    for start in range(0, tokens, QUERY_TILE):
        stop = min(start + QUERY_TILE, tokens)
        scores = queries[:, :, start:stop] @ keys[:, :, :stop].transpose(-1, -2) * softmax_scale
        seen = visible(start, stop, stop, q.device, None if valid is None else valid[:, :stop])
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse[..., None]).exp() @ values[:, :, :stop])
        lses.append(lse)
    return torch.cat(outs, dim=2).transpose(1, 2), torch.cat(lses, dim=2).transpose(1, 2)


def _packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_lens: Sequence[int]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The queries, keys and values of each sequence, as a batch of one."""
    return zip(*(t.unsqueeze(0).split(list(q_lens), dim=1) for t in (q, k, v)), strict=True)


def merged(
    own: tuple[torch.Tensor, torch.Tensor], past: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Two attended parts of disjoint keys, [..., heads, dim] with lse [..., heads], as if attended at once."""
    shape = own[0].shape
    partial_out = torch.stack([out.float().reshape(-1, shape[-1]) for out, _ in (own, past)])
    partial_lse = torch.stack([lse.reshape(-1) for _, lse in (own, past)])
    out, _ = mla_suite.combine(partial_out, partial_lse, num_splits=2, out_dtype=dtype)
    return out.view(shape)


def check(
    x: torch.Tensor,
    kv_cache: torch.Tensor | None,
    step: Step | None,
    positions: torch.Tensor | None,
    q_lens: Sequence[int] | None,
    valid: torch.Tensor | None,
    prefix: bool,
) -> None:
    """Raises ValueError for arguments of `MLA.prefill` that do not go together."""
    if (kv_cache is None) != (step is None):
        raise ValueError("prefill: kv_cache and step come together; give both, or neither to attend without a cache")
    if (step is None) == (positions is None):
        raise ValueError("prefill: positions are in the step; give them only when there is no step")
    if prefix and kv_cache is None:
        raise ValueError("prefill: prefix=True without kv_cache; the prefix is read from the cache: pass it")
    if (x.dim() == 2) != (q_lens is not None):
        raise ValueError(
            f"prefill: x has {x.dim()} dimensions and q_lens is {'given' if q_lens is not None else 'None'}; "
            "packed x [tokens, hidden_size] goes with q_lens, x [batch, tokens, hidden_size] without"
        )
    if isinstance(q_lens, torch.Tensor):
        raise TypeError("prefill: q_lens is a tensor; it takes the host's list of tokens per sequence")
    if q_lens is not None and not q_lens:
        raise ValueError("prefill: q_lens is empty; give the tokens of one sequence at least, 0 if it has none")
    if q_lens is not None and min(q_lens) < 0:
        raise ValueError(f"prefill: q_lens are {list(q_lens)}; a sequence has 0 tokens or more")
    if q_lens is not None and (sum(q_lens) != x.shape[0] or valid is not None):
        raise ValueError(
            f"prefill: q_lens sum to {sum(q_lens)} for {x.shape[0]} packed tokens; they must be equal, and valid "
            "belongs to padded batches only"
        )
    if valid is not None and (valid.dtype != torch.bool or valid.shape != x.shape[:2]):
        raise ValueError(
            f"prefill: valid is {valid.dtype} {tuple(valid.shape)}; it takes bool [batch, tokens] = "
            f"{tuple(x.shape[:2])}"
        )
    where = positions if step is None else step.positions
    assert where is not None
    sequences = x.shape[0] if q_lens is None else len(q_lens)
    tokens = x.shape[0] * x.shape[1] if q_lens is None else x.shape[0]
    if where.numel() != tokens:
        raise ValueError(
            f"prefill: {where.numel()} positions for {tokens} tokens of x; each token has one, in the step as append "
            "made it for these tokens"
        )
    if step is not None and step.seq_lens.shape[0] != sequences:
        raise ValueError(
            f"prefill: x has tokens of {sequences} sequences, the step of {step.seq_lens.shape[0]}; append those that "
            "the call is about"
        )


def check_order(q_lens: Sequence[int], step: Step, page_size: int) -> None:
    """ValueError where a token's slot is in no page of the sequence that `q_lens` counts it to. Reads values."""
    owner = torch.repeat_interleave(torch.tensor(list(q_lens), device=step.slot_mapping.device))
    page = torch.arange(step.block_table.shape[1], device=step.block_table.device)
    pages = step.block_table.masked_fill(page * page_size >= step.seq_lens[:, None], -1)
    own_page = step.slot_mapping // page_size
    right = (pages[owner] == own_page[:, None]).any(1) | (step.slot_mapping < 0)
    if right.all():
        return
    token = int(right.logical_not().nonzero()[0])
    raise ValueError(
        f"prefill: by q_lens {list(q_lens)} token {token} of x is of sequence {int(owner[token])} of the step, but its "
        f"slot is in page {int(own_page[token])}, which is not that sequence's; give q_lens and tokens in the order of "
        "append's counts"
    )


def visible(
    start: int, stop: int, keys: int, device: torch.device, valid: torch.Tensor | None, window: int | None = None
) -> torch.Tensor:
    """bool, broadcastable to [batch, heads, stop - start, keys]: may query `start + i` see key j?

    A `window` counts the real tokens alone, as positions and cached rows do.
    """
    rows = torch.arange(start, stop, device=device)[:, None]
    columns = torch.arange(keys, device=device)
    seen = columns <= rows
    if valid is None:
        return seen if window is None else seen & (columns > rows - window)
    seen = seen & valid[:, None, :]
    if window is not None:
        count = valid.cumsum(1)
        seen = seen & (count[:, None, :] > count[:, start:stop, None] - window)
    return (seen | (columns == rows))[:, None]
