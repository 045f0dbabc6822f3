"""A problem of decode or sparse_decode given by options, and a device, for the commands that take one."""

from __future__ import annotations

import argparse
import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import mla_suite
from mla_suite import kv_formats
from mla_suite.archs import ArchSpec
from mla_suite.cli import positive
from mla_suite.core.op import Sample
from mla_suite.errors import UsageError
from mla_suite.ops.decode import PRECISIONS
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan import parts_on, scheduler

LENGTHS, KV_FORMATS = {"decode": "kv", "sparse_decode": "topk"}, {"decode": "bf16", "sparse_decode": "v32"}
DRAWN = 4  # times the bytes of a problem: its values are drawn and compared in fp32
Q_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz")
OPTIONS: dict[str, dict[str, Any]] = {
    "batch": dict(type=positive, help="sequences (default 1)"),
    "heads": dict(type=positive, help="heads of the queries"),
    "q_len": dict(type=positive, help="query tokens of a sequence (default 1)"),
    "kv": dict(type=int, help="cached keys of a sequence, of decode"),
    "topk": dict(type=positive, help="selected keys of a query token, of sparse_decode (default kv_format: v32)"),
    "page_size": dict(type=positive, help="keys in a page of the cache (default 64)"),
    "kv_format": dict(help="the cache's kv_format (default bf16)"),
    "q_dtype": dict(choices=Q_DTYPES, help="type of the queries (default bfloat16)"),
    "precision": dict(choices=PRECISIONS, help="decode's; fp8 allows sums in fewer bits (default full)"),
    "plan": dict(action="store_true", default=None, help="with a plan"),
    "num_splits": dict(type=int, help="splits of a sequence (default 0: the kernel's own)"),
    "split_size": dict(type=int, help="most keys of a split in batch-invariant mode (default 0: off)"),
}


def torch_device(text: str) -> torch.device:
    """The type of an argument that names a device of this machine."""
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ArgumentTypeError(f"{text!r} is not a torch device; examples are cpu, cuda and cuda:1") from error
    there = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= there):
        raise ArgumentTypeError(f"{text!r} is not here; this machine has cpu and {there} GPUs that torch can use")
    return device


def add_arguments(parser: argparse.ArgumentParser, about: str, names: Sequence[str]) -> None:
    """Adds the options of these names, in a group of their own that `about` describes."""
    group = parser.add_argument_group("a problem of your own", about)
    for name in names:
        group.add_argument(f"--{name.replace('_', '-')}", **OPTIONS[name])


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that were given, by name."""
    found = {name: value for name in OPTIONS if (value := getattr(args, name, None)) is not None}
    if found.get("kv", 0) < 0:
        raise UsageError(f"--kv {found['kv']}; it is a number of keys, 0 at least")
    return found


def without_values(op: str, options: dict[str, Any], arch: ArchSpec | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) of the operator for the options, as tensors that have shapes and no values.

    arch  where a plan would be made; None is a device without kernels of this library
    """
    length = LENGTHS.get(op)
    if length is None:
        raise UsageError(
            f"a problem of your own is one of decode or sparse_decode, not of {op}: leave its options out, which shows "
            f"samples, or call mla_suite.explain({op!r}, ...) with the arguments of mla_suite.{op}"
        )
    missing = [f"--{name}" for name in ("heads", length) if name not in options]
    if missing:
        raise UsageError(f"a problem of {op} needs {' and '.join(missing)}")
    foreign = {"kv": "topk", "topk": "kv"}[length]
    if foreign in options:
        raise UsageError(f"--{foreign} is not an option of {op}; it takes --{length}")
    if op != "decode" and "precision" in options:
        raise UsageError(f"--precision is not an option of {op}; it is of decode")
    defaults = {"batch": 1, "q_len": 1, "page_size": 64}
    batch, q_len, page_size = (options.get(name, default) for name, default in defaults.items())
    keys, fmt = options[length], kv_formats.get_kv_format(options.get("kv_format", KV_FORMATS[op]))
    if batch * max(q_len * options["heads"] * fmt.head_dim, (keys + page_size) * fmt.token_bytes) >= 2**62:
        raise UsageError("a problem of more values than a tensor holds; give fewer sequences, heads or keys")
    pages, index = -(-keys // page_size), partial(torch.empty, dtype=torch.int32, device="meta")
    q_dtype = getattr(torch, options.get("q_dtype", "bfloat16"))
    q = torch.empty(batch, q_len, options["heads"], fmt.head_dim, dtype=q_dtype, device="meta")
    tensors: tuple[Any, ...]
    keywords: dict[str, Any]
    if op == "decode":
        cache = kv_formats.empty(fmt, batch * pages + 1, page_size, device="meta")
        tensors = (q, cache, index(batch), index(batch, pages))
        keywords = dict(kv_format=fmt.name, max_seqlen_kv=keys) | _splits(options, batch, q_len, keys, arch)
        if "precision" in options:
            keywords["precision"] = options["precision"]
    else:
        cache = kv_formats.empty(fmt, batch * pages, page_size, device="meta")
        tensors = (q, [cache], [index(batch, q_len, keys)])
        # A plan of sparse_decode has a sequence for each query token.
        keywords = dict(kv_formats=[fmt.name]) | _splits(options, batch * q_len, 1, keys, arch)
    return tensors, dict(softmax_scale=192**-0.5, **keywords)


def with_values(options: dict[str, Any], arch: ArchSpec) -> Sample:
    """The sample of decode for the options, which have heads and kv at least; made while the arch is emulated, its plan
    is that of `mla_suite.plan` there."""
    given = dict(options)
    lens, dtype = given.pop("batch", 1) * [given.pop("kv")], getattr(torch, given.pop("q_dtype", "bfloat16"))
    planned = dict(planned=given.pop("plan", False), num_sm_parts=_sm_parts(options, options.get("q_len", 1), arch))
    fmt = kv_formats.get_kv_format(given.get("kv_format", KV_FORMATS["decode"]))
    sizes = dict(latent=fmt.latent, rope=fmt.rope, page=given.pop("page_size", 64))
    sample = decode_sample(lens, dtype=dtype, **sizes, **planned, **given)
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if DRAWN * sample.bytes > here:
        needed = f"{DRAWN * sample.bytes / 2**30:.0f} GiB for its values, and this machine has {here / 2**30:.0f}"
        raise UsageError(f"the problem takes about {needed}; give fewer sequences, heads or keys")
    return sample


def _sm_parts(options: dict[str, Any], q_len: int, arch: ArchSpec | None) -> int:
    return parts_on(1 if arch is None else arch.compute_units, scheduler.tile_rows(arch), options["heads"] * q_len)


def _splits(options: dict[str, Any], sequences: int, q_len: int, keys: int, arch: ArchSpec | None) -> dict[str, Any]:
    """Returns the arguments that say how keys are split; a plan is as `mla_suite.plan` makes it on the arch."""
    found: dict[str, Any] = {name: options[name] for name in ("num_splits", "split_size") if name in options}
    if "plan" in options:
        found["plan"] = mla_suite.plan(
            torch.empty(sequences, dtype=torch.int32, device="meta"),
            num_heads=options["heads"],
            max_seqlen_q=q_len,
            max_seqlen_kv=keys,
            num_sm_parts=_sm_parts(options, q_len, arch),
            **found,
        )
    return found
