"""Outputs that the eager fast path allocates."""

import pytest
import torch

from mla_suite.core import allocation
from mla_suite.core.op import Output


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 4), (0,)])
def test_outputs_are_as_torch_makes_them(monkeypatch, shape):
    outputs = [Output(shape, dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32)]
    device = torch.device("cpu")
    for made in (allocation.allocator(outputs, device)(), allocation.empty(outputs, device)):
        for tensor, (_, dtype) in zip(made, outputs, strict=True):
            right = torch.empty(shape, dtype=dtype)
            assert (tensor.shape, tensor.stride(), tensor.dtype) == (right.shape, right.stride(), right.dtype)
            assert tensor.is_contiguous()
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    assert [tensor.shape for tensor in allocation.allocator(outputs, device)()] == [shape] * 3
    assert allocation.allocator([], device)() == ()
