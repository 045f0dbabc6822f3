"""The products of a step on a GPU: both down-projections with their norms are one of them."""

import pytest
import torch
from observers import Operators
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_suite.models import MLA, MLAConfig, Step, mla

ops, suite, aten = torch.ops.mla_suite_layers, torch.ops.mla_suite, torch.ops.aten
CONFIG = MLAConfig.tiny()


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
