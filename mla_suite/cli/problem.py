"""A problem of decode or sparse_decode given by options, for the commands that take one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mla_suite.cli import positive

if TYPE_CHECKING:
    import torch

    from mla_suite.archs import ArchSpec

Q_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz")
OPTIONS: dict[str, dict[str, Any]] = {
    "batch": dict(type=positive, help="sequences (default 1)"),
    "heads": dict(type=positive, help="heads of the queries"),
    "q_len": dict(type=positive, help="query tokens of a sequence (default 1)"),
    "kv": dict(type=int, help="cached keys of a sequence, of decode"),
    "topk": dict(type=positive, help="selected keys of a query token, of sparse_decode"),
    "page": dict(type=positive, help="keys in a page of the cache (default 64)"),
    "kv_format": dict(help="the cache's kv_format (default bf16; sparse_decode: v32)"),
    "q_dtype": dict(choices=Q_DTYPES, help="type of the queries (default bfloat16)"),
    "plan": dict(action="store_true", default=None, help="with a plan"),
    "num_splits": dict(type=int, help="splits of a sequence (default 0: the kernel's own)"),
    "split_size": dict(type=int, help="keys of a split in batch-invariant mode (default 0: off)"),
}


def add_arguments(parser: argparse.ArgumentParser, about: str, names: Sequence[str]) -> None:
    """Adds the options of these names, in a group of their own that `about` describes."""
    group = parser.add_argument_group("a problem of your own", about)
    for name in names:
        group.add_argument(f"--{name.replace('_', '-')}", **OPTIONS[name])


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that were given, by name."""
    found = {name: value for name in OPTIONS if (value := getattr(args, name, None)) is not None}
    if found.get("kv", 0) < 0:
        raise ValueError(f"--kv {found['kv']}; it is a number of keys, 0 at least")
    return found


def without_values(op: str, options: dict[str, Any], arch: ArchSpec | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) of the operator for the options, as tensors that have shapes and no values.

    arch  where a plan would be made; None is a device without kernels of this library
    """
    length = {"decode": "kv", "sparse_decode": "topk"}.get(op)
    if length is None:
        raise ValueError(f"a problem of your own is one of decode or sparse_decode, not of {op}")
    missing = [f"--{name}" for name in ("heads", length) if name not in options]
    if missing:
        raise ValueError(f"a problem of {op} needs {' and '.join(missing)}")
    foreign = {"kv": "topk", "topk": "kv"}[length]
    if foreign in options:
        raise ValueError(f"--{foreign} is not an option of {op}; it takes --{length}")
    return (_decode if op == "decode" else _sparse_decode)(options, arch)


def _decode(options: dict[str, Any], arch: ArchSpec | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    from mla_suite import kv_formats
    from mla_suite.kv_formats import cache as caches

    batch, page, keys = options.get("batch", 1), options.get("page", 64), options["kv"]
    kind = kv_formats.kv_format(options.get("kv_format", "bf16"))
    pages = -(-keys // page)
    tensors = (
        _queries(options, kind.head_dim),
        caches.empty(kind, batch * pages + 1, page, device="meta"),
        torch.empty(batch, dtype=torch.int32, device="meta"),
        torch.empty(batch, pages, dtype=torch.int32, device="meta"),
    )
    keywords = dict(softmax_scale=192**-0.5, kv_format=kind.name, max_seqlen_kv=keys)
    return tensors, keywords | _splits(options, batch, keys, arch)


def _sparse_decode(options: dict[str, Any], arch: ArchSpec | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    from mla_suite import kv_formats
    from mla_suite.kv_formats import cache as caches

    batch, page, topk = options.get("batch", 1), options.get("page", 64), options["topk"]
    kind = kv_formats.kv_format(options.get("kv_format", "v32"))
    q = _queries(options, kind.head_dim)
    cache = caches.empty(kind, batch * -(-topk // page), page, device="meta")
    indices = torch.empty(*q.shape[:2], topk, dtype=torch.int32, device="meta")
    keywords: dict[str, Any] = dict(softmax_scale=192**-0.5, kv_formats=[kind.name])
    # A plan of sparse_decode has a sequence for each query token.
    return (q, [cache], [indices]), keywords | _splits(options | {"q_len": 1}, q.shape[0] * q.shape[1], topk, arch)


def _queries(options: dict[str, Any], head_dim: int) -> torch.Tensor:
    import torch

    shape = options.get("batch", 1), options.get("q_len", 1), options["heads"], head_dim
    return torch.empty(shape, dtype=getattr(torch, options.get("q_dtype", "bfloat16")), device="meta")


def _splits(options: dict[str, Any], sequences: int, keys: int, arch: ArchSpec | None) -> dict[str, Any]:
    """Returns the arguments that say how keys are split; a plan is as `mla_suite.plan` makes it on the arch."""
    import torch

    import mla_suite
    from mla_suite.ops.plan import parts_on, scheduler

    found: dict[str, Any] = {name: options[name] for name in ("num_splits", "split_size") if name in options}
    if "plan" in options:
        heads, q_len = options["heads"], options.get("q_len", 1)
        units = 1 if arch is None else arch.compute_units
        found["plan"] = mla_suite.plan(
            torch.empty(sequences, dtype=torch.int32, device="meta"),
            num_heads=heads,
            max_seqlen_q=q_len,
            max_seqlen_kv=keys,
            num_sm_parts=parts_on(units, scheduler.tile_rows(arch), heads * q_len),
            **found,
        )
    return found
