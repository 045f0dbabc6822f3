"""Random problems of the AMD kernels, each a function of its seed, against fp64 within the stated bounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from decode_grid import CPU, assert_within_bound, chosen, decode, made_hostile
from sparse_problems import MODES, attend, exact, in_mode, problem, with_descales

from mla_suite import archs, emulator
from mla_suite.archs.cdna.decode import FP8_KV_FORMATS, FP8_QUERIES
from mla_suite.launch import scratch
from mla_suite.ops.decode import Q_FP8
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode, fp8_weights_bound, poison

DENSE, MASKED, EXTENDS, SPARSE = 1000, 300, 300, 500
"""How many problems a full run takes of each arch that has the kernels: seeds 0, 1, 2, ..."""
ROW_KEYS = 128 * 192
"""Most query rows times keys of a problem, which takes the emulator up to half a second."""
EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
ORDERS = ("forward", "reverse", "shuffle:1", "shuffle:2")
"""In which workgroups run."""
RECORDS = ((("dsv4",), 4), (("v32", "v32_pow2"), 2), (("v32_nope",), 2), (("v41", "v41_fp4"), 4), (("bf16",), 4))
"""KV formats that one sparse problem mixes, and its most pools."""
FLAVOURED = {"fnuz": ((("dsv4_fnuz",), 4), (("fp8_fnuz",), 4)), "ocp": ((("fp8",), 4),)}
"""Those of archs that convert fp8 in this flavour; the last are bare rows."""


def length(draw: random.Random, most: int) -> int:
    """Sizes at which loops change, or any."""
    return min(most, draw.choice((*EDGES, draw.randint(0, 400), draw.randint(0, 400))))


def dense(arch: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of decode: NaN in every row that no sequence owns, absurd page numbers behind the used ones."""
    draw = random.Random(f"dense {arch} {seed}")
    q_len = draw.choice((1, 1, 1, 2, 3, 4, draw.randint(1, 8)))
    heads = draw.choice((8, 16, 32, 64, 128, draw.randint(1, 16), draw.randint(1, 128)))
    args, kwargs = _dense(draw, arch, seed, heads, q_len)
    return made_hostile(args, kwargs, arch), kwargs


def masked(arch: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of decode with a sliding window, or with a random tree of up to 64 drafts."""
    draw = random.Random(f"masked {arch} {seed}")
    q_len = draw.choice((1, 2, 3, 5, draw.randint(1, 8), draw.randint(1, 64)))
    heads = min(draw.choice((8, 16, 32, 64, 128, draw.randint(1, 16), draw.randint(1, 128))), 512 // q_len)
    window_left = draw.choice((0, 1, 15, 63, 64, 65, draw.randint(0, 200), 1000))
    mask = draw.choice(({"tree": True}, {"window_left": window_left}))
    return _dense(draw, arch, seed, heads, q_len, **mask)


def extend(arch: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of decode with more than 32 query tokens, whose row tiles leave out the keys that they do not see."""
    draw = random.Random(f"extend {arch} {seed}")
    q_len = draw.choice((33, 40, 64, 65, 100, draw.randint(33, 128)))
    heads = min(draw.choice((1, 2, 4, 8, draw.randint(1, 16))), 512 // q_len)
    mask = draw.choice(({}, {"window_left": draw.choice((0, 1, 31, 64, draw.randint(0, 200)))}))
    return _dense(draw, arch, seed, heads, q_len, most=draw.choice((64, 200, 300)), **mask)


def _dense(
    draw: random.Random, arch: str, seed: int, heads: int, q_len: int, most: int = 0, **mask: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """most  keys of all sequences together, if not as many as ROW_KEYS allows"""
    fp8, fp8_query = FP8_KV_FORMATS[archs.get(arch).fp8], FP8_QUERIES[archs.get(arch).fp8]
    stored: dict[str, Any] = draw.choice(
        (
            {},
            {"rope": 0},
            {"rotate": True},
            {"kv_format": "fp16", "dtype": torch.float16},
            {"kv_format": "fp16", "dtype": torch.float16, "rope": 0},
            {"kv_format": fp8},
            {"kv_format": fp8, "dtype": fp8_query},
        )
    )
    split: dict[str, Any] = draw.choice(
        (
            {},
            {"num_splits": draw.randint(1, 7)},
            {"split_size": draw.choice((1, 16, 64, 100, 128))},
            {"planned": True},
            {"planned": True, "split_size": draw.choice((64, 128))},
        )
    )
    left = most or ROW_KEYS // (q_len * heads)
    if "split_size" in split and split["split_size"] < 64:
        left = min(left, 30 * split["split_size"])
    lens = []
    for _ in range(draw.randint(1, 5)):
        lens.append(length(draw, left))
        left -= lens[-1]
    if not any(lens) and split.get("planned"):
        split = {"planned": True}  # a plan of a split size is refused without the longest length
    sample = decode_sample(
        lens,
        heads=heads,
        q_len=q_len,
        page=draw.choice((1, 2, 16, 61, 64, 128, draw.randint(1, 300))),
        causal=draw.random() < 0.7 or "tree" in mask,
        sink=draw.random() < 0.3,
        varlen=draw.random() < 0.3,
        ragged_pages=draw.random() < 0.3,
        seed=seed,
        **stored,
        **split,
        **mask,
    )
    args, kwargs = sample.make(CPU)
    args = list(args)
    if "rope" in stored or draw.random() < 0.5:
        kwargs["softmax_scale"] = draw.choice((192**-0.5, -(192**-0.5), 0.0))
    if args[8] is not None:  # kv_descale, and so q_descale where the queries are fp8
        args[8] = torch.tensor(draw.uniform(0.01, 0.5))
        args[7] = torch.tensor([draw.uniform(0.1, 1.0)]) if args[0].element_size() == 1 else None
    return tuple(args), kwargs


def check_dense(arch: str, seed: int) -> None:
    """One problem in the emulator that is active. AssertionError with the seed for a result outside its bound."""
    args, kwargs = dense(arch, seed)
    _check(arch, seed, args, args, kwargs, f"random_problems.dense({arch!r}, {seed})")


def check_masked(arch: str, seed: int) -> None:
    """As check_dense, with NaN in every key that no query token sees and absurd page numbers before the window."""
    _check_masked(arch, seed, masked)


def check_extend(arch: str, seed: int) -> None:
    """The same of an extend."""
    _check_masked(arch, seed, extend)


def _check_masked(arch: str, seed: int, make: Callable[[str, int], tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    args, kwargs = make(arch, seed)
    hostile = made_hostile(args, kwargs, arch)
    _check(arch, seed, args, hostile, kwargs, f"random_problems.{make.__name__}({arch!r}, {seed})")


def _check(arch: str, seed: int, clean: Any, hostile: Any, kwargs: dict[str, Any], name: str) -> None:
    poison(scratch.take(CPU, 1 << 20))
    exact_result, rounding = exact_decode(*clean, **kwargs), 2.0**-8
    if getattr(chosen(arch, clean, kwargs).supported.config, "fp8_weights", False):
        exact_result, rounding = exact_result._replace(magnitude=fp8_weights_bound(*clean, **kwargs)), 1.0
    with emulator.configured(order=ORDERS[seed % len(ORDERS)]):
        out, lse = decode(arch, hostile, kwargs)
    _within(out, lse, exact_result, rounding, name)


def sparse(arch: str, seed: int, bare: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of sparse_decode: repeated and absurd indices into one to four pools, NaN in what is not selected.

    bare  over rows of per-tensor fp8 alone
    """
    draw = random.Random(f"sparse {arch} {seed}")
    torch.manual_seed(seed)
    flavoured = FLAVOURED[archs.get(arch).fp8]
    mode, (formats, most_pools) = draw.choice(MODES), draw.choice(flavoured[-1:] if bare else RECORDS + flavoured)
    tokens = draw.choice((2, 4)) if mode == "mtp" else draw.randint(1, 5)
    heads = draw.choice((16, 64, 128, draw.randint(1, 128)))
    most = max(8, ROW_KEYS // (tokens * heads))
    pools = []
    for _ in range(draw.randint(1, most_pools)):
        page = draw.choice((1, 2, 16, 61, 64, 256, draw.randint(1, 100)))
        pools.append((draw.choice(formats), draw.randint(1, 5), page, length(draw, most)))
        most -= pools[-1][-1]
    invalid = draw.choice((0.0, 0.2, 0.9))
    odd = any(page % 2 for _, _, page, _ in pools)  # unpadded pages of 584-byte records would not be aligned to 16
    padded, width = odd or draw.random() < 0.5, draw.choice((0, 512, 576))
    args, kwargs = problem(pools, tokens, heads, seed, invalid, padded=padded, width=width)
    in_mode(mode, args, kwargs, seed)
    if draw.random() < 0.3:
        kwargs["softmax_scale"] = draw.choice((192**-0.5, -(192**-0.5), 0.0))
    if formats == flavoured[-1][0] and draw.random() < 0.8:
        args = with_descales(args, seed, draw.choice((torch.bfloat16, *Q_FP8)))
    return args, kwargs


def check_sparse(arch: str, seed: int, bare: bool = False) -> None:
    """One problem in the emulator that is active; against keys rounded to bf16, as v32 records are defined."""
    args, kwargs = sparse(arch, seed, bare)
    poison(scratch.take(CPU, 1 << 20))
    with emulator.configured(order=ORDERS[seed % len(ORDERS)]):
        out, lse = attend(args, kwargs)
    _within(out, lse, exact(*args, **kwargs), 2.0**-8, f"random_problems.sparse({arch!r}, {seed}, {bare})")


def _within(out: torch.Tensor, lse: torch.Tensor, exact_result: Any, rounding: float, name: str) -> None:
    try:
        assert_within_bound(out, lse, exact_result, rounding)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error
