"""Streams captured by AMD's HIP runtime, replayed at other lengths: the same bits as a launch of that length."""

import pytest
import torch
from captures import CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL
from conftest import ARCH

import mla_suite
from mla_suite import emulator
from mla_suite.launch.gpu_driver import CAPTURE_MODE_RELAXED
from mla_suite.ops.decode.samples import decode_sample

CPU = torch.device("cpu")
LENS = ([130, 60], [1, 0], [64, 130], [17, 16], [129, 33], [0, 65])


def decode(args, kwargs):
    with mla_suite.emulate(ARCH), emulator.configured(threads=1):
        return torch.ops.mla_suite.decode(*args, **kwargs)


@pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_MODE_RELAXED])
@pytest.mark.parametrize("splits", [1, 3])
def test_captured_once_and_replayed_at_five_other_lengths(session, mode, splits):
    args, kwargs = decode_sample(LENS[0], heads=8, num_splits=splits).make(CPU)
    seq_lens = args[2]
    decode(args, kwargs)
    before = session.gpu.dispatches
    with session.capture(mode) as graph:
        out, lse = decode(args, kwargs)
    assert session.gpu.dispatches == before, "a capture executes nothing"
    launches = 1 + (splits > 1)
    try:
        for lens in LENS:
            seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
            reports = graph.replay()
            assert [report.findings for report in reports] == [()] * launches
            got = out.clone(), lse.clone()
            expected = decode(args, kwargs)
            for there, here in zip(got, expected, strict=True):
                assert torch.equal(there.view(torch.uint8), here.view(torch.uint8))
    finally:
        graph.close()
