"""Decode steps of a real vLLM engine on a GPU, by attention backend: what attention takes in a captured step.

    python benchmarks/bench_vllm.py engine [--backends CUSTOM,FLASH_ATTN_MLA,FLASHMLA] [--csv FILE]

CUSTOM is this package's backend. Each backend has a process of its own with the same model: DeepSeek V3's attention
(128 heads, latents of 512 + 64, latent queries of 1536, hidden size 7168), dense MLPs, random weights, `--layers` of
them, steps in full CUDA graphs. Prompts are not computed: vLLM's DecodeBenchConnector fills pages with random rows.

Columns, all of one device:
attention us  of a layer: from the start of attention to the end of its reduction, or from the end of the kernel before
              where attention starts earlier; median over layers and steps, by torch's profiler
plan us       of a step: by how much longer that takes in the layer that makes the plan (or FlashMLA's metadata), and
              kernels that do it alone
per layer us  attention + plan / 61: what each of DeepSeek V3's 61 layers would pay
ratio         per layer us, of FLASH_ATTN_MLA's, which vLLM 0.33 chooses by itself on an H100 or H200
step us       the step's CUDA graph replayed, median of three rounds
tokens/s      batch x steps / seconds of the engine's steps: the median, the least and the most of `--rounds`, in which
              the engines take turns
GPU           step us x tokens/s / batch: the share of that time in which the GPU computes a step. Where it is small the
              GPU waits for vLLM's Python, and tokens/s tell of the host's cores

Before anything is timed, a check: eight prompts that arrive one after another are prefilled and decoded for real. Every
attention output of an eager step is compared with its definition in fp32, and greedy tokens with the first backend's;
a token may differ only where that backend's best two lie close together.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import vllm_turns
from vllm_model import (
    ON_GPU,
    OURS,
    PEER,
    VOCAB,
    Contexts,
    Row,
    Split,
    check,
    save_config,
    start_engine,
    versions,
)

from mla_suite.bench.saving import Table
from mla_suite.bench.timer import queued_us
from mla_suite.cli import sizes

MODEL_LAYERS = 61  # of DeepSeek V3, which share a step's plan
WARM_STEPS, TIMED_STEPS, PROFILED_STEPS, REPLAY_ROUNDS, REPLAYS = 4, 40, 5, 3, 8
MAX_TOKENS = 1024  # by which a context grows at most, its first steps beside the prompts of others among them
ATTENTION = re.compile(
    r"^decode_|combine(?!_sampled)|flash_fwd_splitkv_mla_kernel|FlashAttnFwd(Sm90|Combine)|_fwd(_grouped)?_kernel_stage[12]"
)
PLAN = re.compile(r"^plan_|mla_metadata|prepare_varlen_num_blocks")

KEYS = ("backend", "batch", "context")
TIMED = ("attention_us", "plan_us", "between_us", "step_us", "tokens_per_s")  # NaN: could not be had


def per_layer_us(row: Row) -> float:
    return float(row["attention_us"] + row["plan_us"] / MODEL_LAYERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends", default=f"{PEER},{OURS}", help="vLLM's names, comma-separated, all at once on the GPU"
    )
    parser.add_argument("--batches", type=sizes, default=(1, 8, 32, 128), help="sequences of a step")
    parser.add_argument("--contexts", type=sizes, default=(1024, 4096), help="cached tokens per sequence")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model (default: 16)")
    parser.add_argument("--heads", type=int, default=128, help="attention heads (default: 128)")
    parser.add_argument("--block-size", type=int, help="tokens per page (default: what the backend asks vLLM for)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto (bf16) or fp8")
    parser.add_argument("--rounds", type=int, default=5, help="times that each engine is timed (default: 5)")
    parser.add_argument("--skip-check", action="store_true", help="time without comparing results first")
    parser.add_argument("--csv", type=Path, help="write the rows to this file as they come")
    parser.add_argument("--alone", metavar="BACKEND", help=argparse.SUPPRESS)


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


Kernel = tuple[str, float, float]  # name, start and end in us


def device_kernels(events: Iterable[Any]) -> list[Kernel]:
    """The kernels of a profile in the order in which they start."""
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: kernel[1])


def spans(kernels: Sequence[Kernel], layers: int) -> tuple[float, float, float, str]:
    """(attention us of a layer, plan us of a step, us between its neighbours, names) of whole steps' kernels."""
    alone: list[float] = []  # of groups of attention's kernels without the plan's
    between: list[float] = []
    planning: list[float] = []
    plans: list[float] = []
    names: dict[str, None] = {}
    group: list[Kernel] = []
    before = -float("inf")
    for kernel in [*kernels, ("", float("inf"), float("inf"))]:
        if ATTENTION.search(kernel[0]) or PLAN.search(kernel[0]):
            group.append(kernel)
            names.setdefault(kernel[0].split("<")[0].split("(")[0][-70:])
            continue
        if group:
            begin, end = max(group[0][1], before), max(end for _, _, end in group)
            planned = any(PLAN.search(name) for name, _, _ in group)
            if not any(ATTENTION.search(name) for name, _, _ in group):
                plans.append(end - begin)
            elif planned:
                planning.append(end - begin)
            elif kernel[1] < float("inf"):
                alone.append(end - begin)
                between.append(kernel[1] - max(before, kernels[0][1]))
        group, before = [], max(before, kernel[2])
    if not alone:
        return float("nan"), float("nan"), float("nan"), ", ".join(names)
    steps = (len(alone) + len(planning)) / layers
    attention = median(alone)
    plan = (sum(plans) + sum(span - attention for span in planning)) / steps
    return attention, plan, median(between), ", ".join(names)


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


def profiled(sequences: Sequences) -> list[Kernel]:
    """The device's kernels of PROFILED_STEPS steps."""
    sequences.seconds(0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_STEPS):
            sequences.engine.step()
        torch.cuda.synchronize()
    return device_kernels(profile.events())


def filled(batch: int, context: int) -> list[list[int]]:
    """Prompts that are not computed."""
    Contexts.filled = True
    return [[2 + (index * 31 + place * 7) % (VOCAB - 2) for place in range(context)] for index in range(batch)]


def started(sequences: Sequences, batch: int, context: int) -> Row:
    sequences.start(batch, context)
    return {}


def profile(llm: Any, sequences: Sequences, layers: int, batch: int) -> Row:
    row: Row = dict(zip((*TIMED[:3], "kernels"), spans(profiled(sequences), layers), strict=True))
    row["step_us"] = llm.collective_rpc(replay_us, args=(batch,))[0]
    sequences.end()
    return row


def work(options: argparse.Namespace) -> int:
    """One backend's process."""
    backend, begun = options.alone, time.time()
    longest = max(options.contexts) + MAX_TOKENS
    Contexts.install()
    split = Split.install()
    with tempfile.TemporaryDirectory() as folder:
        save_config(Path(folder), options.layers, options.heads, longest)
        llm = start_engine(backend, options, Path(folder), max_model_len=longest, **Contexts.SETTINGS)
    page = llm.llm_engine.vllm_config.cache_config.block_size
    sequences = Sequences(llm, filled)
    return vllm_turns.serve(
        {"seconds": round(time.time() - begun), "page": page},
        {
            "check": partial(check, llm, split),
            "start": partial(started, sequences),
            "round": sequences.rate,
            "profile": partial(profile, llm, sequences, options.layers),
        },
    )


def show(row: Row, peer: Row | None) -> str:
    ratio = per_layer_us(row) / per_layer_us(peer) if peer is not None else float("nan")
    return (
        f"{row['backend']:12s} {row['batch']:5d} {row['context']:8d} {row['attention_us']:12.1f} {row['plan_us']:7.1f} "
        f"{per_layer_us(row):12.1f} {ratio:6.3f} {row['step_us']:9.0f} {row['tokens_per_s']:9.0f} "
        f"{row['least_tokens_per_s']:6.0f} {row['most_tokens_per_s']:6.0f} {vllm_turns.gpu_share(row):4.2f}"
    )


def main(options: argparse.Namespace) -> int:
    if options.alone:
        return work(options)
    if not ON_GPU:
        raise SystemExit("bench_vllm: no GPU here; on a CPU, `tox -e vllm` runs the engine and compares its tokens")
    print(versions(), f"{options.layers} layers, {options.heads} heads, kv cache {options.kv_cache_dtype}", sep="; ")
    facts = {"versions": versions(), "layers": options.layers, "heads": options.heads}
    rows, table = dict[tuple[Any, ...], Row](), Table(options.csv)

    def keep(row: Row) -> None:
        rows[tuple(row[key] for key in KEYS)] = row
        table.add(row | {"per_layer_us": per_layer_us(row)} | facts)

    vllm_turns.run(options, same_tokens=True, keep=keep)
    print("backend      batch  context attention us plan us per layer us  ratio   step us  tokens/s  least   most  GPU")
    for (_, *shape), row in sorted(rows.items(), key=lambda item: item[0][1:]):
        print(show(row, rows.get((PEER, *shape))))
    return 0
