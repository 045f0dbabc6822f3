"""A launch of sm_90's decode without a GPU: what the driver would be given."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from backend_calls import BackendCalls
from launch_records import mapped_to, record

from mla_suite import archs
from mla_suite.archs.sm_90 import decode as sm_90
from mla_suite.build import params
from mla_suite.ops.decode import DECODE

NATIVE = BackendCalls(DECODE, "native")

CPU = torch.device("cpu")
H200 = archs.get("sm_90")


def launched(monkeypatch, sample, given=None, asked=None, merges=None):
    """The one launch of a call on CPU tensors: (instance, grid, block, shared bytes, fields, overlap, arguments).

    `merges` gets the combines behind it.
    """
    calls = record(monkeypatch)
    asked = [] if asked is None else asked
    mapped_to(monkeypatch, lambda *args: asked.append(args) or tuple(range(1, 17)))
    args, kwargs = given or sample.make(CPU)
    config = sm_90.config_for(DECODE.problem(*args, **kwargs), H200)
    outputs = tuple(torch.empty(o.shape, dtype=o.dtype) for o in DECODE.specify(*args, **kwargs))
    NATIVE.run(config, outputs, *args, **kwargs)
    first, *behind = calls
    if merges is not None:
        merges += [{"kernel": call.kernel, **params.load("combine").unpack(call.params)} for call in behind]
    buffers = {name: SimpleNamespace(tensor=tensor) for name, tensor in first.buffers.items()}
    fields = params.load("decode_tma").unpack(first.params)
    return (first.kernel, first.grid, first.threads, first.smem, fields, first.overlap, buffers), args, outputs
