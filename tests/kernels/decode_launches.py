"""A launch of sm_90's decode without a GPU: what the driver would be given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from backend_calls import BackendCalls
from launch_records import mapped_to, record

import mla_suite
from mla_suite import archs
from mla_suite.archs.sm_90 import decode as sm_90
from mla_suite.build import params
from mla_suite.core import allocation
from mla_suite.core.op import Sample
from mla_suite.launch import declared_kernels
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample

NATIVE = BackendCalls(DECODE, "native")

CPU = torch.device("cpu")
H200 = archs.get("sm_90")


class Launched(NamedTuple):
    """What the driver is given for a call.

    fields   the parameters of decode's launch, by name
    buffers  the tensors that it may touch, by name
    merges   the combines behind it: members of a `Recorded`, and their parameters
    maps     (address, dtype, sizes, strides, box) of each tensor map
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    smem: int
    fields: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    args: Sequence[Any]
    merges: list[dict[str, Any]]
    maps: list[tuple[Any, ...]]


def call_of(args, kwargs, op=DECODE, arch="sm_90"):
    """What the arch's native kernels do for a call, before addresses are known."""
    given = op.Args(*args, **kwargs)
    with declared_kernels():
        config = op.backends[0].supports(op.describe(given), archs.get(arch)).config
        return config.spec(allocation.empty(op.check(given), CPU), given)


def launched(monkeypatch, given):
    """The launches of a call on CPU tensors, a sample or its arguments."""
    calls, maps = record(monkeypatch), []
    mapped_to(monkeypatch, lambda *wanted: maps.append(wanted) or tuple(range(1, 17)))
    args, kwargs = given.make(CPU) if isinstance(given, Sample) else given
    config = sm_90.config_for(DECODE.problem(*args, **kwargs), H200)
    outputs = tuple(torch.empty(o.shape, dtype=o.dtype) for o in DECODE.specify(*args, **kwargs))
    NATIVE.run(config, outputs, *args, **kwargs)
    first, *behind = calls
    merges = [call._asdict() | params.load("combine").unpack(call.params) for call in behind]
    fields = params.load("decode_tma").unpack(first.params)
    return Launched(first.kernel, first.grid, first.threads, first.smem, fields, first.buffers, args, merges, maps)


def long_call(lens, planned=False, **options):
    """A call whose block table names one page of each sequence again and again.

    A cache that holds all keys takes seconds to draw, and a launch does not depend on its values.
    """
    args, kwargs = decode_sample((1,) * len(lens), **options).make(CPU)
    lengths = torch.tensor(lens, dtype=torch.int32)
    table = args[3].expand(-1, -(-max(lens) // args[1].shape[1])).contiguous()
    args = [*args[:2], lengths, table, *args[4:]]
    if planned:
        sizes = dict(num_heads=args[0].shape[-2], max_seqlen_q=args[0].shape[1], num_sm_parts=8)
        split = {name: options[name] for name in ("num_splits", "split_size") if name in options}
        args[11] = mla_suite.plan(lengths, max_seqlen_kv=max(lens), **sizes, **split)
    return args, kwargs
