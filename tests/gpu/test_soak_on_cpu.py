"""The cases of soak_streaming.py, without a GPU: they use every instance of the streaming combine."""

from __future__ import annotations

from decode_launches import launched
from soak_streaming import CASES

from mla_suite.build.instances import instances
from mla_suite.ops.decode.samples import decode_sample


def test_every_streaming_instance_is_soaked(monkeypatch):
    soaked = set()
    for options in CASES.values():
        with monkeypatch.context() as patch:
            soaked |= {merge["kernel"] for merge in launched(patch, decode_sample(**options)).merges}
    assert {item.id for item in instances("sm_90") if item.kernel == "streaming_combine"} <= soaked
