"""Hostile decode problems for machine code, in the emulator with every check on or on a GPU, against fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import hostile_inputs
import pytest
import torch

from mla_suite import archs, emulator
from mla_suite.build import compilers, manifest
from mla_suite.core import dispatch
from mla_suite.core.op import Sample
from mla_suite.launch import scratch
from mla_suite.ops.decode import DECODE
from mla_suite.testing import Exact, exact_decode, poison, ulp

CPU = torch.device("cpu")
LOST = 448 * torch.finfo(torch.float32).tiny  # a weight below fp32's least normal number, of a value of e4m3
FP8_NAN = {"fnuz": 0x80, "ocp": 0x7F}
FP8_FORMATS = {"gfx942": "fp8_fnuz", "gfx950": "fp8"}
"""Arch -> its kv_format of fp8 rows."""
FP16: dict[str, Any] = {"kv_format": "fp16", "dtype": torch.float16}
FNUZ, OCP = ({"kv_format": name} for name in FP8_FORMATS.values())
FNUZ_QUERY: dict[str, Any] = FNUZ | {"dtype": torch.float8_e4m3fnuz}
OCP_QUERY: dict[str, Any] = OCP | {"dtype": torch.float8_e4m3fn}
FP8_QUERIES = {"gfx942": FNUZ_QUERY, "gfx950": OCP_QUERY}
"""Arch -> what calls store that have fp8 queries as well."""
NANS = torch.tensor([0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
"""Rounding the second to bf16 by an addition would carry through the sign."""

HEADS = (1, 8, 12, 16, 24, 32, 40, 64, 96, 128)
Q_LENS = (1, 2, 3, 4, 8)
PAGES = (1, 16, 61, 64)
LENS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 300, 600)
"""Of 600 a wave has 150 keys: its third block of 64 page numbers lies where the first one was."""
MODES: tuple[dict[str, Any], ...] = (
    {"num_splits": 1},
    {"num_splits": 3, "sink": True},
    {"planned": True},
    {"split_size": 128},
    {"varlen": True, "planned": True, "sink": True},
    {"ragged_pages": True, "num_splits": 1, "sink": True},
    {"causal": False, "num_splits": 2, "varlen": True},
)


def hostile(sample: Sample, arch: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sample with NaN in every row no sequence owns, and absurd page numbers behind the used ones."""
    args, kwargs = sample.make(CPU)
    return made_hostile(args, kwargs, arch), kwargs


def made_hostile(args: Sequence[Any], kwargs: dict[str, Any], arch: str) -> tuple[Any, ...]:
    """The arguments with NaN in every row that no query token may see, and absurd page numbers for pages of such."""
    nan_byte = FP8_NAN[archs.get(arch).fp8]
    return hostile_inputs.hostile(args, kwargs.get("window_left", -1), nan_byte, wider=False)


def sequences(args: Sequence[Any], which: Any) -> list[Any]:
    """The arguments for some sequences of a batch; queries are not packed, and pages are in a table."""
    q, cache, seq_lens, table, *rest = args
    return [q[which], cache, seq_lens[which], table[which], *rest]


def chosen(arch: str, args: Sequence[Any], kwargs: dict[str, Any], device: str = "cpu") -> dispatch.Choice:
    return dispatch.choose("decode", DECODE.backends, DECODE.problem(*args, **kwargs), archs.get(arch), device)


def decode(
    arch: str, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device = CPU
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the arch's native kernels and nothing else; the results are on the CPU."""
    args = [None if tensor is None else tensor.to(device) for tensor in args]
    choice = chosen(arch, args, kwargs, device.type)
    assert choice.backend.name == "native", str(choice)
    out, lse = torch.ops.mla_suite.decode(*args, **kwargs)
    return out.cpu(), lse.cpu()


def counted_by_packaged_compiler(arch: str, instance: str) -> None:
    """Skips where the arch's kernels were built by another compiler than the one whose counts the tests name."""
    entry = manifest.installed().find(arch, instance)
    if entry.compiler != compilers.packaged().version:
        pytest.skip(f"the counts are those of {compilers.packaged().version}, the kernels are of {entry.compiler}")


def counted(arch: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The counters of the only launch, which found nothing."""
    with emulator.configured(collect=True) as reports:
        decode(arch, args, kwargs)
    (report,) = reports
    assert not report.findings
    return report


def cosine_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float(1 - (a * b).sum() / (a.norm() * b.norm()))


def assert_within_bound(out: torch.Tensor, lse: torch.Tensor, exact: Exact, rounding: float = 2.0**-8) -> None:
    """|out - exact| <= rounding * sum(p |v|) + 1 ulp of out; 2^-8 for P rounded to 16 bits. lse within 1e-4.

    Arithmetic in fp32 may take a weight below its least normal number for 0, as behind a sink or beside a key that all
    weight goes to, and with it leave out that much of a value.
    """
    error = (out.double() - exact.out).abs()
    allowed = rounding * exact.magnitude + ulp(exact.out, out.dtype) + LOST
    worst = float((error / allowed).max()) if error.numel() else 0.0
    assert bool((error <= allowed).all()), f"out is {worst:.3g} times as far from the exact result as it may be"
    empty = exact.lse.isinf()
    assert torch.equal(lse[empty].double(), exact.lse[empty])
    assert not bool(out[empty].any()), "a row that sees nothing must be 0"
    off = (lse.double() - exact.lse)[~empty].abs()
    assert bool((off <= 1e-4 * exact.lse[~empty].abs().clamp(min=1.0)).all()), f"lse is off by {float(off.max()):.3g}"


def assert_nan_in(which: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
    """In all results of these sequences or tokens, and in none of the others."""
    nan = torch.zeros(len(out), dtype=torch.bool)
    nan[which] = True
    assert bool(out[nan].isnan().all() and lse[nan].isnan().all())
    assert bool(out[~nan].isfinite().all() and lse[~nan].isfinite().all())


# Weights rounded to e4m3 are off by up to 2^-4 of themselves, and so is their sum, by which outputs are divided:
# 2 * 2^-4 / (1 - 2^-4), and a little for weights that are denormal, 2^-14 of the largest and less.
COARSE = 0.14


def assert_right(arch: str, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device = CPU) -> None:
    """The arch's native kernels give what fp64 gives, within the bound of the weights that they use."""
    out, lse = decode(arch, args, kwargs, device)
    coarse = getattr(chosen(arch, args, kwargs).supported.config, "fp8_weights", False)
    assert_within_bound(out, lse, exact_decode(*args, **kwargs), COARSE if coarse else 2.0**-8)


def check(arch: str, sample: Sample, device: torch.device = CPU) -> None:
    args, kwargs = hostile(sample, arch)
    poison(scratch.take(device, 1 << 20))
    assert_right(arch, args, kwargs, device)


def cover(
    modes: Sequence[dict[str, Any]], halves: Sequence[int] = (0, 1)
) -> Iterator[tuple[int, int, int, int, dict[str, Any]]]:
    """Shapes in which any two of heads, q_len, page and mode meet at least once; in either half each value occurs."""
    # Strides that are prime to the number of choices walk through all pairs.
    for i, heads in enumerate(HEADS):
        for j in (j for j in range(len(modes)) if (i // 2 + j) % 2 in halves):
            mode = modes[j]
            start = (3 * i + 4 * j) % len(LENS)
            yield heads, Q_LENS[(i + j) % len(Q_LENS)], PAGES[(i + 3 * j) % len(PAGES)], start, mode


def assert_pairwise(modes: Sequence[dict[str, Any]]) -> None:
    """Any two of heads, q_len, page and mode meet in the cover, and each length meets every q_len, page and mode."""
    met: set[tuple[Any, ...]] = set()
    for heads, q_len, page, start, mode in cover(modes):
        number = modes.index(mode)
        met |= {(heads, "q_len", q_len), (heads, "page", page), (heads, "mode", number)}
        met |= {("mode", number, "q_len", q_len), ("mode", number, "page", page), ("q_len", q_len, "page", page)}
        for length in lengths(start, heads, q_len):
            met |= {(name, value, length) for name, value in (("q_len", q_len), ("page", page), ("mode", number))}
    factors = len(HEADS), len(Q_LENS), len(PAGES), len(modes)
    pairs = sum(a * b for a, b in itertools.combinations(factors, 2))
    assert len(met) == pairs + len(LENS) * sum(factors[1:])
    for half in (0, 1):
        cases = [(heads, q_len, page, modes.index(mode)) for heads, q_len, page, _, mode in cover(modes, [half])]
        assert tuple(len(set(values)) for values in zip(*cases, strict=True)) == factors


def lengths(start: int, heads: int, q_len: int) -> tuple[int, ...]:
    """Lengths of a batch: several of LENS for few rows, fewer and shorter ones for many (the emulator's time)."""
    rotated = LENS[start:] + LENS[:start]
    if heads * q_len <= 64:
        return rotated[:4]
    return tuple(length for length in rotated if length <= (300 if heads * q_len <= 256 else 65))[:2]


def hard_scores(kind: str, args: Sequence[Any]) -> None:
    """Rewrites a sample of one 300-key sequence in pages of 64, in place: logits to +-200, rows that are all equal, one
    key above all others, and references that rise or never do. An fp8 cache comes with queries of its type."""
    q, cache, table, descales = args[0], args[1], args[3], args[7:9]
    stored = cache if cache.dtype != torch.uint8 else cache.view(q.dtype)
    for descale in descales:
        if descale is not None:
            descale.fill_(1.0)
    if kind == "equal":
        cache[:] = cache[0, 0]
    elif kind == "dominating":
        stored[table[0, 4].item(), 10] = (q[0, 0, 0].float() * 4).to(stored.dtype)
    else:
        keys = torch.arange(300)
        q[:], stored[table[0].long()[keys // 64], keys % 64] = rows_of_logits(kind, q.dtype, stored.dtype)


def rows_of_logits(kind: str, q_dtype: torch.dtype, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A query [576] and 300 keys, whose logits at a scale of 1/24 go to +-200: rising, falling, or at random."""
    logits, direction = torch.linspace(-200, 200, 300), torch.randn(576)
    logits = {"large": logits[torch.randperm(300)], "rising": logits, "falling": logits.flip(0)}[kind]
    keys = (logits[:, None] * 24 / direction.square().sum() * direction + torch.randn(300, 576) / 4).to(dtype)
    reached = keys.double() @ direction.to(q_dtype).double() / 24
    assert float(reached.min()) < -195
    assert float(reached.max()) > 195
    return direction.to(q_dtype), keys
