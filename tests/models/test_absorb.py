"""Products with a matrix per head: no pass beside them on a GPU. `test_mla.py` has the numbers, by torch on a CPU."""

import pytest
import torch
from observers import Operators
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_suite.models import absorb
from mla_suite.models.absorb import absorbed, head_values

ops = torch.ops.mla_suite_layers


def operands(dtype=torch.float64, heads=3, nope=32, v=16):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 5, heads, nope), (2, 5, heads, 64), (heads, nope, 512), (2, 5, heads, 512), (heads, v, 512)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def called_on_gpu(compute, *given):
    """The operators that a computation calls for tensors like these on an NVIDIA GPU; nothing is computed."""
    with FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in given]
        with Operators() as ran:
            made = compute(*fakes)
    return made, ran.seen


def test_a_gpus_products_have_no_pass_beside_them():
    q_nope, q_pe, w_uk, latents, w_uv = operands(torch.bfloat16, v=32)
    table, positions = torch.randn(9, 64), torch.arange(10)
    q, called = called_on_gpu(absorbed, q_nope, q_pe, w_uk, table, positions)
    assert called == [ops.absorb.default]
    assert (q.shape, q.dtype, q.is_contiguous()) == ((2, 5, 3, 576), torch.bfloat16, True)
    values, called = called_on_gpu(head_values, latents, w_uv)
    assert called == [ops.head_values.default]
    assert (values.shape, values.dtype, values.is_contiguous()) == ((2, 5, 3, 32), torch.bfloat16, True)


@pytest.mark.parametrize(
    "change",
    [
        torch.Tensor.float,
        lambda w_uv: w_uv[:, :20],
        lambda w_uv: w_uv.transpose(1, 2).contiguous().transpose(1, 2),
    ],
    ids=["fp32", "20 values", "transposed"],
)
def test_what_the_kernels_do_not_take_goes_through_torch(change):
    *_, latents, w_uv = operands(torch.bfloat16, v=32)
    w_uv = change(w_uv)
    _, called = called_on_gpu(head_values, latents.to(w_uv.dtype), w_uv)
    assert torch.ops.aten.bmm.default in called
    assert ops.head_values.default not in called


def test_gradients_go_through_torch():
    """Autograd refuses them at attention; a kernel without gradients would drop them silently."""
    with FakeTensorMode():
        first, second = torch.empty(2, 3, 32, 64, 64, dtype=torch.bfloat16, device="cuda").unbind()
    assert absorb._has_kernel(first, second)
    second.requires_grad_()
    assert not absorb._has_kernel(first, second)
    with torch.no_grad():
        assert absorb._has_kernel(first, second)
