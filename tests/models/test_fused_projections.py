"""A layer after `fuse()`: the same numbers and state dict, one product less, and weights that stay in step."""

import copy
import io
import math

import pytest
import torch
from changed_projections import adapted, hooked, hooked_before, with_another_bias, with_another_forward
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
    "shared": lambda layer: layer.share_memory(),
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


def test_shared_memory_stays_shared():
    fused = make(BIASED).fuse()
    fused.share_memory()
    assert all(tensor.is_shared() for tensor in (*fused.parameters(), *fused.buffers()))


def with_another_weight(layer, name):
    projection = getattr(layer, name)
    projection.weight = torch.nn.Parameter(projection.weight + 1, requires_grad=False)


def with_other_data(layer, name):
    getattr(layer, name).weight.data = getattr(layer, name).weight + 1


CHANGES = [
    adapted,
    hooked,
    hooked_before,
    with_another_forward,
    with_another_weight,
    with_another_bias,
    with_other_data,
]


@pytest.mark.parametrize("name", ["q_a_proj", "kv_a_proj_with_mqa"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_projection_that_changes_is_called(change, name):
    plain = make(LOW_RANK)
    fused = copy.deepcopy(plain).fuse()
    before = outputs(fused)
    for layer in (fused, plain):
        change(layer, name)
    assert_same(fused, plain)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(outputs(fused), before)
    assert_same(fused.half().float().fuse(), plain.half().float())


class Prefill(torch.nn.Module):
    """A prefill without a cache, which gradients pass."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        table = cos_sin_table(self.attention.config, 8)
        return self.attention.prefill(x, table, positions=torch.arange(x.shape[1])[None])


def test_functional_calls_have_the_weights_that_they_are_given():
    plain, x = Prefill(make(LOW_RANK)), torch.randn(1, PAST, LOW_RANK.hidden_size)
    fused = copy.deepcopy(plain)
    fused.attention.fuse()
    others = [{name: scale * tensor for name, tensor in plain.state_dict().items()} for scale in (1.5, 0.5)]
    expected = [torch.func.functional_call(plain, other, (x,)) for other in others]

    def call(weights):
        return torch.func.functional_call(fused, weights, (x,))

    torch._dynamo.reset()
    for step in (call, torch.compile(call, fullgraph=True, backend="eager")):
        for found, wanted in zip(map(step, others), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    stacked = {name: torch.stack([other[name] for other in others]) for name in others[0]}
    torch.testing.assert_close(torch.func.vmap(call)(stacked), torch.stack(expected))


@pytest.mark.parametrize("config", [LOW_RANK, BIASED], ids=["low rank", "bias"])
def test_gradients_reach_both_projections(config):
    plain, x = Prefill(make(config)).requires_grad_(), torch.randn(1, PAST, config.hidden_size)
    fused = copy.deepcopy(plain)
    fused.attention.fuse()
    for model in (plain, fused):
        model(x).square().sum().backward()
    for (name, mine), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert theirs.grad.any(), name
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(("later", "products"), [(None, 4), (with_another_weight, 5), (with_other_data, 5)])
def test_an_exported_prefill_has_one_product_where_that_is_both(later, products):
    model, x = Prefill(make(LOW_RANK).fuse()), torch.randn(1, PAST, LOW_RANK.hidden_size)
    if later is not None:
        later(model.attention, "q_a_proj")
    program = torch.export.export(model, (x,))
    assert sum(node.target is torch.ops.aten.linear.default for node in program.graph.nodes) == products
    torch.testing.assert_close(program.module()(x), model(x))


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
