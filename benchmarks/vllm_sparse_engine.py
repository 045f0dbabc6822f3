"""Models whose layers select keys, in a real vLLM engine on a GPU: DeepSeek V3.2 or V4 with random weights, by backend.

    python benchmarks/bench_vllm.py sparse --model v32 [--kv-cache-dtype fp8_ds_mla] [--csv FILE]
    python benchmarks/bench_vllm.py sparse --model v4 [--csv FILE]

The attention is that of DeepSeek V3.2 (128 heads, an indexer that selects 2,048 keys) or of V4 Flash (64 heads; a
window of 128, then 4:1 layers of which 512 entries are selected, and 128:1 layers); layers and experts are few. Each
backend has a process of its own. Prompts are computed; decode steps are full CUDA graphs.

Columns, of decode steps:
attention us  of a layer: from the start of attention to the end of its reduction, mean over layers and steps, by
              torch's profiler. What turns a selection into slots of the cache is not in it
step us       the step's CUDA graph replayed, median of three rounds
tokens/s      batch x steps / seconds of the engine's steps: the median, the least and the most of `--rounds`, in which
              the engines take turns
GPU           step us x tokens/s / batch: the share of that time in which the GPU computes a step. Where it is small the
              GPU waits for vLLM's Python, and tokens/s tell of the host's cores
prompt/s      tokens of prompts / seconds until all have their first token, once

Before anything is timed, a check: eight prompts that arrive one after another. Samples of the attention calls of eager
steps are compared with their definition in fp32 over the engine's own cache, and V3.2's greedy tokens with the first
backend's; a token may differ only where that backend's best two lie close together. V4's are not compared: on an H200
five of eight sequences parted elsewhere, though the attention of both backends was right.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm_engine
import vllm_turns
from vllm_model import ON_GPU, VOCAB, Row, generate, start_engine, versions
from vllm_sparse_check import watch

from mla_suite.bench.saving import Table
from mla_suite.cli import sizes

KINDS = {1: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
BACKENDS = {  # the first is what vLLM 0.33 chooses by itself on an H100 or H200
    ("v32", "auto"): "FLASH_ATTN_MLA_SPARSE,MLA_SUITE_SPARSE,FLASHMLA_SPARSE",
    ("v32", "fp8_ds_mla"): "FLASHMLA_SPARSE,MLA_SUITE_SPARSE",
    ("v4", "fp8"): "FLASHMLA_SPARSE_DSV4,MLA_SUITE_DSV4",
}
ATTENTION = re.compile(r"decode_kv|combine(?!_sampled)|sparse_attn_fwd|splitkv_mla|FlashAttnFwd")
TIMED = ("attention_us", "step_us", "tokens_per_s")
LENGTHS = {  # of the prompts of the check: beyond and within a selection
    "v32": (2900, 37, 700, 130, 2100, 5, 1300, 260),
    # TileLang compiles for some 15 s at each new number of splits of a step's tokens, so all but one are short.
    "v4": (2900, 40, 20, 5, 50, 30, 9, 12),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=("v32", "v4"), default="v32", help="DeepSeek V3.2 or V4 (default: v32)")
    parser.add_argument("--backends", help="vLLM's names, comma-separated; ratios are of the first's time")
    parser.add_argument("--batches", type=sizes, default=(1, 8, 32), help="sequences of a step")
    parser.add_argument("--contexts", type=sizes, default=(4096,), help="tokens of a prompt")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default: 8)")
    parser.add_argument("--heads", type=int, help="attention heads (default: 128 of V3.2, 64 of V4)")
    parser.add_argument("--block-size", type=int, help="tokens per page (default: what the backend asks vLLM for)")
    parser.add_argument("--kv-cache-dtype", help="auto (bf16) or fp8_ds_mla for V3.2, fp8 for V4 (the defaults)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each engine is timed (default: 5)")
    parser.add_argument("--skip-check", action="store_true", help="time without comparing results first")
    parser.add_argument("--check-alone", action="store_true", help="compare results and time nothing")
    parser.add_argument("--csv", type=Path, help="write the rows to this file as they come")
    parser.add_argument("--alone", metavar="BACKEND", help=argparse.SUPPRESS)


def config_of(model: str, layers: int, heads: int, longest: int) -> dict[str, Any]:
    """The config.json of a model with few experts, whose MLPs are dense in V3.2."""
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


def complete(options: argparse.Namespace) -> None:
    """Put defaults that depend on the model in place."""
    options.kv_cache_dtype = options.kv_cache_dtype or ("auto" if options.model == "v32" else "fp8")
    options.heads = options.heads or (128 if options.model == "v32" else 64)
    if (options.model, options.kv_cache_dtype) not in BACKENDS:
        possible = ", ".join(f"--model {model} --kv-cache-dtype {dtype}" for model, dtype in BACKENDS)
        raise SystemExit(f"bench_vllm: --model {options.model} with {options.kv_cache_dtype}: it takes {possible}")
    options.backends = options.backends or BACKENDS[options.model, options.kv_cache_dtype]


def check(llm: Any, model: str) -> dict[str, Any]:
    """Greedy tokens of prompts that arrive one by one, the best two log-probabilities, and attention's worst error."""
    with watch(llm, model) as errors:
        answers = generate(llm, LENGTHS[model])
    seen = Counter(kind for kind, _ in errors)
    for kind, count in sorted(seen.items()):
        print(f"    {kind}: {count} samples, {max(e for k, e in errors if k == kind):.1e}", flush=True)
    return {"compared": len(errors), "error": max(error for _, error in errors), **answers}


def attention_us(kernels: Sequence[vllm_engine.Kernel]) -> float:
    """Microseconds of attention and its reduction, from the end of the kernel before where they start earlier."""
    total, before, begin, end = 0.0, -float("inf"), None, 0.0
    for name, started, ended in [*kernels, ("", float("inf"), float("inf"))]:
        if ATTENTION.search(name):
            begin = max(started, before) if begin is None else begin
            end = ended
        elif begin is not None:
            total, begin = total + end - begin, None
        before = max(before, ended)
    return total


def prompts(batch: int, context: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return [torch.randint(2, VOCAB, (context,), generator=generator).tolist() for _ in range(batch)]


def started(sequences: vllm_engine.Sequences, batch: int, context: int) -> Row:
    sequences.start(batch, context)  # compiles kernels for the numbers of tokens of these steps
    sequences.end()
    return {"prompt_tokens_per_s": batch * context / sequences.start(batch, context)}


def profile(llm: Any, sequences: vllm_engine.Sequences, layers: int, batch: int) -> Row:
    kernels = vllm_engine.profiled(sequences)
    own = {name.split("<")[0].split("(")[0][-70:] for name, _, _ in kernels if ATTENTION.search(name)}
    row: Row = {"attention_us": attention_us(kernels) / (vllm_engine.PROFILED_STEPS * layers)}
    row |= {"step_us": llm.collective_rpc(vllm_engine.replay_us, args=(batch,))[0], "kernels": ", ".join(sorted(own))}
    sequences.end()
    return row


def work(options: argparse.Namespace) -> int:
    """One backend's process."""
    backend, begun = options.alone, time.time()
    longest = max(*options.contexts, *LENGTHS[options.model]) + vllm_engine.MAX_TOKENS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = config_of(options.model, options.layers, options.heads, longest)
        (folder / "config.json").write_text(json.dumps(made))
        # vLLM's warm-up would compile V4's kernels for every number of tokens, which takes minutes.
        without = {"enable_jit_warmup": False}
        llm = start_engine(backend, options, folder, max_model_len=longest, kernel_config=without)
    page = llm.llm_engine.vllm_config.cache_config.block_size
    sequences = vllm_engine.Sequences(llm, prompts)
    return vllm_turns.serve(
        {"seconds": round(time.time() - begun), "page": page},
        {
            "check": partial(check, llm, options.model),
            "start": partial(started, sequences),
            "round": sequences.rate,
            "profile": partial(profile, llm, sequences, options.layers),
        },
    )


def main(options: argparse.Namespace) -> int:
    complete(options)
    if options.alone:
        return work(options)
    if not ON_GPU:
        raise SystemExit("bench_vllm: no GPU here; on a CPU, `tox -e vllm` runs V4's engine and compares its tokens")
    facts = {"model": options.model, "kv_cache_dtype": options.kv_cache_dtype, "versions": versions()}
    facts |= {"layers": options.layers, "heads": options.heads}
    print(*facts.values(), sep="; ")
    rows, table = dict[tuple[Any, ...], Row](), Table(options.csv)

    def keep(row: Row) -> None:
        rows[tuple(row[key] for key in vllm_engine.KEYS)] = row
        table.add(row | facts)

    options.contexts = () if options.check_alone else options.contexts
    vllm_turns.run(options, same_tokens=options.model == "v32", keep=keep)
    peer = options.backends.split(",")[0]
    print(
        "backend               batch  context  attention us  ratio   step us  ratio  tokens/s  least   most  GPU "
        "prompt/s"
    )
    for (_, *shape), row in sorted(rows.items(), key=lambda item: item[0][1:]):
        print(show(row, rows.get((peer, *shape))))
    return 0


def show(row: Row, peer: Row | None) -> str:
    ratios = [row[name] / peer[name] if peer is not None else float("nan") for name in TIMED[:2]]
    return (
        f"{row['backend']:21s} {row['batch']:5d} {row['context']:8d} {row['attention_us']:13.1f} {ratios[0]:6.3f} "
        f"{row['step_us']:9.0f} {ratios[1]:6.3f} {row['tokens_per_s']:9.0f} "
        f"{row['least_tokens_per_s']:6.0f} {row['most_tokens_per_s']:6.0f} {vllm_turns.gpu_share(row):4.2f} "
        f"{row['prompt_tokens_per_s']:8.0f}"
    )
