"""Helpers for tests and benchmarks of the operators: poison, the exact result in fp64, and the bound around it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mla_suite import kv_formats
from mla_suite.core import register
from mla_suite.core.op import Compared
from mla_suite.kv_formats import cache as caches


class Exact(NamedTuple):
    """The result in fp64, with what rounding may be measured against.

    out        [..., head_dim_v]
    lse        [...]
    magnitude  [..., head_dim_v]: sum over the keys of p |v|
    """

    out: torch.Tensor
    lse: torch.Tensor
    magnitude: torch.Tensor


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill every byte with 0xff, in place: NaN in each float dtype, -1 in each integer dtype. Last dim contiguous."""
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor


def attention(
    queries: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, scale: float, head_dim_v: int, sink: torch.Tensor
) -> Exact:
    """Exact attention of rows [rows, head_dim] over keys [n, head_dim]; row r sees key k where seen[r, k] is true.

    sink [rows] logits, -inf for none. All in fp64, by the formula.
    """
    p, lse = _weights(queries, keys, seen, scale, sink)
    values = keys[:, :head_dim_v].double()
    return Exact(p @ values, lse, p @ values.abs())


def _weights(
    queries: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, scale: float, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax weights [rows, n] and lse [rows]."""
    scores = queries.double() @ keys.double().T * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, dim=1)
    denominator = torch.logaddexp(lse, sink.double())
    return torch.where(scores == -torch.inf, 0.0, torch.exp(scores - denominator[:, None])), lse


class _Sequence(NamedTuple):
    """One sequence of a decode call, as `attention` takes it."""

    queries: torch.Tensor
    keys: torch.Tensor
    seen: torch.Tensor
    sink: torch.Tensor


def _sequences(args: Any) -> Iterator[_Sequence]:
    page, heads = args.kv_cache.shape[1], args.q.shape[-2]
    ragged = args.cu_seqlens_q
    tokens = range(0, args.q.shape[:-2].numel() + 1, args.q.shape[1]) if ragged is None else ragged.tolist()
    flat = args.q.flatten(0, -3).double()
    here: dict[str, Any] = dict(device=args.q.device)
    for b, length in enumerate(args.seq_lens.tolist()):
        if args.block_table is not None:
            pages = args.block_table[b]
        else:
            pages = args.kv_indices[args.kv_indptr[b] : args.kv_indptr[b + 1]]
        used = pages[: -(-length // page)].long()
        fmt = kv_formats.get_kv_format(args.kv_format)
        keys = caches.as_keys(fmt, caches.unpack(fmt, args.kv_cache[used])).flatten(0, 1)[:length].double()
        keys = keys if args.kv_descale is None else keys * args.kv_descale.double()
        keys = keys if args.rope_cos_sin is None else _rotated(keys, args.rope_cos_sin[:length], args.kv_cache.dtype)
        queries = flat[tokens[b] : tokens[b + 1]]
        queries = queries if args.q_descale is None else queries * args.q_descale.double()
        q_len = queries.shape[0]
        total = length if args.cp_tot_seq_lens is None else int(args.cp_tot_seq_lens[b])
        world, rank, run = args.cp_world_size, args.cp_rank, args.cp_interleave
        local = torch.arange(length, **here)
        positions = local // run * run * world + rank * run + local % run  # of this rank's keys, in the sequence
        own = torch.arange(total - q_len, total, **here)[:, None]  # positions of the query tokens
        seen = positions <= own if args.causal else torch.ones(q_len, length, dtype=torch.bool, **here)
        if args.window_left >= 0:
            seen = seen & (own - positions <= args.window_left)
        if args.tree_mask is not None:
            words = args.tree_mask.flatten()[tokens[b] : tokens[b + 1]].tolist()
            for (i, word), j in itertools.product(enumerate(words), range(max(q_len - length, 0), q_len)):
                seen[i, length - q_len + j] = bool(word >> j & 1)
        sink = torch.full((heads,), -torch.inf, **here) if args.attn_sink is None else args.attn_sink
        yield _Sequence(queries.flatten(0, 1), keys, seen.repeat_interleave(heads, dim=0), sink.repeat(q_len))


def exact_decode(*tensors: torch.Tensor | None, **options: Any) -> Exact:
    """Exact result of `mla_suite.decode` on the same arguments. Splits and plans change nothing.

    Rows of query tokens behind the last sequence's, which decode does not write, are NaN.
    """
    args = register.get("decode").Args(*tensors, **options).joined()
    found = [
        attention(own.queries, own.keys, own.seen, args.softmax_scale, args.head_dim_v, own.sink)
        for own in _sequences(args)
    ]
    return Exact(*(_by_token(parts, args.q) for parts in zip(*found, strict=True)))


def _by_token(parts: list[torch.Tensor] | tuple[torch.Tensor, ...], q: torch.Tensor) -> torch.Tensor:
    """Each sequence's rows [query tokens x heads, ...] as [*q's leading dimensions, ...]; NaN for those of none."""
    rows = torch.cat(parts)
    spare = q.shape[:-1].numel() - rows.shape[0]
    return torch.cat((rows, rows.new_full((spare, *rows.shape[1:]), torch.nan))).view(*q.shape[:-1], *rows.shape[1:])


FP32_ROUNDING = 2.0**-24
"""A sum in fp32 is off by at most this share of itself."""


def sums_rounding(queries: torch.Tensor, longest: torch.Tensor) -> torch.Tensor:
    """How far scores [...] may be off since fp32 sums them: sqrt(d) 2^-24 |q| |k|, of queries [..., d] that are scaled.

    longest  the largest |k|. No sum of some of a score's d products is above |q| |k|, and their d roundings, some up
             and some down, add up as a random walk does. Were all in one direction, it would be d 2^-24.
    """
    return queries.norm(dim=-1) * longest * queries.shape[-1] ** 0.5 * FP32_ROUNDING


def score_rounding(*tensors: torch.Tensor | None, **options: Any) -> torch.Tensor:
    """`sums_rounding` of a decode, with the arguments of `exact_decode`."""
    args = register.get("decode").Args(*tensors, **options).joined()
    found = []
    for own in _sequences(args):
        longest = torch.cat((own.keys.norm(dim=1), own.keys.new_zeros(1))).amax()
        found.append(sums_rounding(own.queries * args.softmax_scale, longest))
    return _by_token(found, args.q)


E4M3_RELATIVE = 2.0**-4
"""Rounding to e4m3 changes a value that is not denormal by at most this share of it."""
E4M3_ABSOLUTE = 2.0**-18
"""Rounding changes a weight by at most this share of its row's largest one, where it is denormal: the largest is scaled
to 2^8, and those are multiples of 2^-9; in FNUZ to 2^7, and of 2^-10."""


def fp8_weights_bound(*tensors: torch.Tensor | None, **options: Any) -> torch.Tensor:
    """Largest |out - exact| of a decode that rounds its softmax weights to e4m3 and divides by the sum of those.

    The arguments are those of `exact_decode`; -> [..., head_dim_v], without the rounding of `out` itself. A weight is
    off by a share of itself or by a share of its row's largest. The second is what remains where the values of the
    keys with large weights are 0: a bound by the sum of p |v| alone would not hold there.
    """
    args = register.get("decode").Args(*tensors, **options).joined()
    found = []
    for own in _sequences(args):
        p, _ = _weights(own.queries, own.keys, own.seen, args.softmax_scale, own.sink)
        seen = own.seen.double()
        largest = p.amax(dim=1, keepdim=True) if p.shape[1] else p.new_zeros(p.shape[0], 1)
        size, steps = own.keys[:, : args.head_dim_v].abs(), E4M3_ABSOLUTE * largest
        sums = E4M3_RELATIVE * p.sum(1, keepdim=True) + steps * seen.sum(1, keepdim=True)
        found.append(((E4M3_RELATIVE + sums) * (p @ size) + steps * (seen @ size)) / (1 - sums).clamp(min=2.0**-10))
    return _by_token(found, args.q)


def _rotated(keys: torch.Tensor, cos_sin: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """The last values of each key, as two halves, rotated to their positions; rounded if 16 bits are stored."""
    rounds = stored.itemsize == 2
    latent, rope = keys.tensor_split((-cos_sin.shape[1],), dim=1)
    low, high = rope.to(torch.float32 if rounds else torch.float64).chunk(2, dim=1)
    cos, sin = cos_sin.to(low.dtype).chunk(2, dim=1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=1)
    return torch.cat((latent, (rotated.to(stored) if rounds else rotated).double()), dim=1)


REFERENCE_ROUNDING = 2.0**-18
"""Where softmax weights stay in fp32: out is off by at most this share of sum(p |v|), and one ulp of its own. Scores
much above 1 move it further, by `score_rounding`."""
REFERENCE_LSE = 1e-5
"""There lse is off by at most this, or by this share of it where it is above 1."""
KERNEL_ROUNDING = 2.0**-8
"""A kernel rounds softmax weights to 16 bits: out is off by at most this share of sum(p |v|), and one ulp."""
KERNEL_LSE = 1e-4
"""An lse of a kernel is off by at most this, or by this share of it where it is above 1."""
FP8_DEPTH = 32
"""Products that fp8 tensor cores sum at a time, and add to the sum so far."""
FP8_SUMS = 2.0**-10
"""With precision 'fp8' a score of random values is off by at most this share of the largest of these sums: of each,
what lies 13 bits below its largest term is cut off."""
OPERAND_ROUNDING = 2.0**-9
"""Rounding an operand of a score to 16 bits changes its products by at most this share of each."""

FLUSHED = 2.0**10 * torch.finfo(torch.float32).smallest_normal
"""Up to so much softmax weight may count for nothing: fp32's smallest normal number in each of up to 1,024 splits."""


def flushed(magnitude: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """How far out [..., head_dim_v] may be off since weights that are no normal fp32 numbers may count for nothing.

    A sink [heads] far above lse [..., heads] makes all weights of a row so small; magnitude is that of `Exact`.
    """
    share = torch.ones_like(lse) if sink is None else torch.sigmoid(lse.double() - sink.double())
    return FLUSHED * (1 + (magnitude / share[..., None]).nan_to_num(0.0))


def attention_within(
    outputs: Sequence[torch.Tensor],
    exact: Exact,
    scores_off: torch.Tensor | float = 0.0,
    sink: torch.Tensor | None = None,
) -> tuple[Compared, Compared]:
    """The out and lse of a kernel beside the exact ones, with the bounds that are stated of kernels.

    scores_off  [...]: what scores may be off by, by `sums_rounding` and where a kernel rounds rotated keys to 16 bits
    sink        [heads], as the call has it
    """
    out, lse = outputs
    off = torch.as_tensor(scores_off, dtype=torch.float64, device=out.device)
    allowed = _share(KERNEL_ROUNDING, off) * exact.magnitude + ulp(exact.out, out.dtype)
    allowed += flushed(exact.magnitude, exact.lse, sink)
    allowed_lse = KERNEL_LSE * torch.where(exact.lse.isfinite(), exact.lse.abs(), 0.0).clamp(min=1.0) + off
    return Compared("out", out, exact.out, allowed), Compared("lse", lse, exact.lse, allowed_lse)


def _share(rounding: float, off: torch.Tensor) -> torch.Tensor:
    """Of sum(p |v|): scores that are off by `off` change a weight, and the sum that divides it, by exp(off) each."""
    return rounding + torch.expm1(2 * off)[..., None]


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 distance between neighbours of `dtype` around each value."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.double().abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(values, info.eps, dtype=torch.float64), exponent - 1)


def assert_close(out: torch.Tensor, lse: torch.Tensor, exact: Exact, scores_off: torch.Tensor | float = 0.0) -> None:
    """|out - exact| <= 1 ulp of out + 2^-18 sum(p |v|), and lse within 1e-5, relative or absolute.

    Infinities must be equal and nothing may be NaN. The ulp is that of out's dtype.

    scores_off  [...]: what scores may be off by besides, where they are much above 1: `score_rounding`
    """
    off = torch.as_tensor(scores_off, dtype=torch.float64, device=out.device)
    error = (out.double() - exact.out).abs()
    allowed = ulp(out, out.dtype) + _share(REFERENCE_ROUNDING, off) * exact.magnitude
    worst = (error / allowed).max().item() if error.numel() else 0.0
    assert bool((error <= allowed).all()), f"out is {worst:.3g} times as far from the exact result as it may be"
    finite = exact.lse.isfinite()
    assert torch.equal(torch.where(finite, 0.0, lse.double()), torch.where(finite, 0.0, exact.lse)), (
        "lse is not the infinity it should be"
    )
    difference = torch.where(finite, (lse.double() - exact.lse).abs(), 0.0)
    tolerance = REFERENCE_LSE * torch.where(finite, exact.lse.abs(), 0.0).clamp(min=1.0) + off
    assert bool((difference <= tolerance).all()), f"lse is off by {difference.max().item():.3g}"
