"""A launch of sm_90's decode without a GPU: what the driver would be given."""

from __future__ import annotations

import torch
from backend_calls import BackendCalls

from mla_suite import archs
from mla_suite.archs.common import combine
from mla_suite.archs.common import decode as launching
from mla_suite.archs.sm_90 import decode as sm_90
from mla_suite.build import params
from mla_suite.launch import tensor_map
from mla_suite.ops.decode import DECODE

NATIVE = BackendCalls(DECODE, "native")

CPU = torch.device("cpu")
H200 = archs.get("sm_90")


def launched(monkeypatch, sample, given=None, asked=None):
    """The one launch of a call on CPU tensors: (instance, grid, block, shared bytes, fields, overlap, arguments)."""
    calls = []

    def bind(op, instance, place, grid, block, dynamic_lds, naming, overlap=False):
        def launch(packed, given):
            names = {buffer.name: buffer for buffer in naming(*given)}
            fields = params.load("decode_tma").unpack(packed)
            calls.append((instance, grid, block, dynamic_lds, fields, overlap, names))

        return launch

    monkeypatch.setattr(launching, "bind", bind)
    monkeypatch.setattr(combine, "bind", lambda *args, **kwargs: lambda *given: None)
    asked = [] if asked is None else asked
    monkeypatch.setattr(tensor_map, "swizzled", lambda *args: asked.append(args) or tuple(range(1, 17)))
    args, kwargs = given or sample.make(CPU)
    config = sm_90.config_for(DECODE.problem(*args, **kwargs), H200)
    outputs = tuple(torch.empty(o.shape, dtype=o.dtype) for o in DECODE.specify(*args, **kwargs))
    NATIVE.run(config, outputs, *args, **kwargs)
    (call,) = calls
    return call, args, outputs
