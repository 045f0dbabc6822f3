"""The models of bench_vllm.py: DeepSeek's attention with random weights, filled caches, answers of its engines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from mla_suite.bench import environment
from mla_suite.integrations import plugins

OURS, PEER = "CUSTOM", "FLASH_ATTN_MLA"
ON_GPU = torch.cuda.is_available()
Row = dict[str, Any]
TOKEN_BYTES = 1440  # of a layer: bf16 latents, and index keys where there are any
VOCAB, CHECKED_PROMPTS, CHECKED_TOKENS = 8192, 8, 16
NEAR_TIE = 0.1  # of log-probability; bf16 moves a logit of this model by a few hundredths
KINDS = {1: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}  # V4's layers


def versions() -> str:
    return environment.versions("vllm", "torch", "triton")


def install(folder: Path, name: str, group: str, points: Mapping[str, str]) -> Path:
    """A distribution with entry points, which a process finds that has `folder` on its path; returns its own folder."""
    installed = folder / f"{name}-0.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    lines = [f"[{group}]", *(f"{point} = {place}" for point, place in points.items()), ""]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    return installed


def medians(rows: Sequence[Row], keys: Sequence[str], timed: Sequence[str]) -> dict[tuple[Any, ...], Row]:
    """A row for each combination of `keys`, with the medians of its rows in the columns `timed`."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(tuple(row[key] for key in keys), []).append(row)
    return {key: own[0] | {name: median(row[name] for row in own) for name in timed} for key, own in runs.items()}


def save_config(folder: Path, model: str, layers: int, heads: int, longest: int) -> None:
    """Write the config.json of a model with the attention of DeepSeek V3, whose MLPs are dense, of V3.2 or of V4."""
    if model != "v3":
        (folder / "config.json").write_text(json.dumps(_selecting(model, layers, heads, longest)))
        return
    from transformers import DeepseekV3Config

    experts = dict(n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, routed_scaling_factor=1.0)
    read_by_vllm = dict(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1)
    DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=VOCAB,
        intermediate_size=2048,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=longest,
        dtype="bfloat16",
        **experts,
        **read_by_vllm,
    ).save_pretrained(folder)


def _selecting(model: str, layers: int, heads: int, longest: int) -> dict[str, Any]:
    """The config.json of a model that selects keys, with few experts; V3.2's MLPs are dense."""
    shared = dict(vocab_size=VOCAB, num_hidden_layers=layers, num_attention_heads=heads, dtype="bfloat16")
    shared |= dict(max_position_embeddings=longest, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=10000.0)
    shared |= dict(n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=2048)
    shared |= dict(topk_method="noaux_tc", norm_topk_prob=True, tie_word_embeddings=False)
    shared |= dict(index_n_heads=64, index_head_dim=128, bos_token_id=0, eos_token_id=1)
    if model == "v32":
        shared |= dict(architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32", hidden_size=7168)
        shared |= dict(intermediate_size=2048, num_key_value_heads=heads, q_lora_rank=1536, kv_lora_rank=512)
        shared |= dict(qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, index_topk=2048)
        shared |= dict(n_group=1, topk_group=1, routed_scaling_factor=1.0, scoring_func="sigmoid", moe_layer_freq=1)
        return shared | dict(first_k_dense_replace=layers, attention_bias=False)
    ratios = [1, *(4 if layer % 2 else 128 for layer in range(1, layers))]
    shared |= dict(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", hidden_size=4096, head_dim=512)
    shared |= dict(num_key_value_heads=1, qk_rope_head_dim=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024)
    shared |= dict(sliding_window=128, index_topk=512, compress_ratios=[0, *ratios[1:]])
    shared |= dict(layer_types=[KINDS[ratio] for ratio in ratios], compress_rates={KINDS[r]: r for r in (4, 128)})
    shared |= dict(compress_rope_theta=160000.0, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)
    shared |= dict(num_hash_layers=0, expert_dtype="bf16", swiglu_limit=10.0, num_nextn_predict_layers=0)
    shared |= dict(hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6)
    yarn = dict(rope_type="yarn", rope_theta=10000.0, factor=16.0, original_max_position_embeddings=65536)
    return shared | dict(rope_parameters=yarn | dict(beta_fast=32, beta_slow=1))


class Contexts:
    """Whether new prompts get a cache of random rows instead of a prefill; an engine's scheduler asks it."""

    filled = False
    SETTINGS: ClassVar[dict[str, Any]] = {  # of an engine that can be asked for that
        "kv_transfer_config": {
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 1.0},
        }
    }

    @classmethod
    def install(cls) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector

        scheduler = decode_bench_connector.DecodeBenchConnectorScheduler
        matched = scheduler.get_num_new_matched_tokens
        scheduler.get_num_new_matched_tokens = lambda self, request, computed: (
            matched(self, request, computed) if cls.filled else (0, False)
        )


def use_random_weights() -> None:
    """Let vLLM's dummy weights be normal, and those of norms 1, so that logits and softmax are like a real model's."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def fill(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        generators: dict[torch.device, torch.Generator] = {}
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.data.fill_(1.0)
                continue
            if weight.device not in generators:
                generators[weight.device] = torch.Generator(weight.device).manual_seed(0)
            weight.data.normal_(std=0.02, generator=generators[weight.device])

    DummyModelLoader.load_weights = fill


def start_engine(backend: str, options: argparse.Namespace, folder: Path, **settings: Any) -> Any:
    """A vLLM engine of the model in `folder`, in this process; `settings` for vllm.LLM win over those made here."""
    if backend in (OURS, plugins.SPARSE_NAME, plugins.V4_NAME):
        plugins.vllm()
    from vllm import LLM

    use_random_weights()
    cached = max(options.batches) * settings["max_model_len"]
    made = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": max(*options.batches, CHECKED_PROMPTS),
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "attention_backend": backend,
        "kv_cache_dtype": options.kv_cache_dtype,
        "seed": 0,
        "disable_log_stats": True,
        # Several engines share a GPU: the cache is of a given size, and this share of memory is only looked for.
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": (2 << 30) + cached * options.layers * TOKEN_BYTES,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({*options.batches, 8}),
        },
    }
    return LLM(str(folder), **{**made, **settings})


class Split:
    """How vLLM's builder divides steps into sequences with absorbed weights and prompts whose keys it expands.

    threshold  query tokens of a sequence up to which its weights are absorbed; 0: what the backend says
    step       vLLM's metadata of the last step, of all its sequences
    expanded   how many of them were prompts, by the most query tokens of a sequence in a step
    """

    def __init__(self) -> None:
        self.threshold, self.step, self.expanded = 0, None, dict[int, int]()

    @classmethod
    def install(cls) -> Split:
        from vllm.model_executor.layers.attention import mla_attention

        split, found = mla_attention.split_decodes_and_prefills, cls()

        def noted(step: Any, decode_threshold: int = 1, **given: Any) -> Any:
            counts = split(step, decode_threshold=found.threshold or decode_threshold, **given)
            found.step, found.expanded[step.max_query_len] = step, counts[1]
            return counts

        mla_attention.split_decodes_and_prefills = noted
        return found


def generate(llm: Any, lengths: Sequence[int]) -> dict[str, Any]:
    """Greedy tokens of random prompts that arrive in one step after another, and the gaps of the best two."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, max_tokens=CHECKED_TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
    engine, done = llm.llm_engine, {}
    for step in range(len(lengths) + 4 * CHECKED_TOKENS):
        if step < len(lengths):
            ids = torch.randint(2, VOCAB, (lengths[step],), generator=generator).tolist()
            engine.add_request(f"check{step}", {"prompt_token_ids": ids}, params)
        for finished in engine.step():
            if finished.finished:
                done[finished.request_id.split("-")[0]] = finished.outputs[0]
        if len(done) == len(lengths):
            break
    answers = [done[f"check{index}"] for index in range(len(lengths))]
    return {
        "tokens": [list(answer.token_ids) for answer in answers],
        "gaps": [[_gap(place) for place in answer.logprobs] for answer in answers],
    }


def _gap(place: dict[int, Any]) -> float:
    best = sorted((entry.logprob for entry in place.values()), reverse=True)
    return best[0] - best[1]


def equal_tokens(found: dict[str, Any], first: dict[str, Any]) -> str:
    """Says how many greedy tokens are equal; AssertionError where one differs without a near tie."""
    same = ties = 0
    for mine, theirs, gaps in zip(found["tokens"], first["tokens"], first["gaps"], strict=True):
        for token, other, gap in zip(mine, theirs, gaps, strict=True):
            if token == other:
                same += 1
            elif gap < NEAR_TIE:
                ties += 1
                break  # what follows has another prefix
            else:
                raise AssertionError(f"a greedy token differs where the best two are {gap:.2f} apart")
    return f"{same} greedy tokens equal, {ties} of {len(gaps) and len(found['tokens'])} sequences end at a near tie"
