"""Decode steps of a real vLLM engine on a GPU, by attention backend: what attention takes in a captured step.

    python benchmarks/bench_vllm.py engine [--backends FLASH_ATTN_MLA,CUSTOM,FLASHMLA] [--csv FILE]
    python benchmarks/bench_vllm.py engine --model v32 [--kv-cache-dtype fp8_ds_mla] [--csv FILE]
    python benchmarks/bench_vllm.py engine --model v4 [--csv FILE]

CUSTOM is this package's backend, and the first of a model's is what vLLM 0.33 chooses by itself on an H100 or H200.
Each backend has a process of its own with the same model of random weights and few layers: the attention of DeepSeek
V3 (128 heads, latents of 512 + 64, latent queries of 1536, hidden size 7168) or of V3.2 (128 heads, an indexer that
selects 2,048 keys) and dense MLPs, or that of V4 Flash (64 heads; a window of 128, then 4:1 layers of which 512 entries
are selected, and 128:1 layers) and few experts. Steps are in full CUDA graphs. V3's prompts are not computed: vLLM's
DecodeBenchConnector fills pages with random rows.

Columns, all of one device:
attention_us  of a layer: from the start of attention to the end of its reduction, or from the end of the kernel before
              where attention starts earlier, by torch's profiler: the median over V3's layers and steps, else the mean.
              What turns a selection into slots of the cache is not in it
plan_us       of a step of V3: by how much longer that takes in the layer that makes the plan (or FlashMLA's metadata),
              and kernels that do it alone
per_layer_us  attention + plan / 61: what each of DeepSeek V3's 61 layers would pay
ratio         per_layer_us, of the first backend's
step_us       the step's CUDA graph replayed, median of three rounds, and step_ratio of the first backend's
tokens_per_s  batch x steps / seconds of the engine's steps: the median, the least and the most of `--rounds`, in which
              the engines take turns
gpu           step_us x tokens_per_s / batch: the share of that time in which the GPU computes a step. Where it is small
              the GPU waits for vLLM's Python, and tokens_per_s tell of the host's cores
prompt_tokens_per_s  tokens of prompts / seconds until all have their first token, once; not of V3

Before anything is timed, a check: eight prompts that arrive one after another are prefilled and decoded for real.
Attention outputs of eager steps, of V3 all and else samples, are compared with their definition in fp32 over the
engine's own cache, and greedy tokens with the first backend's; a token may differ only where that backend's best two
lie close together. V4's tokens are not compared: on an H200 five of eight sequences parted elsewhere, though the
attention of both backends was right.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import profiles
import torch
import vllm_turns
from profiles import Kernel
from vllm_check import check
from vllm_model import ON_GPU, OURS, PEER, VOCAB, Contexts, Row, Split, save_config, start_engine, versions

from mla_suite.bench.saving import Table
from mla_suite.bench.timer import queued_us
from mla_suite.cli import sizes, writable

MODEL_LAYERS = 61  # of DeepSeek V3, which share a step's plan
WARM_STEPS, TIMED_STEPS, PROFILED_STEPS, REPLAY_ROUNDS, REPLAYS = 4, 40, 5, 3, 8
MAX_TOKENS = 1024  # by which a context grows at most, its first steps beside the prompts of others among them

KEYS = ("backend", "batch", "context")
SHOWN = (
    *(*KEYS, "attention_us", "plan_us", "per_layer_us", "ratio", "step_us", "step_ratio"),
    *("tokens_per_s", "least_tokens_per_s", "most_tokens_per_s", "gpu", "prompt_tokens_per_s"),
)


class Model(NamedTuple):
    """What is measured of a model by default: backends by type of cache, of which the first is the default, and sizes.

    checked  lengths of the prompts of the check, for models that select keys beyond and within a selection
    """

    backends: dict[str, str]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    layers: int
    heads: int
    checked: tuple[int, ...]


MODELS = {
    "v3": Model(
        dict.fromkeys(("auto", "fp8"), f"{PEER},{OURS}"),
        (1, 8, 32, 128),
        (1024, 4096),
        layers=16,
        heads=128,
        checked=tuple(range(1024, 764, -37)),
    ),
    "v32": Model(
        {
            "auto": "FLASH_ATTN_MLA_SPARSE,MLA_SUITE_SPARSE,FLASHMLA_SPARSE",
            "fp8_ds_mla": "FLASHMLA_SPARSE,MLA_SUITE_SPARSE",
        },
        (1, 8, 32),
        (4096,),
        layers=8,
        heads=128,
        checked=(2900, 37, 700, 130, 2100, 5, 1300, 260),
    ),
    "v4": Model(
        {"fp8": "FLASHMLA_SPARSE_DSV4,MLA_SUITE_DSV4"},
        (1, 8, 32),
        (4096,),
        layers=8,
        heads=64,
        # TileLang compiles for some 15 s at each new number of splits of a step's tokens, so all but one are short.
        checked=(2900, 40, 20, 5, 50, 30, 9, 12),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="v3", help="DeepSeek V3, V3.2 or V4 (default: v3)")
    parser.add_argument("--backends", help="vLLM's names, comma-separated, all at once on the GPU")
    parser.add_argument("--batches", type=sizes, help="sequences of a step (default: 1,8,32, and 128 of V3)")
    parser.add_argument("--contexts", type=sizes, help="cached tokens per sequence (default: 4096, and 1024 of V3)")
    parser.add_argument("--layers", type=int, help="layers of the model (default: 16 of V3, else 8)")
    parser.add_argument("--heads", type=int, help="attention heads (default: 64 of V4, else 128)")
    dtypes = "auto (bf16) or fp8 for V3, auto or fp8_ds_mla for V3.2, fp8 for V4; the first is the default"
    parser.add_argument("--kv-cache-dtype", help=dtypes)
    parser.add_argument("--rounds", type=int, default=5, help="times that each engine is timed (default: 5)")
    parser.add_argument("--skip-check", action="store_true", help="time without comparing results first")
    parser.add_argument("--check-alone", action="store_true", help="compare results and time nothing")
    parser.add_argument("--csv", type=writable, help="write the rows to this file as they come")
    parser.add_argument("--alone", metavar="BACKEND", help=argparse.SUPPRESS)


def complete(options: argparse.Namespace) -> None:
    """Put defaults that depend on the model in place."""
    model = MODELS[options.model]
    options.kv_cache_dtype = options.kv_cache_dtype or next(iter(model.backends))
    if options.kv_cache_dtype not in model.backends:
        known = " or ".join(model.backends)
        raise SystemExit(f"bench_vllm: --model {options.model} takes --kv-cache-dtype {known}")
    options.backends = options.backends or model.backends[options.kv_cache_dtype]
    for name in ("batches", "contexts", "layers", "heads"):
        setattr(options, name, getattr(options, name) or getattr(model, name))


def replay_us(process: Any, batch: int) -> float:
    """Microseconds of the captured step of `batch` sequences, replayed; it computes the last step again."""
    runner = process.model_runner  # vLLM has two: one keeps graphs in its manager, the other around its model
    manager = getattr(runner, "cudagraph_manager", None)
    entries = getattr(runner.model, "concrete_cudagraph_entries", {}).items()
    captured = [*getattr(manager, "graphs", {}).items(), *((shape, entry.cudagraph) for shape, entry in entries)]
    graphs = [graph for shape, graph in captured if shape.num_tokens == batch and graph is not None]
    if not graphs:
        return float("nan")
    rounds = []
    for _ in range(REPLAY_ROUNDS):
        torch.cuda.synchronize()
        graphs[0].replay()
        rounds.append(queued_us(graphs[0].replay, REPLAYS))
    return median(rounds)


class Sequences:
    """Sequences of an engine, which all decode from `start` to `end`."""

    def __init__(self, llm: Any, prompts: Callable[[int, int], list[list[int]]]) -> None:
        self.engine, self._prompts, self._names = llm.llm_engine, prompts, list[str]()

    def start(self, batch: int, context: int) -> float:
        """Seconds until all have a token."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
        self._names = [f"{batch}x{context}x{index}" for index in range(batch)]
        prompts = self._prompts(batch, context)
        begun = time.perf_counter()
        for name, prompt in zip(self._names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        answered: set[str] = set()
        while len(answered) < batch:
            answered |= {found.request_id for found in self.engine.step() if found.outputs[0].token_ids}
        return time.perf_counter() - begun

    def seconds(self, steps: int) -> float:
        """Seconds that steps take behind others: the engine begins a step before it waits for the one before it."""
        for _ in range(WARM_STEPS):
            self.engine.step()
        begun = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        return time.perf_counter() - begun

    def rate(self) -> Row:
        return {"tokens_per_s": len(self._names) * TIMED_STEPS / self.seconds(TIMED_STEPS)}

    def end(self) -> None:
        self.engine.abort_request(self._names)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def filled(batch: int, context: int) -> list[list[int]]:
    """Prompts that are not computed."""
    Contexts.filled = True
    return [[2 + (index * 31 + place * 7) % (VOCAB - 2) for place in range(context)] for index in range(batch)]


def drawn(batch: int, context: int) -> list[list[int]]:
    """Prompts that are computed."""
    generator = torch.Generator().manual_seed(batch)
    return [torch.randint(2, VOCAB, (context,), generator=generator).tolist() for _ in range(batch)]


def started(sequences: Sequences, model: str, batch: int, context: int) -> Row:
    sequences.start(batch, context)
    if model == "v3":
        return {}
    sequences.end()  # that compiled kernels for the numbers of tokens of these steps
    return {"prompt_tokens_per_s": batch * context / sequences.start(batch, context)}


def attention(kernels: Sequence[Kernel], model: str, layers: int) -> Row:
    """Columns that a profile of PROFILED_STEPS steps gives; NaN: could not be had."""
    if model == "v3":
        us, plan_us, between_us, shown = profiles.spans(kernels, layers)
        return {"attention_us": us, "plan_us": plan_us, "between_us": between_us, "kernels": shown}
    names = {profiles.short(name) for name, _, _ in kernels if profiles.SELECTING.search(name)}
    us = profiles.selecting_us(kernels) / (PROFILED_STEPS * layers)
    return {"attention_us": us, "plan_us": 0.0, "kernels": ", ".join(sorted(names))}


def profile(llm: Any, sequences: Sequences, options: argparse.Namespace, batch: int) -> Row:
    sequences.seconds(0)
    with profiles.recorded() as kernels:
        for _ in range(PROFILED_STEPS):
            sequences.engine.step()
    row = attention(kernels, options.model, options.layers)
    row["step_us"] = llm.collective_rpc(replay_us, args=(batch,))[0]
    sequences.end()
    return row


def work(options: argparse.Namespace) -> int:
    """One backend's process."""
    begun, model, checked = time.time(), options.model, MODELS[options.model].checked
    longest = max(*options.contexts, *checked) + MAX_TOKENS
    # vLLM's warm-up would compile V4's kernels for every number of tokens, which takes minutes.
    settings: dict[str, Any] = {"kernel_config": {"enable_jit_warmup": False}}
    prompts, split = drawn, None
    if model == "v3":
        Contexts.install()
        settings, prompts, split = Contexts.SETTINGS, filled, Split.install()
    with tempfile.TemporaryDirectory() as folder:
        save_config(Path(folder), model, options.layers, options.heads, longest)
        llm = start_engine(options.alone, options, Path(folder), max_model_len=longest, **settings)
    page = llm.llm_engine.vllm_config.cache_config.block_size
    sequences = Sequences(llm, prompts)
    return vllm_turns.serve(
        {"seconds": round(time.time() - begun), "page": page},
        {
            "check": partial(check, llm, model, checked, split),
            "start": partial(started, sequences, model),
            "round": sequences.rate,
            "profile": partial(profile, llm, sequences, options),
        },
    )


def per_layer_us(row: Row) -> float:
    return float(row["attention_us"] + row["plan_us"] / MODEL_LAYERS)


def main(options: argparse.Namespace) -> int:
    complete(options)
    if options.alone:
        return work(options)
    if not ON_GPU:
        raise SystemExit("bench_vllm: no GPU here; on a CPU, `tox -e vllm` runs engines and compares their tokens")
    facts = {"model": options.model, "kv_cache_dtype": options.kv_cache_dtype, "versions": versions()}
    facts |= {"layers": options.layers, "heads": options.heads}
    print(*facts.values(), sep="; ")
    table, peers = Table(options.csv, shown=SHOWN), dict[tuple[int, int], Row]()

    def keep(row: Row) -> None:
        row |= {"per_layer_us": per_layer_us(row), "gpu": vllm_turns.gpu_share(row)}
        peer = peers.setdefault((row["batch"], row["context"]), row)  # the first backend's comes first
        ratio, step_ratio = (row[name] / peer[name] for name in ("per_layer_us", "step_us"))
        table.add(row | {"ratio": ratio, "step_ratio": step_ratio} | facts)

    options.contexts = () if options.check_alone else options.contexts
    vllm_turns.run(options, same_tokens=options.model != "v4", keep=keep)
    return 0
