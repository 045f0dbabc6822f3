"""vLLM's OpenAI-compatible server under load, by attention backend: output tokens/s and time per output token.

    python benchmarks/bench_vllm_server.py [--backends CUSTOM,FLASHMLA,TRITON_MLA:1] [--csv FILE]

CUSTOM is this package's backend. Every backend has a server of its own with the same model (DeepSeek V3's attention,
dense MLPs, random weights; vllm_decode.py), decode steps in CUDA graphs. The servers start together and share the GPU;
then one at a time is under load, in turns, so that all see the same card. Load comes from vLLM's own generator,
`vllm.benchmarks.serve`: greedy requests with prompts of random tokens, over HTTP and streamed. A load is
concurrency x input tokens x output tokens, all requests sent at once.

Columns, medians over the rounds:
tokens/s   output tokens of all requests / seconds from the first request to the last answer, prefill included
ratio      tokens/s, of FLASHMLA's
TPOT ms    time per output token of a request after its first token: median and 99th percentile over requests
TTFT ms    time to the first token, median over requests

The program fails unless the servers' logs show that our decode ran, in our server alone, and that on a GPU every server
captured graphs. Whether results are right is checked by bench_vllm.py. To see that everything runs where there is no
GPU (vLLM's own attention there is CPU_MLA), try a tiny load:

    python benchmarks/bench_vllm_server.py --layers 2 --heads 4 --loads 2x32x8 --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_vllm import PEER
from vllm_decode import OURS
from vllm_servers import ON_GPU, OWN_ON_CPU, STREAM_INTERVAL, Load, Server, running, save_model

AGAINST = PEER if ON_GPU else OWN_ON_CPU
TIMES = ("output_throughput", "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "duration")
FIELDS = ("tokens_per_s", "tpot_ms", "p99_tpot_ms", "ttft_ms", "seconds")  # what a row calls those

LOADS = "concurrency x input tokens x output tokens, comma-separated (default: 32x1024x256,32x4096x256,128x1024x256)"

Row = dict[str, Any]


def loads(text: str) -> list[Load]:
    return [Load.parse(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    backends = f"{OURS},{PEER},TRITON_MLA:1" if ON_GPU else f"{OURS},{OWN_ON_CPU}"
    parser.add_argument("--backends", default=backends, help="vLLM's names; NAME:1: in the last round alone")
    parser.add_argument("--loads", type=loads, default=loads("32x1024x256,32x4096x256,128x1024x256"), help=LOADS)
    parser.add_argument("--rounds", type=int, default=3, help="of every load (default: 3)")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default: 32)")
    parser.add_argument("--heads", type=int, default=128, help="attention heads (default: 128)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which no load begins")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--csv", type=Path, help="write a row for every backend, load and round here")
    return parser.parse_args()


def run_load(server: Server, model: Path, load: Load, seed: int) -> dict[str, Any]:
    """Put a server under a load once, and return what vLLM's generator measured."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    settings: dict[str, Any] = {
        "--port": server.port,
        "--model": "model",
        "--tokenizer": model,
        "--dataset-name": "random",
        "--random-input-len": load.input,
        "--random-output-len": load.output,
        "--num-prompts": load.concurrency,
        "--max-concurrency": load.concurrency,
        "--temperature": 0,
        "--seed": seed,
    }
    command = ["--ignore-eos", "--disable-tqdm", *(str(text) for setting in settings.items() for text in setting)]
    with (server.log.parent / "load.log").open("a") as out, contextlib.redirect_stdout(out):
        result = asyncio.run(serve.main_async(parser.parse_args(command)))
    tokens = load.concurrency * load.output
    if result["completed"] != load.concurrency or result["total_output_tokens"] != tokens:
        raise SystemExit(
            f"{server.backend}, {load}: {result['completed']} of {load.concurrency} requests were answered, with "
            f"{result['total_output_tokens']} of {tokens} tokens; --logs FOLDER keeps what the server said"
        )
    return result


def measure(servers: Sequence[Server], model: Path, options: argparse.Namespace) -> Iterator[Row]:
    """A row for every round, load and server, in that order."""
    end = time.monotonic() + options.limit_s
    warm = Load(max(load.concurrency for load in options.loads), min(256, options.loads[0].input), STREAM_INTERVAL)
    for server in servers:
        run_load(server, model, warm, seed=len(options.loads))
    for turn in range(options.rounds):
        for seed, load in enumerate(options.loads):
            for server in servers:
                if turn < options.rounds - server.rounds:
                    continue
                if time.monotonic() > end:
                    print(
                        f"the limit of {options.limit_s:.0f} s is reached before {server.backend}, {load}", flush=True
                    )
                    return
                result = run_load(server, model, load, seed)
                times = {field: result[name] for field, name in zip(FIELDS, TIMES, strict=True)}
                yield {"backend": server.backend, "load": load, "round": turn, **times}


def show(row: Row, peer: Row | None) -> str:
    ratio = row["tokens_per_s"] / peer["tokens_per_s"] if peer else float("nan")
    return (
        f"{row['load']!s:>18s} {row['backend']:12s} {row['tokens_per_s']:9.0f} {ratio:6.3f} "
        f"{row['tpot_ms']:8.2f} {row['p99_tpot_ms']:8.2f} {row['ttft_ms']:8.0f}"
    )


def medians(rows: Sequence[Row]) -> dict[tuple[Load, str], Row]:
    """A row for each load and backend, with the medians of its rounds."""
    runs: dict[tuple[Load, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["load"], row["backend"]), []).append(row)
    return {key: {**own[0], **{name: median(r[name] for r in own) for name in FIELDS}} for key, own in runs.items()}


def table(rows: Sequence[Row]) -> str:
    """A line for each load and backend, with its medians and their ratio to the peer's."""
    found = medians(rows)
    lines = ["concur x in x out  backend       tokens/s  ratio  TPOT ms      p99  TTFT ms"]
    return "\n".join([*lines, *(show(row, found.get((load, AGAINST))) for (load, _), row in found.items())])


def versions() -> str:
    import vllm

    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    return f"vllm {vllm.__version__}, torch {torch.__version__}, {device}"


def save(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write all rows, so that a run that ends early leaves those before it."""
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["backend", "concurrency", "input", "output", "round", *FIELDS, "versions", "layers", "heads"])
        for row in rows:
            load, times = row["load"], [f"{row[name]:.3f}" for name in FIELDS]
            who = [row["backend"], load.concurrency, load.input, load.output, row["round"]]
            writer.writerow([*who, *times, versions(), options.layers, options.heads])


def check(servers: Sequence[Server], on_gpu: bool = ON_GPU) -> int:
    """Says what ran our decode; 1 if it did not run in our server, ran in another, or steps were not in CUDA graphs."""
    status = 0
    for server in servers:
        found = server.implementations()
        graphs = ", without CUDA graphs" if on_gpu and not server.has_graphs() else ""
        print(f"{server.backend}: our decode {'was ' + ', '.join(sorted(found)) if found else 'did not run'}{graphs}")
        status |= bool(found) != (server.backend == OURS) or bool(graphs)
    return int(status)


def main() -> int:
    options = arguments()
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    print(versions(), f"{options.layers} layers, {options.heads} heads", sep="; ", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder), options.layers, options.heads, options.loads)
        with running(options, model) as servers:
            for row in measure(servers, model, options):
                rows.append(row)
                print(show(row, None), f"  round {row['round']}, {row['seconds']:.1f} s", flush=True)
                if options.csv:
                    save(rows, options)
            status = check(servers)
    print(table(rows))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
