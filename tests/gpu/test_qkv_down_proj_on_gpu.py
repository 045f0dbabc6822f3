"""Both down-projections with their norms on a GPU, at the sizes of DeepSeek V3, against fp64.

The kernel behind the product runs in Triton's interpreter, in fp16, in tests/triton/test_qkv_down_proj_interpreted.py.
"""

from __future__ import annotations

import pytest
import torch

from mla_suite.models.qkv_down_proj import MAX_TOKENS, LatentNorm, latents

GPU = torch.device("cuda")
SIZES = [1536, 512, 64]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 20, 128, MAX_TOKENS + 1])
@torch.no_grad()
def test_against_fp64(tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, 1, 7168, device=GPU).to(dtype)
    weight = (torch.randn(sum(SIZES), 7168, device=GPU) / 85).to(dtype)
    norms = [LatentNorm(size, 1e-6, dtype=dtype, device=GPU) for size in SIZES[:2]]
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 2)
    made = latents(x, weight, None, *norms, SIZES)
    exact = (x.double() @ weight.double().t()).split(SIZES, dim=-1)
    wanted = [part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) for part in exact[:2]]
    wanted = [part * norm.weight.double() for part, norm in zip(wanted, norms, strict=True)]
    unit = torch.finfo(dtype).eps
    for got, right in zip(made, (*wanted, exact[2]), strict=True):
        assert got.is_contiguous()
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), right, rtol=2 * unit, atol=unit / 16)  # three roundings, fp32 sums


@torch.no_grad()
def test_an_empty_batch() -> None:
    norms = [LatentNorm(size, 1e-6, dtype=torch.bfloat16, device=GPU) for size in SIZES[:2]]
    x = torch.empty(0, 1, 7168, device=GPU, dtype=torch.bfloat16)
    made = latents(x, torch.empty(2112, 7168, device=GPU, dtype=torch.bfloat16), None, *norms, SIZES)
    assert [tuple(each.shape) for each in made] == [(0, 1, size) for size in SIZES]
