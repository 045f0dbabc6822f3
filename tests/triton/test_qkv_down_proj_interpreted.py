"""Adding a product's parts and both norms, in Triton's interpreter on the CPU, in fp16."""

import pytest
import torch

from mla_suite import testing
from mla_suite.models import qkv_down_proj

EPS = 1e-3


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("sizes", [(1536, 512, 64), (20, 48, 8)])
def test_the_numbers_are_torchs(tokens: int, parts: int, sizes: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    given = torch.randn(parts, tokens, sum(sizes)).to(torch.float32 if parts > 1 else torch.float16)
    norms = [
        qkv_down_proj.LatentNorm(size, EPS * size, dtype=torch.float16).requires_grad_(False) for size in sizes[:2]
    ]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    q, kv_c, k_pe = made = tuple(testing.poison(torch.empty(tokens, size).half()) for size in sizes)
    qkv_down_proj._add_and_norm(given, norms[0].weight, norms[1].weight, norms[0].eps, norms[1].eps, made)
    expected = given.sum(0).half().split(sizes, dim=-1)
    torch.testing.assert_close(q, norms[0](expected[0]), rtol=2**-10, atol=0)
    torch.testing.assert_close(kv_c, norms[1](expected[1]), rtol=2**-10, atol=0)
    assert torch.equal(k_pe, expected[2])


def test_no_tokens() -> None:
    weights = [torch.ones(size).half() for size in (48, 32)]
    made = qkv_down_proj._latents(torch.zeros(0, 40).half(), torch.zeros(88, 40).half(), *weights, EPS, EPS)
    assert [tuple(each.shape) for each in made] == [(0, 48), (0, 32), (0, 8)]
