"""Products with a matrix per head on a GPU, at sizes of DeepSeek V3 and its shares, against fp64.

The same kernels run in Triton's interpreter, in fp16, in tests/triton/test_absorb_interpreted.py.
"""

from __future__ import annotations

import pytest
import torch

from mla_suite.models.absorb import absorbed, head_values
from mla_suite.models.rope import rotate

GPU = torch.device("cuda")
LENGTH = 500
SHAPES = [(1, 128), (3, 16), (20, 5), (128, 128), (300, 32)]  # tokens, heads

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(tokens: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> Operands:
    """q_nope and q_pe as views of one product, W_UK and W_UV as views of kv_b_proj."""
    up = torch.randn(tokens, 1, heads, 192, device=GPU).to(dtype)
    both = (torch.randn(heads, 256, 512, device=GPU) / 23).to(dtype)
    return *up.split([128, 64], dim=-1), *both.split([128, 128], dim=1)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one rounding of the result and what fp32 sums of 512 products lose."""
    unit = torch.finfo(got.dtype).eps
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), expected, rtol=unit, atol=unit / 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "heads"), SHAPES)
@torch.no_grad()
def test_absorption(tokens: int, heads: int, dtype: torch.dtype) -> None:
    q_nope, q_pe, w_uk, _ = operands(tokens, heads, dtype)
    table, positions = torch.randn(LENGTH, 64, device=GPU), torch.randint(LENGTH, (tokens,), device=GPU)
    latent = torch.einsum("tohd,hdl->tohl", q_nope.double(), w_uk.double())
    assert absorbed(q_nope, q_pe, w_uk)[..., 512:].equal(q_pe)
    for interleaved in (True, False):
        q = absorbed(q_nope, q_pe, w_uk, table, positions, interleaved=interleaved)
        close(q[..., :512], latent)
        turned = rotate(q_pe.double(), table[positions][:, None, None], interleaved=interleaved)
        close(q[..., 512:], turned.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "heads"), SHAPES)
@torch.no_grad()
def test_values(tokens: int, heads: int, dtype: torch.dtype) -> None:
    *_, w_uv = operands(tokens, heads, dtype)
    latents = torch.randn(tokens, 1, heads, 512, device=GPU).to(dtype)
    values = head_values(latents, w_uv)
    assert values.is_contiguous()
    close(values, torch.einsum("tohl,hdl->tohd", latents.double(), w_uv.double()))


@torch.no_grad()
def test_compiled_once_for_all_batches() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def both(q_nope: torch.Tensor, q_pe: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
        return head_values(absorbed(q_nope, q_pe, w_uk)[..., :512], w_uv)

    compiled = torch.compile(both, fullgraph=True)
    for tokens in (2, 40, 129):
        given = operands(tokens, 16)
        for tensor in given[:2]:
            torch._dynamo.mark_dynamic(tensor, 0)
        assert compiled(*given).equal(both(*given))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
