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
tokens/s      batch / the median time between two steps of the engine, median of three rounds; includes vLLM's host work

Before anything is timed, a check: eight prompts that arrive one after another are prefilled and decoded for real. Every
attention output of an eager step is compared with its definition in fp32, and greedy tokens with the first backend's;
a token may differ only where that backend's best two lie close together.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from vllm_model import (
    ON_GPU,
    OURS,
    PEER,
    VOCAB,
    Contexts,
    Row,
    check,
    equal_tokens,
    medians,
    save_config,
    start_engine,
    versions,
)

from mla_suite.bench.saving import Table
from mla_suite.bench.timer import queued_us
from mla_suite.cli import sizes

MODEL_LAYERS = 61  # of DeepSeek V3, which share a step's plan
WARM_STEPS, ROUNDS, PROFILED_STEPS, REPLAYS = 4, 3, 5, 8
ROUND_S, MIN_STEPS, MAX_STEPS = 0.1, 6, 40  # a round of steps lasts about as long
MAX_TOKENS = 2 * WARM_STEPS + PROFILED_STEPS + ROUNDS * MAX_STEPS + 8  # by which a context grows at most
ATTENTION = re.compile(
    r"^decode_|combine(?!_sampled)|flash_fwd_splitkv_mla_kernel|FlashAttnFwd(Sm90|Combine)|_fwd(_grouped)?_kernel_stage[12]"
)
PLAN = re.compile(r"^plan_|mla_metadata|prepare_varlen_num_blocks")
MARK = "bench_vllm: "  # before the lines that a backend's process prints for its parent


KEYS = ("backend", "batch", "context")
TIMED = ("attention_us", "plan_us", "between_us", "step_us", "tokens_per_s")  # NaN: could not be had


def per_layer_us(row: Row) -> float:
    return float(row["attention_us"] + row["plan_us"] / MODEL_LAYERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends", default=f"{PEER},{OURS},FLASHMLA,TRITON_MLA", help="vLLM's names, comma-separated"
    )
    parser.add_argument("--batches", type=sizes, default=(1, 8, 32, 128), help="sequences of a step")
    parser.add_argument("--contexts", type=sizes, default=(1024, 4096, 16384), help="cached tokens per sequence")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model (default: 16)")
    parser.add_argument("--heads", type=int, default=128, help="attention heads (default: 128)")
    parser.add_argument("--block-size", type=int, help="tokens per page (default: what the backend asks vLLM for)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto (bf16) or fp8")
    parser.add_argument("--runs", type=int, default=1, help="engines of each backend, in turns; the table has medians")
    parser.add_argument("--skip-check", action="store_true", help="time without comparing results first")
    parser.add_argument("--csv", type=Path, help="write the rows to this file as they come")
    parser.add_argument("--alone", metavar="BACKEND", help=argparse.SUPPRESS)


def step_times(engine: Any, count: int) -> list[float]:
    """Seconds between the ends of `count` steps."""
    times = [time.perf_counter()]
    for _ in range(count):
        engine.step()
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


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
    for _ in range(ROUNDS):
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


def measure(llm: Any, backend: str, batch: int, context: int, layers: int) -> Row:
    """Start `batch` sequences of `context` cached tokens, and time, profile and replay their steps."""
    row: Row = dict(zip(KEYS, (backend, batch, context), strict=True)) | dict.fromkeys(TIMED, float("nan"))
    engine = llm.llm_engine
    Contexts.filled = True
    prompts = [[2 + (index * 31 + place * 7) % (VOCAB - 2) for place in range(context)] for index in range(batch)]
    ids = add_requests(engine, prompts)
    step_times(engine, WARM_STEPS)
    usual = median(step_times(engine, WARM_STEPS))
    if ON_GPU:
        row |= dict(zip((*TIMED[:3], "kernels"), spans(profiled(engine), layers), strict=True))
        row["step_us"] = llm.collective_rpc(replay_us, args=(batch,))[0]
    row["tokens_per_s"] = tokens_per_s(engine, batch, usual)
    end_requests(engine, ids)
    return row


def add_requests(engine: Any, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Add a request for each prompt, which ends when it is ended; -> their names."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    names = [f"{len(prompts)}x{len(prompt)}x{index}" for index, prompt in enumerate(prompts)]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
    return names


def end_requests(engine: Any, names: list[str]) -> None:
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()


def profiled(engine: Any) -> list[Kernel]:
    """The device's kernels of PROFILED_STEPS steps."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step_times(engine, PROFILED_STEPS)
        torch.cuda.synchronize()
    return device_kernels(profile.events())


def tokens_per_s(engine: Any, batch: int, usual: float) -> float:
    """`batch` / the median time between two steps, the median of rounds; a step usually takes `usual` seconds."""
    count = max(MIN_STEPS, min(MAX_STEPS, int(ROUND_S / usual)))
    return median([batch / median(step_times(engine, count)) for _ in range(ROUNDS)])


def work(options: argparse.Namespace) -> int:
    """One backend's process: prints its rows as lines of JSON behind MARK."""
    backend, started = options.alone, time.time()
    longest = max(options.contexts) + 1024
    Contexts.install()
    with tempfile.TemporaryDirectory() as folder:
        save_config(Path(folder), options.layers, options.heads, longest)
        llm = start_engine(backend, options, Path(folder), max_model_len=longest, **Contexts.SETTINGS)
    page = llm.llm_engine.vllm_config.cache_config.block_size
    say("started", {"seconds": round(time.time() - started), "page": page})
    if not options.skip_check:
        say("check", check(llm))
    for context in options.contexts:
        for batch in options.batches:
            say("row", measure(llm, backend, batch, context, options.layers))
    return 0


def say(kind: str, value: dict[str, Any]) -> None:
    print(MARK + json.dumps([kind, value]), flush=True)


def run_process(backend: str, run: int, keep: Callable[[Row], None]) -> tuple[dict[str, Any] | None, int]:
    """Run a backend in its own process and `keep` its rows; what was checked, in the first run, and the exit status.

    The other output of the process goes through.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the profiler and the graphs are asked for in this process
        "VLLM_PLUGINS": "",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
    }
    command = [sys.executable, *sys.argv, "--alone", backend, *["--skip-check"] * (run > 0)]
    checked = None
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(MARK):
                print(line, end="", flush=True)
                continue
            kind, value = json.loads(line.removeprefix(MARK))
            if kind == "row":
                keep(value | {"run": run})
            elif kind == "check":
                checked = value
                print(f"  {value['compared']} attention outputs within {value['error']:.1e} of fp32", flush=True)
            else:
                print(f"{backend}: engine in {value['seconds']} s, pages of {value['page']}", flush=True)
    return checked, process.returncode


def show(row: Row, peer: Row | None) -> str:
    ratio = per_layer_us(row) / per_layer_us(peer) if peer is not None else float("nan")
    return (
        f"{row['backend']:12s} {row['batch']:5d} {row['context']:8d} {row['attention_us']:13.1f} {row['plan_us']:8.1f} "
        f"{per_layer_us(row):12.1f} {ratio:6.3f} {row['step_us']:9.0f} {row['tokens_per_s']:9.0f}"
    )


def main(options: argparse.Namespace) -> int:
    if options.alone:
        return work(options)
    if not ON_GPU:
        raise SystemExit("bench_vllm: no GPU here; on a CPU, `tox -e vllm` runs the engine and compares its tokens")
    print(versions(), f"{options.layers} layers, {options.heads} heads, kv cache {options.kv_cache_dtype}", sep="; ")
    facts = {"versions": versions(), "layers": options.layers, "heads": options.heads}
    rows, table, status = list[Row](), Table(options.csv), 0
    first: dict[str, Any] | None = None

    def keep(row: Row) -> None:
        rows.append(row)
        table.add(row | {"per_layer_us": per_layer_us(row)} | facts)
        print(f"  {show(row, None)}", flush=True)

    for run in range(options.runs):
        for backend in options.backends.split(","):
            checked, code = run_process(backend, run, keep)
            status = status or code
            if checked is not None and first is not None:
                print(f"  {equal_tokens(checked, first)}")
            first = first or checked
    found = medians(rows, KEYS, TIMED)
    print("backend      batch  context  attention us  plan us per layer us  ratio   step us  tokens/s")
    for (_, *shape), row in sorted(found.items(), key=lambda item: item[0][1:]):
        print(show(row, found.get((PEER, *shape))))
    return status
