"""Decode steps of SGLang's engine on a GPU, by attention backend: ours beside SGLang's own for an H100 or H200.

    python benchmarks/bench_sglang.py [--backends fa3,mla_suite,flashmla] [--csv FILE]
    python benchmarks/bench_sglang.py --kv-cache-dtype fp8_e4m3 --backends flashmla,mla_suite
    python benchmarks/bench_sglang.py --model v32 [--backends fa3,mla_suite,flashmla_sparse] [--csv FILE]
    python benchmarks/bench_sglang.py --model v32 --kv-cache-dtype fp8_e4m3 --backends flashmla_kv,mla_suite
    python benchmarks/bench_sglang.py --prompts 4096,16384 --backends fa3,mla_suite --batches 1 [--prefill-graphs]
    python benchmarks/bench_sglang.py --prompts 16,64,128,256,384 --behind 2048,16384 --batches 1 [--prefill-graphs]

The first backend of each line is what SGLang takes there by itself, but in the second: fa3 (FlashAttention 3) turns an
fp8 cache of V3 into bf16 in every layer. FlashMLA's backend for V3 needs FlashInfer. Each backend has an engine of its
own with the same model, that of bench_vllm.py: DeepSeek V3's attention (128 heads, latents of 512 + 64), dense MLPs,
random weights, `--layers` of them, bf16, pages of 64, steps in full CUDA graphs. Prompts are random and prefilled for
real. With `--model v32` its indexer selects 2,048 keys, and the backends are those of --dsa-decode-backend. All engines
start together, those of other runs of this program too, and while one is measured none starts.

Columns, all of one device:
busy_us       of a step: the time in which any kernel runs, page tables, metadata and sampling included
step_us       the step's CUDA graph replayed, median of three rounds; SGLang's own backends make their page tables and
              metadata outside of it, ours in it
period_us     the median time between two steps of the scheduler, host included
tokens_per_s  batch / that time
ratio         of the medians over `--runs`, busy_us of the first backend's

With `--prompts` there are other columns, of one prompt at a time; with `--behind` its first so many tokens are in
SGLang's radix cache, and then as many new ones follow. Prompts come in chunks of `--chunk` tokens. By default SGLang
captures those of up to 2,048 tokens in graphs with absorbed weights; here it does with `--prefill-graphs`. NAME+OTHER
is a backend NAME whose prompts go to OTHER.
busy_us         the time in which any kernel runs, summed over the chunks, medians of three
first_token_ms  until the first token, a median of three
keys            whether layers attended with absorbed weights or over expanded keys, of the last chunk
graph           whether SGLang replayed a graph, of the last chunk

Before anything is timed, a check: eight prompts of different lengths are prefilled and decoded. Attention outputs of
eager steps, and of absorbed prompts of every length when it comes first, are compared with their definition in fp32
over SGLang's own pool and selection, with queries in e4m3 where a backend quantises them. Greedy tokens are compared
with the first backend's; a token may differ only where that backend's best two lie close together. Errors of SGLang's
own backends are printed, and those of ours must be small.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sglang_steps import ASKED, GROUP, NAME, PROFILED_PROMPTS, STEPS, TIMED_PROMPTS, WARM_PROMPTS, say
from vllm_check import MAX_ERROR
from vllm_model import CHECKED_TOKENS, ON_GPU, VOCAB, Row, equal_tokens, install, medians, save_config

from mla_suite.bench.environment import versions
from mla_suite.bench.saving import Table
from mla_suite.cli import sizes, writable
from mla_suite.integrations import PRECISION
from mla_suite.integrations.plugins import SGLANG_NAME

HERE = Path(__file__).parent
PEER = "fa3"
LENGTHS = (5, 2900, 63, 700, 64, 333, 65, 2100)  # of the prompts that are checked: within and beyond V3.2's selection
KEYS = ("backend", "batch", "context")
TIMED = ("busy_us", "step_us", "period_us", "tokens_per_s")
FIRST_TOKENS = 1  # of a request come from its prefill
SPARE_PAGES = 4  # of each sequence, beyond its tokens
PAGE = 64
LOCK = Path(tempfile.gettempdir()) / "mla_suite_bench_sglang"  # shared while engines start; one at a time is measured
MIXED = {"prefill_attention_backend": PEER, "decode_attention_backend": "flashmla"}  # its prefill is FlashInfer's


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("v3", "v32"), default="v3", help="DeepSeek V3 or V3.2 (default: v3)")
    parser.add_argument("--backends", default=f"{PEER},mla_suite", help="SGLang's names, comma-separated")
    parser.add_argument("--batches", type=sizes, default=(1, 8, 32, 128), help="sequences of a step")
    parser.add_argument("--contexts", type=sizes, default=(4096,), help="tokens of a prompt")
    parser.add_argument("--prompts", type=sizes, default=(), help="tokens of single prompts, to time these, not steps")
    parser.add_argument("--behind", type=sizes, default=(), help="cached tokens of these prompts, beside none")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of prompts in a batch (default: 8192)")
    parser.add_argument("--prefill-graphs", action="store_true", help="capture short prompts, as SGLang does by itself")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model (default: 16)")
    parser.add_argument("--heads", type=int, default=128, help="attention heads (default: 128)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto (bf16) or fp8_e4m3")
    parser.add_argument("--runs", type=int, default=1, help="engines of each backend, in turns; the table has medians")
    parser.add_argument("--skip-check", action="store_true", help="time without comparing results first")
    parser.add_argument("--csv", type=writable, help="write the rows to this file as they come")
    parser.add_argument("--alone", metavar="BACKEND", help=argparse.SUPPRESS)
    parser.add_argument("--rows", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


def longest_of(options: argparse.Namespace) -> int:
    """Tokens for which each sequence has room."""
    prompts = max(options.prompts, default=0) + max(options.behind, default=0)
    return max(*options.contexts, prompts, *LENGTHS) + STEPS + SPARE_PAGES * PAGE


def chosen(model: str, backend: str) -> dict[str, Any]:
    """The settings of an engine that decodes by that backend."""
    if model == "v32":
        return {"dsa_decode_backend": backend}
    if backend == "flashmla":
        return MIXED
    name, _, prefill = backend.partition("+")
    return {"attention_backend": name} | ({"prefill_attention_backend": prefill} if prefill else {})


def start_engine(options: argparse.Namespace, folder: Path) -> Any:
    import sglang

    longest = longest_of(options)
    prefill_graphs = {} if options.prefill_graphs else {"cuda_graph_backend_prefill": "disabled"}
    return sglang.Engine(
        model_path=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        **chosen(options.model, options.alone),
        kv_cache_dtype=options.kv_cache_dtype,
        page_size=PAGE,
        sampling_backend="pytorch",
        disable_radix_cache=not options.behind,
        chunked_prefill_size=options.chunk,
        **prefill_graphs,
        cuda_graph_bs_decode=sorted({*options.batches, len(LENGTHS)}),
        max_running_requests=max(*options.batches, len(LENGTHS)),
        max_total_tokens=max(*options.batches, len(LENGTHS)) * longest,
        context_length=longest,
        random_seed=0,
        log_level="warning",
    )


def random_ids(lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def generate(engine: Any, prompts: list[list[int]], tokens: int, **asked: Any) -> list[dict[str, Any]]:
    """Greedy answers of SGLang."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answers: list[dict[str, Any]] = engine.generate(input_ids=prompts, sampling_params=sampling, **asked)
    return answers


def check(engine: Any) -> dict[str, Any]:
    """Greedy tokens, and the gaps between the best two log-probabilities."""
    answers = generate(engine, random_ids(LENGTHS, 0), CHECKED_TOKENS, return_logprob=True, top_logprobs_num=2)
    best = [answer["meta_info"]["output_top_logprobs"] for answer in answers]
    gaps = [[float(place[0][0] - place[1][0]) for place in places] for places in best]
    return {"tokens": [answer["output_ids"] for answer in answers], "gaps": gaps}


def first_token_ms(engine: Any, new: int, cached: int) -> float:
    """Of new tokens behind others, which are in the radix cache once the first prompt has come."""
    (prefix,), rounds = random_ids([cached], cached), list[float]()
    for turn in range(WARM_PROMPTS + TIMED_PROMPTS + PROFILED_PROMPTS):
        (follow,) = random_ids([new], new * PAGE + turn)  # of which no two begin alike
        begun = time.perf_counter()
        (answer,) = generate(engine, [prefix + follow], FIRST_TOKENS)
        rounds.append(1e3 * (time.perf_counter() - begun))
        if turn and (found := answer["meta_info"]["cached_tokens"]) != cached:
            raise AssertionError(f"{found} of {cached} tokens came from the cache")
    return median(rounds[WARM_PROMPTS:][:TIMED_PROMPTS])


def passes(found: list[Row], new: int, cached: int, chunk: int) -> Row:
    """What the scheduler wrote of the chunks of such prompts."""
    busy, last = 0.0, Row()
    for at in range(0, new, chunk):
        shape = min(chunk, new - at), cached + at
        own = [row for row in found if (row["new"], row["cached"]) == shape]
        busy, last = busy + median(row["busy_us"] for row in own[-PROFILED_PROMPTS:]), own[-1]
    keys = "absorbed" if last["absorbed"] else "expanded"
    return {"busy_us": busy, "keys": keys, "graph": last["graph"]}


def work(options: argparse.Namespace) -> int:
    """One backend's process; the scheduler, a process of its own, writes the rows of steps."""
    with tempfile.TemporaryDirectory() as folder, open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        save_config(Path(folder), options.model, options.layers, options.heads, longest_of(options))
        engine = start_engine(options, Path(folder))
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not options.skip_check:
            say(options.rows, "tokens", check(engine))
        for cached in (0, *options.behind) if options.prompts else ():
            for new in options.prompts:
                ms = first_token_ms(engine, new, cached)
                say(options.rows, "prompt", {"new": new, "cached": cached, "first_token_ms": ms})
        for context in () if options.prompts else options.contexts:
            for batch in options.batches:
                generate(engine, random_ids([context] * batch, 0), FIRST_TOKENS + STEPS)
        engine.shutdown()
    return 0


@contextlib.contextmanager
def started(options: argparse.Namespace, backend: str, run: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A backend's process, which is measured when no engine starts any more, and the file of what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        installed = install(Path(folder), NAME, GROUP, {"bench": "sglang_steps:install"})
        skipped = options.skip_check or run > 0
        asked = {"path": str(rows), "layers": options.layers, "batches": options.batches, "compare": not skipped}
        asked["fp8_queries"] = PRECISION == "fp8" or backend == "flashmla"
        (installed / ASKED).write_text(json.dumps(asked))
        # SGLang's cache in Rust is built for one release of torch.
        environment = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python", **os.environ}
        environment |= {"PYTHONPATH": os.pathsep.join([folder, str(HERE.parent), *sys.path])}
        command = [sys.executable, *sys.argv, "--alone", backend, "--rows", str(rows), *["--skip-check"] * skipped]
        with subprocess.Popen(command, env=environment) as process:
            yield process, rows


def finished(backend: str, process: subprocess.Popen[bytes], rows: Path) -> tuple[dict[str, list[Row]], int]:
    """What a backend's process wrote, by kind, and its exit status."""
    if code := process.wait():
        print(f"{backend}: exit status {code}", flush=True)
    found: dict[str, list[Row]] = {"row": [], "prompt": [], "pass": [], "tokens": [], "compared": []}
    for kind, value in map(json.loads, rows.read_text().splitlines()):
        found[kind].append(value)
    return found, code


def require_correct(backend: str, found: dict[str, list[Row]], first: Row | None) -> None:
    """AssertionError unless outputs are near their definition, and tokens are the first backend's but at near ties."""
    of_prompts = [row for row in found["pass"] if row["compared"]]
    total = {"compared": sum(row["compared"] for row in of_prompts)}
    total["error"] = max((row["error"] for row in of_prompts), default=0.0)
    for compared in (*found["compared"], total):
        print(f"{backend}: {compared['compared']} attention outputs within {compared['error']:.1e} of fp32", flush=True)
        if backend.startswith(SGLANG_NAME) and not compared["error"] <= MAX_ERROR:
            raise AssertionError(f"attention differs from its definition by {compared['error']:.1e}")
    if first is not None:
        print(f"{backend}: {equal_tokens(found['tokens'][0], first)}", flush=True)


def main() -> int:
    options = parse()
    if options.alone:
        return work(options)
    if not ON_GPU:
        raise SystemExit("bench_sglang: no GPU here; on a CPU, `tox -e sglang` runs the server and compares its tokens")
    facts = {"model": options.model, "kv_cache_dtype": options.kv_cache_dtype, "layers": options.layers}
    facts |= {"heads": options.heads, "versions": versions("sglang", "sglang-kernel", "torch", "triton")}
    if options.prompts:
        facts |= {"chunk": options.chunk, "prefill_graphs": options.prefill_graphs}
    print(*facts.values(), sep="; ")
    columns = (
        ("new", "cached", "keys", "graph", "busy_us", "first_token_ms") if options.prompts else (*KEYS[1:], *TIMED)
    )
    rows, table, status = list[Row](), Table(options.csv, shown=("run", KEYS[0], *columns)), 0
    first: Row | None = None
    backends = options.backends.split(",")
    for run in range(options.runs):
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(started(options, backend, run)) for backend in backends]
            for backend, (process, written) in zip(backends, processes, strict=True):
                found, code = finished(backend, process, written)
                status = status or code
                for row in found["prompt"]:
                    row |= passes(found["pass"], row["new"], row["cached"], options.chunk)
                for row in found["row"] + found["prompt"]:
                    rows.append({"backend": backend, **row, "run": run})
                    table.add(rows[-1] | facts)
                if found["tokens"]:
                    require_correct(backend, found, first)
                    first = first or found["tokens"][0]
    if options.prompts:
        return status
    found, last = medians(rows, KEYS, TIMED), Table(None, shown=(*KEYS, "busy_us", "ratio", *TIMED[1:]))
    for (_, *shape), row in sorted(found.items(), key=lambda item: item[0][1:]):
        peer = found.get((backends[0], *shape))
        last.add(row | {"ratio": row["busy_us"] / peer["busy_us"] if peer else float("nan")})
    return status


if __name__ == "__main__":
    raise SystemExit(main())
