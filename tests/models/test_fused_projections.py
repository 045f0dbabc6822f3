"""A layer after `fuse()`: the same numbers and state dict, one product less, and weights that stay in step."""

import copy
import io
import math

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from mla_suite.models import MLA, MLAConfig, PagedLatentCache, cos_sin_table

LOW_RANK = MLAConfig.tiny()
DIRECT = MLAConfig(hidden_size=256, num_heads=2, q_lora_rank=None, projection_bias=True)
BIASED = MLAConfig(hidden_size=256, num_heads=2, q_lora_rank=32, projection_bias=True, latent_norms=False)
CONFIGS = {"low rank": LOW_RANK, "direct, bias": DIRECT, "low rank, bias": BIASED}
BATCH, PAST = 3, 5


def make(config, dtype=torch.float32):
    layer = MLA(config, kv_format="fp32", dtype=dtype).requires_grad_(False)
    randomise(layer)
    return layer


def randomise(layer):
    for parameter in layer.parameters():
        parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))


def outputs(layer):
    """Prefill of PAST tokens a sequence, then a decode step, and the cache that they leave."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, PAST + 1, layer.config.hidden_size, generator=generator).to(layer.o_proj.weight.dtype)
    cache, sequences = PagedLatentCache.contiguous(1, BATCH, 8, kv_format="fp32")
    table = cos_sin_table(layer.config, 8)
    q_lens = [PAST] * BATCH
    prompt = layer.prefill(
        x[:, :PAST].flatten(0, 1), table, cache.layers[0], cache.append(sequences, q_lens), q_lens=q_lens
    )
    return prompt, layer(x[:, PAST:], cache.layers[0], cache.append(sequences, [1] * BATCH), table), cache.layers[0]


def assert_same(fused, plain):
    for mine, theirs in zip(outputs(fused), outputs(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_same_numbers_and_state_dict(name):
    plain = make(CONFIGS[name])
    fused = copy.deepcopy(plain).fuse()
    assert fused.down_weight is not None
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(tensor, plain.state_dict()[key]) for key, tensor in fused.state_dict().items())
    assert_same(fused, plain)
    held = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in fused.parameters()}
    whole = sum(storage.nbytes() for storage in held.values())
    biases = DIRECT.num_heads * DIRECT.qk_head_dim * 4  # zeros beside kv_a's bias, where the queries have none
    assert whole - sum(parameter.nbytes for parameter in plain.parameters()) <= biases, "weights are held once"


LATER = {
    "in place": randomise,
    "loaded": lambda layer: layer.load_state_dict(make(layer.config).state_dict()),
    "assigned": lambda layer: layer.load_state_dict(make(layer.config).state_dict(), assign=True),
    "load_weights": lambda layer: layer.load_weights(make(layer.config).state_dict()),
    "half and back": lambda layer: layer.half().float(),
}


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("config", [LOW_RANK, BIASED], ids=["low rank", "bias"])
def test_weights_that_change_later_are_seen(config, later):
    fused = make(config).fuse()
    LATER[later](fused)
    plain = make(config)
    plain.load_state_dict(fused.state_dict())
    assert_same(fused, plain)


def pickled(layer):
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("another", [copy.deepcopy, pickled])
def test_a_copy_has_weights_of_its_own(another):
    first = make(LOW_RANK).fuse()
    second = another(first)
    randomise(second)
    plain = make(LOW_RANK)
    plain.load_state_dict(second.state_dict())
    assert_same(second, plain)
    with pytest.raises(AssertionError):
        assert_same(first, plain)


def test_a_layer_inside_a_model_is_fused_again_too():
    model = torch.nn.Sequential(make(LOW_RANK).fuse())
    model.load_state_dict({f"0.{name}": tensor for name, tensor in make(LOW_RANK).state_dict().items()}, assign=True)
    plain = make(LOW_RANK)
    plain.load_state_dict(model[0].state_dict())
    assert_same(model[0], plain)


@pytest.mark.parametrize(("fused", "products"), [(True, 3), (False, 4)])
def test_the_products_of_a_decode_step(fused, products):
    """Down, up and out, and one batched product over the heads each for absorption and values."""
    layer = make(LOW_RANK, torch.bfloat16)
    layer = layer.fuse() if fused else layer
    cache, sequences = PagedLatentCache.contiguous(1, BATCH, 8, kv_format="bf16")
    layer.kv_format = "bf16"
    step, table = cache.append(sequences, [1] * BATCH), cos_sin_table(LOW_RANK, 8)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    compiled(torch.randn(BATCH, 1, LOW_RANK.hidden_size).bfloat16(), cache.layers[0], step, table)
    (graph,) = graphs
    aten = torch.ops.aten
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    plain = {aten.mm.default, aten.addmm.default}
    assert sum(target in plain for target in called) == products
    assert called.count(aten.bmm.default) == 2
    assert called.count(torch.ops.mla_suite.decode.default) == 1
