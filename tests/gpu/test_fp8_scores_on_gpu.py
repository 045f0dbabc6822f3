"""decode with precision 'fp8' on sm_90, beside a model of how its tensor cores sum products of e4m3.

The sums lose more than kernels may by the bounds of full precision, so those bounds hold beside the model: a wrong
score is found however little the sums lose.
"""

from __future__ import annotations

import random

import pytest
import torch
from decode_calls import FP8, LENS, PLAN, Q, here, hostile

import mla_suite
from mla_suite import testing
from mla_suite.core import dispatch
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample

pytestmark = pytest.mark.usefixtures("sm_90_decode")
KEPT_BITS = 13  # of a term of a sum, behind the leading bit of the largest
SHAPES = {
    "edges": dict(lens=(0, 1, 31, 32, 33, 64, 65, 500), heads=64),
    "128 rows": dict(lens=(700, 90, 1), heads=128),
    "three row tiles": dict(lens=(300, 65), heads=50, q_len=3),
    "two splits, a cluster": dict(lens=(700, 100, 1, 64, 0), heads=128, num_splits=2, sink=True),
    "8 splits": dict(lens=(3000, 33, 0), heads=100, num_splits=8, sink=True),
    "planned": dict(lens=(700, 100, 2063, 500), heads=128, planned=True),
    "planned, many tiles a CTA": dict(lens=(*[60, 0, 500] * 40, 3000), heads=48, planned=True),
    "by size": dict(lens=(700, 100, 0), heads=40, split_size=64),
    "all keys, pages of 96": dict(lens=(300, 90), heads=40, q_len=2, causal=False, page=96),
}


def summed(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q k of [rows, 576] and [n, 576], as fp8 tensor cores sum them: 32 products at a time, and the sum so far."""
    acc = q.new_zeros(len(q), len(keys))
    for own, key in zip(q.split(testing.FP8_DEPTH, 1), keys.split(testing.FP8_DEPTH, 1), strict=True):
        products = own[:, None] * key
        exponents = torch.where(products == 0, -200, exponent(own, -6)[:, None] + exponent(key, -6))
        largest = torch.maximum(exponents.amax(-1), torch.where(acc == 0, -200, exponent(acc)))
        unit = torch.ldexp(torch.ones_like(acc), largest - KEPT_BITS)[..., None]
        acc = ((torch.cat((acc[..., None], products), dim=-1) / unit).trunc() * unit).sum(-1)
    return acc


def exponent(values: torch.Tensor, least: int = -200) -> torch.Tensor:
    """That of the leading bit, of e4m3 at least -6; a product's is the sum of two, though it may be one more."""
    return (torch.frexp(values)[1] - 1).clamp(min=least)


def modelled(args, kwargs):
    """The out, the lse and sum(p |v|) that exact arithmetic makes of such scores."""
    q, cache, lens, table, sink = args[0], args[1], args[2].tolist(), args[3], args[9]
    batch, q_len, heads = q.shape[:3]
    found = []
    for b in range(batch):
        pages = table[b][: -(-lens[b] // cache.shape[1])].long()
        keys = cache[pages].view(torch.float8_e4m3fn).double().flatten(0, 1)[: lens[b]]
        scores = summed(q[b].double().flatten(0, 1), keys).view(q_len, heads, -1)
        scores *= kwargs["softmax_scale"] * (1.0 if args[8] is None else args[8].item())
        if kwargs["causal"]:
            last = torch.arange(lens[b] - q_len, lens[b], device=q.device)[:, None, None]
            scores.masked_fill_(torch.arange(lens[b], device=q.device) > last, -torch.inf)
        lse = scores.logsumexp(-1)
        denominator = lse if sink is None else torch.logaddexp(lse, sink.double())
        p = torch.exp(scores - denominator[..., None]).nan_to_num(0.0)
        values = keys[:, :512] * args[8].item()
        found.append((p @ values, lse, p @ values.abs()))
    return testing.Exact(*(torch.stack(parts) for parts in zip(*found, strict=True)))


def check(sample, num_sm_parts=None):
    """With `num_sm_parts` by a plan of so many parts, or 0 for those of this GPU."""
    args, kwargs = hostile(sample)
    if num_sm_parts is not None:
        longest = kwargs["max_seqlen_kv"] = max(args[LENS].tolist())
        sizes = dict(num_heads=args[Q].shape[-2], max_seqlen_q=args[Q].shape[1], max_seqlen_kv=longest)
        args[PLAN] = mla_suite.plan(args[LENS], num_sm_parts=num_sm_parts or None, **sizes)
    choice = dispatch.choose("decode", DECODE.backends, DECODE.problem(*args, **kwargs), here(), "cuda")
    assert choice.supported.config.kv_load == "fp8_scores", str(choice)
    outputs = mla_suite.decode(*args, **kwargs)
    for found in testing.attention_within(outputs, modelled(args, kwargs)):
        error = (found.got.double() - found.exact).abs()
        finite = found.exact.isfinite()
        assert torch.equal(found.got[~finite].double(), found.exact[~finite]), found.name
        worst = (error / found.allowed)[finite].max().item()
        assert worst <= 1, f"{found.name}: {worst:.3g} times as far off as it may be"


@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_those_of_the_models_scores(shape):
    check(decode_sample(seed=len(shape), precision="fp8", **FP8, **SHAPES[shape]))


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("lens", [(3000,) * 33, (4000, 17, 900, 2100, 64, 0, 7000, 333) * 3])
def test_a_plan_walked_in_pairs_is_right(rules, lens, pairs):
    rules(pairs=pairs, every_plan=True)
    check(decode_sample(lens, heads=100, sink=True, precision="fp8", **FP8), num_sm_parts=0)


def test_random_problems():
    draw = random.Random(91)
    for number in range(60):
        heads = draw.choice((33, 40, 64, 96, 127, 128))
        lens = tuple(draw.randint(0, draw.choice((31, 64, 300, 2100))) for _ in range(draw.randint(1, 5)))
        options: dict = dict(
            q_len=draw.choice((1, 1, 2, 3)),
            page=draw.choice((32, 64, 96)),
            causal=draw.random() < 0.8,
            sink=draw.random() < 0.3,
            planned=draw.random() < 0.3,
            **draw.choice(({}, {}, dict(num_splits=draw.randint(1, 9)), dict(split_size=draw.choice((32, 100, 256))))),
        )
        lens = lens if max(lens) else (1, *lens[1:])
        try:
            check(decode_sample(lens, heads=heads, seed=number, precision="fp8", **FP8, **options))
        except AssertionError as error:
            raise AssertionError(f"problem {number}: {heads=} {lens=} {options=}: {error}") from error


def test_what_is_stated_of_random_values():
    """Against exact scores: the operator's own bound, and one that is far below what fp8 weights would lose."""
    args, kwargs = decode_sample((2000, 700), heads=128, precision="fp8", **FP8).make(torch.device("cuda"))
    choice = dispatch.choose("decode", DECODE.backends, DECODE.problem(*args, **kwargs), here(), "cuda")
    outputs = mla_suite.decode(*args, **kwargs)
    for found in DECODE.compare(choice.supported.config, outputs, DECODE.Args(*args, **kwargs)):
        assert ((found.got.double() - found.exact).abs() <= found.allowed).all(), found.name
        if found.name == "out":
            off = (found.got.double() - found.exact).norm() / found.exact.norm()
            assert off < 2.0**-8, off


def test_calls_are_the_same_every_time():
    args, kwargs = decode_sample((1500, 33, 700), heads=128, precision="fp8", **FP8).make(torch.device("cuda"))
    first = mla_suite.decode(*args, **kwargs)
    for _ in range(20):
        again = mla_suite.decode(*args, **kwargs)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
