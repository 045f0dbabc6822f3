"""How long the emulator takes for a decode of one sequence, every check on."""

import time

import pytest
import torch

import mla_suite
from mla_suite import emulator
from mla_suite.launch import has_kernel
from mla_suite.ops.decode.samples import decode_sample


@pytest.mark.parametrize(("heads", "seconds"), [(16, 0.5), (128, 4.0)])
def test_decode_of_1024_keys_on_one_core(arch, heads, seconds):
    instance = f"decode_dtype-bf16_rows-{heads}_width-576_rotate-0"
    if not has_kernel(arch, instance):
        pytest.skip(f"{instance} is not built for {arch}; run `python -m mla_suite build`")
    args, kwargs = decode_sample((1024,), heads=heads, num_splits=1).make(torch.device("cpu"))
    taken = []
    with mla_suite.emulate(arch), emulator.configured(threads=1):
        for _ in range(3):
            begin = time.perf_counter()
            mla_suite.decode(*args, **kwargs)
            taken.append(time.perf_counter() - begin)
    assert min(taken) < seconds
