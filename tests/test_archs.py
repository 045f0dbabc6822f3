"""Archs as data: what a device says about itself, and which of the kernels that a record declares are picked."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from mla_suite import archs, launch
from mla_suite.archs import spec as specs
from mla_suite.archs.append_kv import MAX_TOKENS, AppendConfig
from mla_suite.archs.plan import FEW, PlanConfig
from mla_suite.build.instances import instances
from mla_suite.core import dispatch, explain, register
from mla_suite.core.dispatch import Unsupported
from mla_suite.launch import launcher
from mla_suite.ops.decode.samples import decode_sample

CPU = torch.device("cpu")


@pytest.mark.parametrize("units", [78, 114, 228])
def test_the_device_says_how_many_units_it_has(units, monkeypatch):
    """An H20 has 78, an H100 PCIe 114; the record's figures are an H200's. So with clocks and memory's bus width."""
    clocks = dict(clock_rate=1_755_000, memory_clock_rate=2_619_000)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=units, memory_bus_width=5120, **clocks)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    launcher._gpu_arch.cache_clear()
    try:
        found = launch.current_arch(SimpleNamespace(is_cuda=True, get_device=lambda: 3))
        assert (found.name, found.compute_units) == ("sm_90", units)
        assert found.memory_bytes_per_s == pytest.approx(3.15e12, rel=0.01)
        assert found.clock_mhz == 1755
    finally:
        launcher._gpu_arch.cache_clear()
    with launch.declared_kernels():
        for op in register.registry().values():
            native = dispatch.native_backend(op.name)
            for sample in op.samples():
                args, kwargs = sample.make(CPU)
                answer = native.supports(op.problem(*args, **kwargs), found)
                if not isinstance(answer, Unsupported):
                    assert answer.config.arch.compute_units == units


def test_another_device_of_an_arch_has_choices_of_its_own():
    asked = []
    backends = (
        dispatch.Backend("native", lambda problem, arch: asked.append(arch) or Unsupported("no"), lambda *_: None),
        dispatch.reference_backend(lambda *_: None),
    )
    h200 = archs.get("sm_90")
    for arch in (h200, h200.on_device(78), h200, h200.on_device(78)):
        dispatch.choose("a test", backends, 1, arch, "cuda")
    dispatch.clear_caches()
    assert [arch.compute_units for arch in asked] == [132, 78]


def test_on_a_cpu_the_reason_names_what_would_do():
    args, kwargs = decode_sample((5,)).make(CPU)
    reasons = dict(explain.explain("decode", *args, **kwargs).refused)
    assert reasons["native"] == archs.needed_gpu()
    assert specs.get("gfx942").emulable


@pytest.mark.parametrize("name", archs.names())
def test_every_declared_plan_and_append_kv_is_picked(name):
    """A declared kernel that no problem picks would be built and never run."""
    record = archs.get(name)
    kernels = archs.kernels(record)
    plans = PlanConfig(record, kernels.plan_waves)
    picked = {plans.instance(step, batch) for step, _ in kernels.plan_waves for batch in (1, FEW + 1)}
    for tokens, run in itertools.product((1, 2, MAX_TOKENS), {False, kernels.append_has_runs}):
        picked.add(AppendConfig(record, tokens, one_run=run).instance)
    assert {item.id for item in instances(name) if item.kernel in ("plan", "append_kv", "append_kv_run")} == picked


@pytest.mark.parametrize("name", archs.names())
@pytest.mark.parametrize("op", register.registry().values(), ids=lambda op: op.name)
def test_a_kernel_that_is_not_built_is_refused_with_what_to_do(op, name, monkeypatch):
    with launcher.declared_kernels():
        problems = [op.problem(*args, **kwargs) for args, kwargs in (sample.make(CPU) for sample in op.samples()[:3])]
        served = [p for p in problems if not isinstance(op.backends[0].supports(p, archs.get(name)), Unsupported)]
    monkeypatch.setattr(launcher, "usable_kernels", lambda arch: ())
    refused = [op.backends[0].supports(problem, archs.get(name)) for problem in served]
    assert all(answer.reason.endswith(dispatch.HOW_TO_BUILD) for answer in refused), refused
    assert served or (op.name == "convert_kv" and name != "sm_90")  # of which it has a kernel alone
