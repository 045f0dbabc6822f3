"""Every operator's samples through AMD's HIP runtime: right, without a finding, and the emulator's own bits."""

import pytest
import torch
from conftest import ARCH

import mla_suite
from mla_suite import emulator
from mla_suite.cli.emulate import measure
from mla_suite.cli.serving import serving
from mla_suite.core import register

SAMPLES = [(op, sample) for op in register.registry().values() for sample in op.samples()]


@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=[f"{op.name}-{sample.name}" for op, sample in SAMPLES])
def test_a_sample(drivers, session, op, sample):
    before = session.gpu.dispatches
    with mla_suite.emulate(ARCH):
        sample.make(torch.device("cpu"))
    making = session.gpu.dispatches - before  # a plan's launches, which are not the call's
    before += 2 * making
    record = measure(op, sample, ARCH)
    assert record["wrong"] == ""
    assert record["largest_difference"], "nothing was compared"
    assert [launch["findings"] for launch in record["launches"]] == [[]] * len(record["launches"])
    assert session.gpu.dispatches - before == len(record["launches"])
    if not record["launches"]:
        assert "is not built" not in record["explanation"], record["explanation"]
        assert serving(op.name, ARCH) != "native" or "not native" in record["explanation"]
        pytest.skip(record["explanation"].splitlines()[1].strip())
    assert_same_bits(drivers, op, sample)


def results(op, sample):
    args, kwargs = sample.make(torch.device("cpu"))
    with mla_suite.emulate(ARCH), emulator.configured(threads=1):
        returned = getattr(torch.ops.mla_suite, op.name)(*args, **kwargs)
    written = [kwargs[name] if name in kwargs else args[op.functional.arguments.index(name)] for name in op.mutates]
    outputs = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    return [*outputs, *written]


def assert_same_bits(drivers, op, sample):
    through_hip = results(op, sample)
    with drivers.use(drivers.direct):
        direct = results(op, sample)
    assert through_hip
    for there, here in zip(through_hip, direct, strict=True):
        assert torch.equal(there.view(torch.uint8), here.view(torch.uint8))
