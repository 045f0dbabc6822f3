"""vLLM 0.33's layers of DeepSeek V4.1 on an H100 or H200, over records of 584, 528 and 288 bytes, with our attention.

Projections with random weights, norms, compressor, pools, the writers of 584 and 528 bytes and all metadata are vLLM's
own code, from `DeepseekV4Attention.forward` down. Two things of a layer need DeepGEMM and are left out: its indexer,
whose selection is drawn at random, and the projection behind attention.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("this needs vLLM 0.33 for CUDA, and an H100 or H200", allow_module_level=True)

from vllm.config import AttentionConfig, CacheConfig, CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends import utils
from vllm.v1.attention.backends.mla.indexer import DeepseekV41IndexerBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder
from vllm.v1.kv_cache_interface import CircularBufferSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu import attn_utils

from mla_suite.integrations import flash_mla, plugins, vllm_v4
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

DEVICE = torch.device("cuda")
HIDDEN, WINDOW, TOPK, DRAFTS, MAX_LEN, MAX_TOKENS = 1024, 128, 512, 3, 1024, 2048
BLOCKS = 1024  # of all pools together
RATIOS = {0: 0, 2: 1, 3: 1, 4: 2}  # of the layers built; 3 reads 2's entries, and 1, which has the indexer, is left out
STEPS = (  # new tokens and tokens of each sequence: prompts; decodes, drafts and the rest of a prompt; decodes
    ([5, 140, 700, 250], [5, 140, 700, 250]),
    ([1, 1, 4, 350], [6, 141, 704, 600]),
    ([1, 4, 1, 1], [7, 145, 705, 601]),
)
ULP, BOUND = 2**-7, 2**-8  # of bf16, and what vLLM's own operator may be off by
RECORDS = {  # bytes: --kv-cache-dtype, MLA_SUITE_V41_RECORDS, and the kv_formats of window and compressed pools
    584: ("fp8", "", "dsv4", "dsv4"),
    528: ("fp8", "1", "v41_interleaved", "v41_interleaved"),
    288: ("nvfp4_ds_mla", "", "v41_interleaved", "v41_fp4_interleaved"),
}
HALF_STEP = {  # values that share a scale, and what one may be off by: of itself, and of the largest of them
    "dsv4": (64, 2**-4, 2**-17),
    "v41_interleaved": (32, 2**-4, 2**-17),
    "v41_fp4_interleaved": (16, 0.0, 0.19),
}


@pytest.fixture(scope="module")
def one_process():
    """vLLM's groups of processes, which its layers ask for their size, and the memory that prefill gathers into."""
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:29541", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")
    workspace.init_workspace_manager(DEVICE)
    plugins.vllm()
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def configuration(cache_dtype: str, heads: int) -> Any:
    """vLLM's configuration, with the model's as far as its layers and builders read it."""
    yarn = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1)
    of_model = dict(hidden_size=HIDDEN, num_attention_heads=heads, q_lora_rank=1024, o_lora_rank=1024, head_dim=512)
    of_model |= dict(qk_rope_head_dim=64, o_groups=8, sliding_window=WINDOW, index_topk=TOPK, rms_norm_eps=1e-6)
    of_model |= dict(num_hidden_layers=5, compress_ratios=[RATIOS.get(layer, 1) for layer in range(5)])
    of_model |= dict(kv_source_layer_ids=[2, 4], index_source_layer_ids=[1], model_type="deepseek_v41")
    of_model |= dict(max_position_embeddings=1048576, rope_theta=10000.0, compress_rope_theta=160000.0)
    made = VllmConfig(
        cache_config=CacheConfig(block_size=64, cache_dtype=cache_dtype),
        attention_config=AttentionConfig(backend=AttentionBackendEnum.MLA_SUITE_DSV4),
        compilation_config=CompilationConfig(mode=0, cudagraph_mode="NONE"),
    )
    hf_config = SimpleNamespace(rope_parameters=yarn, **of_model)
    made.model_config = SimpleNamespace(hf_config=hf_config, max_model_len=MAX_LEN, supports_kv_cache_grouping=False)
    made.scheduler_config.max_num_batched_tokens, made.scheduler_config.max_num_seqs = MAX_TOKENS, 16
    made.speculative_config = SimpleNamespace(
        num_speculative_tokens=DRAFTS, parallel_drafting=False, use_dspark=lambda: False, method="mtp"
    )
    made.kernel_config.enable_jit_warmup = False
    return made


class Step(NamedTuple):
    """The tokens of one step, decodes first: their sequences, their positions, and vLLM's metadata by layer."""

    owners: torch.Tensor
    positions: torch.Tensor
    metadata: dict[str, Any]


class Model:
    """A few layers, their pools as vLLM lays them out, and the blocks of each sequence."""

    def __init__(self, cache_dtype: str, heads: int) -> None:
        self.config = configuration(cache_dtype, heads)
        context = self.config.compilation_config.static_forward_context
        self.chosen = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32, device=DEVICE)
        code = importlib.import_module("vllm.models.deepseek_v41.nvidia.model")
        self.kernels = importlib.import_module("vllm.models.deepseek_v41.nvidia.flashmla")
        vllm_v4.offer(code, self.kernels)
        attention = code._select_dsv4_attn_cls(self.config)
        with set_current_vllm_config(self.config), set_default_torch_dtype(torch.bfloat16), DEVICE:
            names = (f"model.layers.{layer}.attn" for layer in RATIOS)
            self.layers = [attention(self.config, name, topk_indices_buffer=self.chosen) for name in names]
        for layer in self.layers:
            for name, weight in layer.named_parameters():
                given = weight.data[:heads] if name == "attn_sink" else weight.data
                given.normal_(1, 0.1) if "norm" in name else given.normal_(0, given.shape[-1] ** -0.5)
        specs = attn_utils.get_kv_cache_spec(self.config)
        backends = [DeepseekV41IndexerBackend, *(layer.get_attn_backend() for layer in context.values())]
        layouts = [layout.name for layout in utils.get_supported_kv_cache_layouts(backends)]
        utils.resolve_kv_cache_layout(self.config, [layouts], specs.values())
        planner = DefaultKVCacheConfigBuilder()
        pools = planner.get_kv_cache_groups(self.config, specs)
        self.pools = planner.get_kv_cache_config_from_groups(self.config, pools, BLOCKS)
        self.groups, _, sizes = attn_utils.init_attn_backend(self.pools, self.config, DEVICE)
        of_all = [group for of_a_pool in self.groups for group in of_a_pool]
        attn_utils.init_kv_cache(context, self.pools, DEVICE, sizes, self.config, attn_groups=of_all)
        memory = torch.empty(0, dtype=torch.uint8, device=DEVICE)
        memory.set_(self.layers[0].swa_cache_layer.kv_cache.untyped_storage()).fill_(255)  # NaN until it is written
        free = iter((torch.randperm(BLOCKS - 1) + 1).tolist())  # block 0 is nobody's
        self.tables, self.pages, self.pool_of = [], [], {}
        for number, pool in enumerate(pools):
            spec = pool.kv_cache_spec
            spec = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            width = 1 if isinstance(spec, CircularBufferSpec) else MAX_LEN // spec.block_size
            table = [[next(free) for _ in range(width)] for _ in STEPS[0][0]]
            self.tables.append(torch.tensor(table, dtype=torch.int32, device=DEVICE))
            self.pages.append(spec.block_size)
            self.pool_of |= dict.fromkeys(pool.layer_names, number)

    def slots(self, pool: int, owners: torch.Tensor, entries: torch.Tensor, ratio: int = 1) -> torch.Tensor:
        """Where entries of sequences lie in a pool, by the blocks that the sequences were given."""
        table, page = self.tables[pool], self.pages[pool] // max(ratio, 1)
        column = torch.clamp(entries // page, 0, table.shape[1] - 1)
        return table[owners, column].long() * page + entries % page

    def step(self, q_lens: list[int], seq_lens: list[int]) -> Step:
        starts = torch.nn.functional.pad(torch.tensor(q_lens).cumsum(0), (1, 0)).int()
        positions = torch.cat([torch.arange(n - q, n) for q, n in zip(q_lens, seq_lens, strict=True)]).to(DEVICE)
        owners = torch.repeat_interleave(torch.arange(len(q_lens)), torch.tensor(q_lens)).to(DEVICE)
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        sizes = dict(num_reqs=len(q_lens), num_tokens=len(positions), max_query_len=max(q_lens))
        metadata = attn_utils.build_attn_metadata(
            self.groups,
            query_start_loc_gpu=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(DEVICE),
            seq_lens_cpu_upper_bound=lengths,
            max_seq_len=max(seq_lens),
            block_tables=self.tables,
            slot_mappings=[self.slots(pool, owners, positions) for pool in range(len(self.tables))],
            kv_cache_config=self.pools,
            positions=positions,
            **sizes,
        )
        return Step(owners, positions, metadata)

    def run(self, layer: Any, step: Step) -> SimpleNamespace:
        """What a layer gives for random hidden states, and on its way: queries, and what its writers are given."""
        seen, attend = SimpleNamespace(latent=None), type(layer).forward_mqa

        def forward_mqa(q: torch.Tensor, kv: torch.Tensor, *others: torch.Tensor) -> None:
            seen.q, seen.kv = q.clone(), kv.clone()
            attend(layer, q, kv, *others)

        def insert_cache(latent: torch.Tensor, *others: Any) -> None:
            seen.latent = latent.clone()
            type(layer.compressor).insert_cache(layer.compressor, latent, *others)

        layer.forward_mqa, layer._o_proj = forward_mqa, lambda attended, positions: attended
        if layer.compressor is not None:
            layer.compressor.insert_cache = insert_cache
        for row, position in enumerate(step.positions.tolist() if layer.compress_ratio else []):
            closed = torch.randperm((position + 1) // layer.compress_ratio)[:TOPK]  # in any order, -1 behind them
            self.chosen[row] = torch.nn.functional.pad(closed, (0, TOPK - len(closed)), value=-1).to(DEVICE)
        hidden = torch.randn(len(step.positions), HIDDEN, device=DEVICE).bfloat16()
        with set_current_vllm_config(self.config), set_forward_context(step.metadata, self.config, len(hidden)):
            seen.given = layer(step.positions, hidden)
        return seen

    def expected(self, layer: Any, step: Step, q: torch.Tensor, rows: torch.Tensor, entries: Any) -> torch.Tensor:
        """The definition, in fp64: the last WINDOW tokens and the entries that were selected."""
        results, window = [], step.positions[:, None] - torch.arange(WINDOW, device=DEVICE)
        for part in torch.arange(len(q), device=DEVICE).split(64):
            owners, valid = step.owners[part, None], window[part] >= 0
            keys = rows[self.slots(self.pool_of[layer.swa_cache_layer.prefix], owners, window[part])]
            if entries is not None:
                chosen = self.chosen[part].long()
                places = self.slots(self.pool_of[layer.compressed_cache_prefix], owners, chosen, layer.compress_ratio)
                keys, valid = torch.cat((keys, entries[places]), 1), torch.cat((valid, chosen >= 0), 1)
            keys = torch.where(valid[:, :, None], keys, 0)
            scores = torch.einsum("thd,tkd->thk", q[part].double(), keys) * layer.scale
            scores = scores.masked_fill(~valid[:, None], -torch.inf)
            lse = torch.logaddexp(scores.logsumexp(-1), layer.attn_sink.double())
            results.append(torch.einsum("thk,tkd->thd", torch.exp(scores - lse[:, :, None]), keys))
        return torch.cat(results)


def unpacked(kv_format: str, cache: torch.Tensor) -> torch.Tensor:
    return caches.unpack(get_kv_format(kv_format), cache).flatten(0, 1).double()


def check_stored(layer: Any, kv_format: str, stored: torch.Tensor, given: torch.Tensor, at: torch.Tensor) -> None:
    """Rows of a pool are what the writer was given, rotated, to half a step of the record's values."""
    wanted = given.double()
    (cos, sin), (a, b) = layer.rotary_emb.cos_sin_cache[at].chunk(2, 1), wanted[:, 448:].unflatten(1, (32, 2)).unbind(2)
    wanted[:, 448:] = torch.stack((a * cos - b * sin, b * cos + a * sin), 2).flatten(1)
    shared, of_value, of_largest = HALF_STEP[kv_format]
    largest = wanted.unflatten(1, (-1, shared)).abs().amax(2).repeat_interleave(shared, 1)
    beyond = ((stored - wanted).abs() - of_value * wanted.abs() - of_largest * largest).max()
    assert beyond <= 0, f"a value of {kv_format} is {beyond} beyond half a step"


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("width", RECORDS)
def test_layers_give_what_the_definition_does(width, heads, one_process, monkeypatch, record_property):
    """Window, 1:1 and 2:1 layers, one over another's entries; prompts, decodes, drafts and the rest of a prompt."""
    cache_dtype, by_environment, window, compressed = RECORDS[width]
    monkeypatch.setenv("MLA_SUITE_V41_RECORDS", by_environment)
    torch.manual_seed(width + heads)
    model = Model(cache_dtype, heads)
    assert model.kernels.flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
    for q_lens, seq_lens in STEPS:
        step = model.step(q_lens, seq_lens)
        for layer in model.layers:
            seen, ratio, entries = model.run(layer, step), layer.compress_ratio, None
            rows = unpacked(window, layer.swa_cache_layer.kv_cache)
            pool = model.pool_of[layer.swa_cache_layer.prefix]
            stored = rows[model.slots(pool, step.owners, step.positions)]
            check_stored(layer, window, stored, seen.kv, step.positions)
            if ratio:
                assert layer._compressed_kv_cache().shape[-1] == width
                entries = unpacked(compressed, layer._compressed_kv_cache())
            if seen.latent is not None:
                ends = (step.positions + 1) % ratio == 0
                at = step.positions[ends] // ratio
                stored = entries[model.slots(model.pool_of[layer.prefix], step.owners[ends], at, ratio)]
                check_stored(layer, compressed, stored, seen.latent[ends], at * ratio)
            wanted = model.expected(layer, step, seen.q, rows, entries)[:, :heads]
            found = seen.given[:, :heads].double()
            worst = ((found - wanted).abs() / (BOUND + ULP * wanted.abs())).max().item()
            record_property(f"{width} bytes, {heads} heads, {layer.prefix}, {ratio}:1, new tokens {q_lens}", worst)
            torch.testing.assert_close(found, wanted, rtol=ULP, atol=BOUND)
