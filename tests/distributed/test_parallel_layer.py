"""A layer spread over gloo ranks equals the layer of one process: tensor parallel, context parallel and both."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from ranks import on_ranks

from mla_suite.distributed import ContextParallelCache, Parallel, ParallelMLA, check_agreement
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, cos_sin_table
from mla_suite.models.config import WIDTHS

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PROMPTS = [11, 2, 20]


def weights_of(config: MLAConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    layer = MLA(config, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) / max(parameter.shape[-1], 1) ** 0.5)
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def run_layer(layer, cache, config, dtype, q_lens, compiled) -> list[torch.Tensor]:
    """Prefill of ragged prompts, then steps of several query tokens; -> every output."""
    torch.manual_seed(3)
    table = cos_sin_table(config, 64)
    sequences = [cache.allocate(40) for _ in PROMPTS]
    x = torch.randn(sum(PROMPTS), config.hidden_size).to(dtype)
    outputs = [layer.prefill(x, table, cache.layers[0], cache.append(sequences, PROMPTS), q_lens=PROMPTS)]
    decode = torch.compile(layer.decode, fullgraph=True, backend="aot_eager") if compiled else layer.decode
    for q_len in q_lens:
        x = torch.randn(len(PROMPTS), q_len, config.hidden_size).to(dtype)
        step = cache.append(sequences, [q_len] * len(PROMPTS), width=10)
        outputs.append(decode(x, cache.layers[0], step, table))
    return outputs


def spread(
    rank: int, tp_size: int, cp_size: int, dtype: torch.dtype, interleave: int, compiled: bool, **widths: int
) -> None:
    config = dataclasses.replace(MLAConfig.tiny(), num_layers=1, num_heads=8, **widths)
    weights = weights_of(config, dtype)
    kv_format = "fp32" if dtype == torch.float32 else "bf16"
    stored = dict(kv_format=kv_format, head_dim=config.cached_dim)
    parallel = Parallel.create(tp_size=tp_size, cp_size=cp_size, device_type="cpu")
    with torch.no_grad():
        whole = MLA(config, kv_format=kv_format, dtype=dtype)
        whole.load_weights(weights)
        exact = run_layer(whole, PagedLatentCache(1, 30, 4, **stored), config, dtype, (1, 4, 1), False)
        layer = ParallelMLA(config, parallel, interleave=interleave, kv_format=kv_format, dtype=dtype)
        layer.load_full_weights(weights)
        cache = ContextParallelCache(1, 30, 4, shard=layer.shard, **stored)
        mine = run_layer(layer, cache, config, dtype, (1, 4, 1), compiled)
    for found, wanted in zip(mine, exact, strict=True):
        difference = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
        assert difference <= BOUND[dtype], difference


def several(rank: int, cases: list[tuple[int, int, torch.dtype, int, bool]]) -> None:
    for tp_size, cp_size, dtype, interleave, compiled in cases:
        spread(rank, tp_size, cp_size, dtype, interleave, compiled)


def other_widths(rank: int) -> None:
    for latent, rope in WIDTHS[1:]:
        spread(rank, 1, 2, torch.float32, 1, False, kv_lora_rank=latent, qk_rope_head_dim=rope)


# Starting a rank costs more than a case, so the cases of one number of ranks share their processes.
CASES = {
    2: [(2, 1, torch.float32, 1, False), (1, 2, torch.float32, 1, False), (1, 2, torch.bfloat16, 4, False)],
    4: [(2, 2, torch.float32, 4, False), (4, 1, torch.bfloat16, 1, False), (1, 4, torch.float32, 1, False)],
    8: [(2, 4, torch.float32, 4, False), (8, 1, torch.float32, 1, False)],
}


@pytest.mark.parametrize("world", CASES)
def test_a_spread_layer_equals_one_process(world):
    on_ranks(world, several, CASES[world])


def test_keys_of_every_width_are_spread():
    on_ranks(2, other_widths)


def test_a_spread_layer_compiles_without_a_break():
    on_ranks(2, several, [(2, 1, torch.float32, 1, True), (1, 2, torch.float32, 1, True)])


BOTH = pytest.mark.parametrize(("tp_size", "cp_size"), [(2, 1), (1, 2)], ids=["tp", "cp"])
TIMEOUT_S = 10.0


def tiny_layer(tp_size: int, cp_size: int, **changes: int):
    """A layer of two ranks, its cache, and a function that decodes one token of `batch` sequences."""
    config = dataclasses.replace(MLAConfig.tiny(), num_layers=1, **changes)
    parallel = Parallel.create(tp_size=tp_size, cp_size=cp_size, device_type="cpu")
    layer = ParallelMLA(config, parallel, kv_format="fp32", dtype=torch.float32).requires_grad_(False)
    cache = ContextParallelCache(1, 30, 4, shard=layer.shard, kv_format="fp32")
    table = cos_sin_table(config, 64)

    def decode(batch: int) -> torch.Tensor:
        step = cache.append([cache.allocate() for _ in range(batch)], [1] * batch)
        return layer.decode(torch.randn(batch, 1, config.hidden_size), cache.layers[0], step, table)

    return decode


def disagree(rank: int) -> None:
    check_agreement({"batch": 4, "hidden_size": 128})
    with pytest.raises(ValueError, match=r"the ranks disagree: batch is 4 on rank 0, 5 on rank 1; give all of them"):
        check_agreement({"batch": 4 + rank})
    for tp_size, cp_size, what in ((2, 1, r"sum is \(2, 1, 128\)"), (1, 2, r"gather is \(2, 1, 4, 576\)")):
        with pytest.raises(ValueError, match=r"the ranks disagree: num_heads is 4 on rank 0, 8 on rank 1; give all"):
            tiny_layer(tp_size, cp_size, num_heads=4 + 4 * rank)
        decode = tiny_layer(tp_size, cp_size)
        decode(2)
        said = rf"the ranks disagree: what they {what} torch.float32 on rank 0, \(3, 1, "
        with pytest.raises(ValueError, match=said):
            decode(2 + rank)


def test_ranks_that_disagree_are_told_on_all_ranks():
    on_ranks(2, disagree, timeout_s=TIMEOUT_S)


def one_dies(rank: int, tp_size: int, cp_size: int) -> None:
    decode = tiny_layer(tp_size, cp_size)
    decode(2)
    if rank == 1:
        return  # its process ends here
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        decode(2)
    assert time.monotonic() - began < 3 * TIMEOUT_S


@BOTH
def test_a_rank_that_dies_ends_the_others_within_the_timeout(tp_size, cp_size):
    on_ranks(2, one_dies, tp_size, cp_size, timeout_s=TIMEOUT_S)


def refused(rank: int) -> None:
    """What a layer over two ranks refuses, on both of them and before anything is written."""
    parallel = Parallel.create(cp_size=2, device_type="cpu")
    config = dataclasses.replace(MLAConfig.tiny(), num_layers=1, rope_interleaved=False)
    unrotated = dataclasses.replace(config, cache_rotated=False)
    with pytest.raises(ValueError, match="an un-rotated cache with context parallelism"):
        ParallelMLA(unrotated, parallel)
    with pytest.raises(ValueError, match="the ranks disagree: cache_rotated is True on rank 0, False on rank 1"):
        ParallelMLA((config, unrotated)[rank], parallel)
    layer = ParallelMLA(config, parallel, kv_format="fp32").requires_grad_(False)
    cache = ContextParallelCache(1, 4, 4, shard=layer.shard, kv_format="fp32")
    step, table = cache.append([cache.allocate(), cache.allocate()], [1, 1]), cos_sin_table(config, 64)
    for shape in ((2, 128), (1, 2, 128)):
        with pytest.raises(ValueError, match="MLA.decode: x has shape .* for a step of 2 sequences; it takes"):
            layer.decode(torch.ones(shape), cache.layers[0], step, table)
    x = torch.ones(1, 3, 128, requires_grad=True)
    result = layer.prefill(x, table, positions=torch.arange(3))  # without a cache one process passes gradients
    with pytest.raises(RuntimeError, match="ParallelMLA has no backward: it is an inference operator"):
        result.add_(1).sum().backward()
    for name in ("topk_indices", "exchange"):
        with pytest.raises(TypeError, match=f"{name} with context parallelism; it takes kv_descale, max_seqlen_kv"):
            layer.decode(torch.ones(2, 1, 128), cache.layers[0], step, table, **{name: None})
    assert not cache.layers[0].any()


def test_what_a_spread_layer_refuses():
    on_ranks(2, refused, timeout_s=TIMEOUT_S)
