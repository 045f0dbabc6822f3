"""decode against fp64: shapes by pairwise cover, hostile pages, stale plans, splits, batch invariance."""

from __future__ import annotations

import itertools

import pytest
import torch
from hostile_inputs import hostile, pairwise_cover
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import make

import mla_suite
from mla_suite import kv_formats
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import assert_close, exact_decode, score_rounding

CPU = torch.device("cpu")
few = settings(max_examples=25, deadline=None, derandomize=True)

AXES = {
    "heads": (1, 8, 12, 16, 24, 32, 40, 64, 96, 128),
    "q_len": (1, 2, 3, 4, 5, 8),
    "page": (1, 2, 16, 61, 64, 256),
    "causal": (True, False),
    "sink": (None, 0.0, torch.inf, -torch.inf, 1.5),
    "kv_format": ("bf16", "fp16", "fp8", "fp8_fnuz", "fp32"),
    "pages": ("block_table", "kv_indices"),
    "queries": ("equal", "varlen"),
    "split": ("none", "num_splits", "split_size", "plan"),
    "rotate": (False, True),
    "mask": (None, 0, 5, 100, "tree"),
}
LENS = (0, 1, 61, 130, 7)


def label(row):
    return "-".join(f"{name}:{row[name]}" for name in AXES)


def problem(row, lens=LENS, latent=64, rope=16, seed=0):
    """Arguments of decode for one row of AXES."""
    sample = decode_sample(
        lens,
        heads=row["heads"],
        q_len=row["q_len"],
        page=row["page"],
        latent=latent,
        rope=rope,
        kv_format=row["kv_format"],
        dtype={"fp16": torch.float16, "fp32": torch.float32}.get(row["kv_format"], torch.bfloat16),
        causal=row["causal"] or row["mask"] == "tree",
        sink=row["sink"] is not None,
        rotate=row["rotate"],
        varlen=row["queries"] == "varlen",
        ragged_pages=row["pages"] == "kv_indices",
        num_splits=3 if row["split"] == "num_splits" else 0,
        split_size=48 if row["split"] == "split_size" else 0,
        planned=row["split"] == "plan",
        window_left=row["mask"] if isinstance(row["mask"], int) else -1,
        tree=row["mask"] == "tree",
        seed=seed,
    )
    args, kwargs = sample.make(CPU)
    if row["sink"] is not None:
        args[9].fill_(row["sink"])
    return args, kwargs


def check(row, **options):
    args, kwargs = problem(row, **options)
    expected = exact_decode(*args, **kwargs)
    assert_close(*mla_suite.decode(*hostile(args, kwargs.get("window_left", -1)), **kwargs), expected)


@pytest.mark.parametrize("row", pairwise_cover(AXES), ids=label)
def test_against_fp64(row):
    check(row)


@pytest.mark.full
@pytest.mark.parametrize("kv_format", AXES["kv_format"])
def test_against_fp64_the_whole_product(kv_format):
    """Takes the product of heads, q_len, page, causal and sink; the other axes take turns."""
    turns = itertools.cycle(
        itertools.product(*(AXES[name] for name in ("pages", "queries", "split", "rotate", "mask")))
    )
    for values in itertools.product(*(AXES[name] for name in ("heads", "q_len", "page", "causal", "sink"))):
        check(dict(zip(AXES, (*values, kv_format, *next(turns)), strict=True)))


BASE = {name: values[0] for name, values in AXES.items()} | {"heads": 16, "page": 64}


@pytest.mark.parametrize("head_dim", [576, 512], ids=["v3", "v4"])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "fp8_fnuz"])
def test_full_width(head_dim, kv_format):
    latent, rope = (512, 64) if head_dim == 576 else (512, 0)
    check(BASE | {"kv_format": kv_format, "q_len": 2}, lens=(2500, 129), latent=latent, rope=rope)


def test_value_may_include_the_rope_part():
    args, kwargs = problem(BASE | {"rotate": True}, latent=48, rope=16)
    kwargs["head_dim_v"] = 64
    assert_close(*mla_suite.decode(*args, **kwargs), exact_decode(*args, **kwargs))


@pytest.mark.parametrize("rotate", [False, True], ids=["", "rotate"])
@pytest.mark.parametrize("name", ["v32", "dsv4"])
def test_records_of_sparse_models_are_read_too(name, rotate):
    kind = kv_formats.get_kv_format(name)
    generator = torch.Generator().manual_seed(0)
    cache = caches.pack(kind, torch.randn(4, 64, kind.head_dim, generator=generator))
    q = torch.randn(2, 2, 16, kind.head_dim, generator=generator).bfloat16()
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    arguments = (q, cache, torch.tensor([100, 65], dtype=torch.int32), table)
    kwargs = {"softmax_scale": 0.05, "kv_format": name}
    if rotate:
        turn = torch.rand(100, 32, generator=generator) * 6.28
        kwargs["rope_cos_sin"] = torch.cat((turn.cos(), turn.sin()), dim=1)
    assert_close(*mla_suite.decode(*arguments, **kwargs), exact_decode(*arguments, **kwargs))


def test_q_descale_and_fp8_queries():
    args, kwargs = problem(BASE | {"kv_format": "fp8"})
    q = (args[0].float() * 8).to(torch.float8_e4m3fn)
    args = (q, *args[1:7], torch.tensor([0.125]), *args[8:])
    out, lse = mla_suite.decode(*args, **kwargs)
    assert out.dtype == torch.bfloat16
    assert_close(out, lse, exact_decode(*args, **kwargs))


@pytest.mark.parametrize("factor", [1e6, 1e-6])
def test_a_q_descale_that_fp16_queries_cannot_be_multiplied_by(factor):
    args, kwargs = problem(BASE | {"kv_format": "fp16", "dtype": torch.float16})
    args = (*args[:7], torch.tensor(factor), *args[8:])
    kwargs["softmax_scale"] /= factor
    assert_close(*mla_suite.decode(*args, **kwargs), exact_decode(*args, **kwargs))


@pytest.mark.parametrize("positive", [False, True], ids=["of both signs", "positive"])
def test_large_scores_are_off_by_the_rounding_of_their_sums(positive):
    """By 20 and 40 times 2^-18 sum(p |v|); sums of positive products grow, and their roundings with them."""
    fp32 = dict(kv_format="fp32", dtype=torch.float32)
    args, kwargs = decode_sample([700, 200, 0], heads=64, q_len=3, **fp32).make(CPU)
    args[1].mul_(3.0)
    if positive:
        args[0].abs_(), args[1].abs_()
    kwargs["softmax_scale"] = 0.5
    exact, off = exact_decode(*args, **kwargs), score_rounding(*args, **kwargs)
    assert_close(*mla_suite.decode(*args, **kwargs), exact, off)
    rounded = mla_suite.decode(args[0], args[1].bfloat16().float(), *args[2:], **kwargs)
    with pytest.raises(AssertionError, match="times as far from the exact result as it may be"):
        assert_close(*rounded, exact, off)


@pytest.mark.parametrize("sink", [None, 0.0, torch.inf, -torch.inf])
def test_a_row_that_sees_nothing(sink):
    """Empty sequences, and query tokens before the first key: out 0, lse -inf, whatever the sink."""
    args, kwargs = problem(BASE | {"q_len": 4, "sink": sink}, lens=(0, 2, 4))
    out, lse = mla_suite.decode(*args, **kwargs)
    nothing = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
    assert torch.equal(lse == -torch.inf, nothing[:, :, None].expand_as(lse))
    assert torch.equal(out[nothing], torch.zeros_like(out[nothing]))
    assert bool((out[~nothing] == 0).all()) == (sink == torch.inf)


# Plans


@pytest.mark.parametrize("split", [{}, {"num_splits": 5}, {"split_size": 512}], ids=["balanced", "forced", "sized"])
@pytest.mark.parametrize("made_at", [[1, 1, 1], [5000, 5000, 5000], [0, 0, 8000], [4000, 1, 64]], ids=str)
def test_a_plan_serves_lengths_it_was_not_made_for(made_at, split):
    """Also a plan made at q_len 1 serves q_len 4."""
    args, kwargs = problem(BASE | {"q_len": 4}, lens=(5000, 0, 130))
    plan = make(made_at, **split)
    assert_close(*mla_suite.decode(*args[:11], plan, **kwargs), exact_decode(*args, **kwargs))


@pytest.mark.parametrize("with_plan", [False, True], ids=["", "plan"])
@pytest.mark.parametrize("sink", [None, 0.5])
def test_batch_invariant(with_plan, sink):
    """Bitwise equal at batch 1, 5, 64 and 129, each sequence at another position among others."""
    lens = [0, 1, 700, 64, 257, *(17 * b % 400 for b in range(124))]
    row = BASE | {"heads": 4, "q_len": 2, "sink": sink}
    args, kwargs = problem(row, lens=lens, latent=32, rope=16)
    kwargs |= {"split_size": 128}
    found: dict[int, list[bytes]] = {}
    for batch in (1, 5, 64, 129):
        for turn in range(2):
            chosen = torch.arange(129).roll(turn * 31 + batch)[:batch]
            plan = None
            if with_plan:
                seq_lens = args[2][chosen]
                plan = mla_suite.plan(seq_lens, num_heads=8, num_sm_parts=16, max_seqlen_kv=1024, split_size=128)
            out, lse = mla_suite.decode(
                args[0][chosen], args[1], args[2][chosen], args[3][chosen], *args[4:11], plan, **kwargs
            )
            for place, b in enumerate(chosen.tolist()):
                bits = out[place].view(torch.int16).numpy().tobytes() + lse[place].numpy().tobytes()
                found.setdefault(b, []).append(bits)
    assert all(len(set(results)) == 1 for results in found.values())
    assert sum(len(results) >= 3 for results in found.values()) > 60


# Properties


@given(st.lists(st.integers(0, 300), min_size=0, max_size=5), st.integers(1, 300), st.booleans())
@few
def test_splitting_anywhere_and_combining_equals_not_splitting(splits, length, sink):
    """Each part is a decode of its own over some of the keys, without the mask."""
    row = BASE | {"heads": 4, "causal": False, "kv_format": "fp32", "page": 1, "sink": 0.7 if sink else None}
    args, kwargs = problem(row, lens=(length,), latent=16, rope=8)
    whole = exact_decode(*args, **kwargs)
    bounds = sorted({0, length, *(split for split in splits if split < length)})
    parts = []
    for first, end in itertools.pairwise(bounds):
        table, lens = args[3][:, first:end], torch.tensor([end - first], dtype=torch.int32)
        parts.append(mla_suite.decode(args[0], args[1], lens, table, **kwargs))
    partial_out = torch.stack([out.view(4, 16) for out, _ in parts])
    partial_lse = torch.stack([lse.view(4) for _, lse in parts])
    out, lse = mla_suite.combine(
        partial_out, partial_lse, attn_sink=args[9], num_splits=len(parts), out_dtype=torch.float32
    )
    assert_close(out.view(1, 1, 4, 16), lse.view(1, 1, 4), whole)


@pytest.mark.parametrize(
    "options",
    [dict(heads=4, q_len=2), dict(heads=4, q_len=3, varlen=True), dict(kv_format="fp8", dtype=torch.float8_e4m3fn)],
    ids=["bf16", "ragged", "fp8"],
)
def test_queries_in_two_tensors(options):
    args, kwargs = decode_sample((70, 33), latent=16, rope=8, page=16, parts=True, **options).make(CPU)
    q, q_rope = args[0], args[-1]
    assert not q.is_contiguous() or q.shape[-2] == 1
    found = mla_suite.decode(*args, **kwargs)
    joined = mla_suite.decode(torch.cat((q, q_rope), dim=-1), *args[1:-1], **kwargs)
    assert all(map(torch.equal, found, joined))
