"""Both down-projections with their norms: torch's numbers on a CPU; the products of a GPU's step."""

import pytest
import torch
from observers import Operators
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear

from mla_suite.models import MLA, MLAConfig, Step, mla
from mla_suite.models.qkv_down_proj import LatentNorm, latents

ops, suite, aten = torch.ops.mla_suite_layers, torch.ops.mla_suite, torch.ops.aten
CONFIG = MLAConfig.tiny()
SIZES = [48, 32, 8]


def test_each_part_has_its_own_norm():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, 40, generator=generator, dtype=torch.float64) for shape in ((2, 5), (88,)))
    norms = LatentNorm(48, 1e-3, dtype=torch.float64), LatentNorm(32, 1e-1, dtype=torch.float64)
    for norm in norms:
        torch.nn.init.normal_(norm.weight, generator=generator)
    q, kv_c, k_pe = latents(x, weight, None, *norms, SIZES)
    plain = linear(x, weight).split(SIZES, dim=-1)
    for got, product, norm in zip((q, kv_c), plain, norms, strict=False):
        expected = product * norm.weight / (product.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)  # in fp32 inside
    assert torch.equal(k_pe, plain[2])
    bias = torch.randn(88, generator=generator, dtype=torch.float64)
    for got, part in zip(latents(x, weight, bias, None, torch.nn.Identity(), SIZES), plain, strict=True):
        torch.testing.assert_close(got, part + bias.split(SIZES)[[48, 32, 8].index(part.shape[-1])])


@pytest.mark.parametrize(("tokens", "last"), [(1, aten.mm), (3, aten.mm), (1, aten.addmm)])
def test_a_fused_step_on_a_gpu(monkeypatch, tokens, last):
    """No norm beside the products; a long last one is cuBLASLt's: it has a bias, which is no part of the state."""
    monkeypatch.setattr(mla, "_LONG", 256 if last is aten.addmm else 257)  # 8 heads of 32 values
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda linear: None)  # it draws numbers on the GPU
    with FakeTensorMode(), torch.no_grad(), Operators() as ran:
        gpu = torch.device("cuda")
        layer = MLA(CONFIG, kv_format="bf16", dtype=torch.bfloat16, device=gpu)
        names = list(layer.state_dict())
        layer.fuse().fuse()
        kv_cache = torch.empty(4, 16, 576, dtype=torch.bfloat16, device=gpu)
        table, lens = (torch.zeros(shape, dtype=torch.int32, device=gpu) for shape in ((2, 2), (2,)))
        places = torch.zeros(2 * tokens, dtype=torch.int64, device=gpu)
        x = torch.empty(2, tokens, CONFIG.hidden_size, dtype=torch.bfloat16, device=gpu)
        out = layer(x, kv_cache, Step(table, lens, places, places), torch.empty(64, 64, device=gpu))
    assert out.shape == x.shape
    called = [op.overloadpacket for op in ran.seen]
    called = [op for op in called if op in (aten.mm, aten.addmm) or op._qualified_op_name.startswith("mla_suite")]
    assert called == [ops.latents, aten.mm, suite.append_kv, ops.absorb, suite.decode, ops.head_values, last]
    assert list(layer.state_dict()) == names
    assert [name for name, _ in layer.named_parameters()] == names
