"""How long the emulator takes for a decode of one sequence, every check on, beside a loop of Python."""

import time

import pytest
import torch
from built import require_built

import mla_suite
from mla_suite import emulator
from mla_suite.ops.decode.samples import decode_sample


def loop():
    total = 0
    for number in range(1_000_000):
        total += number * number % 7
    return total


def least(call):
    """The least processor time of this thread in a few calls: neither other processes nor a slow machine count."""
    taken = []
    for _ in range(3):
        begin = time.thread_time()
        call()
        taken.append(time.thread_time() - begin)
    return min(taken)


@pytest.mark.parametrize(("heads", "loops"), [(16, 2), (128, 12)])
def test_decode_of_1024_keys_on_one_core(arch, heads, loops):
    instance = f"decode_dtype-bf16_rows-{heads}_width-576_rotate-0"
    require_built(arch, instance)
    args, kwargs = decode_sample((1024,), heads=heads, num_splits=1).make(torch.device("cpu"))
    with mla_suite.emulate(arch), emulator.configured(threads=1, collect=True) as launches:
        took = least(lambda: mla_suite.decode(*args, **kwargs))
    assert len(launches) == 3, "the emulator ran each call"
    assert took < loops * least(loop)
