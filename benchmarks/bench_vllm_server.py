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

Our server's log must show that its decode ran, and which implementation, or the program fails. Whether the results are
right is checked by bench_vllm.py. To see that everything runs where there is no GPU (vLLM's own attention there is
CPU_MLA), try a tiny load:

    python benchmarks/bench_vllm_server.py --layers 2 --heads 4 --loads 2x32x8 --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_vllm import PEER
from vllm_decode import OURS, VOCAB, save_config, use_random_weights

PLUGIN, BACKEND_VARIABLE = "bench_vllm_server", "BENCH_VLLM_SERVER_BACKEND"
ON_GPU = torch.cuda.is_available()
OWN_ON_CPU = "CPU_MLA"
AGAINST = PEER if ON_GPU else OWN_ON_CPU
ROW_BYTES, PAGE = 576 * (2 if ON_GPU else 4), 64
MEMORY = 0.85  # of the GPU, for all servers together
STREAM_INTERVAL = 8  # tokens per streamed event, so that neither server nor load generator waits for Python
START_LIMIT_S, STOP_LIMIT_S = 300, 30
CHOICE = re.compile(r"decode \w*Problem.* on (\S+) -> (\w+)")  # a line of MLA_SUITE_LOG=dispatch
TIMES = ("output_throughput", "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "duration")
FIELDS = ("tokens_per_s", "tpot_ms", "p99_tpot_ms", "ttft_ms", "seconds")  # what a row calls those


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once, and the tokens of each."""

    concurrency: int
    input: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Load:
        return cls(*(int(part) for part in text.split("x")))

    def __str__(self) -> str:
        return f"{self.concurrency} x {self.input} x {self.output}"

    @property
    def pages(self) -> int:
        return self.concurrency * (-(-(self.input + self.output) // PAGE) + 1)


@dataclass
class Server:
    """A running server."""

    backend: str
    rounds: int
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def implementations(self) -> set[str]:
        """What ran our decode in this server, such as "native on sm_90"."""
        return {f"{choice} on {where}" for where, choice in CHOICE.findall(self.log.read_text())}


Row = dict[str, Any]


def loads(text: str) -> list[Load]:
    return [Load.parse(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    backends = f"{OURS},{PEER},TRITON_MLA:1" if ON_GPU else f"{OURS},{OWN_ON_CPU}"
    parser.add_argument("--backends", default=backends, help="vLLM's names; NAME:1 takes part in the last round alone")
    parser.add_argument("--loads", type=loads, default=loads("32x1024x256,32x4096x256,128x1024x256"))
    parser.add_argument("--rounds", type=int, default=3, help="of every load (default: 3)")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default: 32)")
    parser.add_argument("--heads", type=int, default=128, help="attention heads (default: 128)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no load after so many seconds")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--csv", type=Path, help="write a row for every backend, load and round here")
    return parser.parse_args()


def in_server() -> None:
    """Entry point for vLLM's plugins, called in each process of a server: random weights, and our backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from mla_suite.integrations import plugins

    use_random_weights()
    plugins.vllm()
    if not ON_GPU and os.environ[BACKEND_VARIABLE] == OURS:  # on a CPU vLLM takes no name but CPU_MLA
        register_backend(AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.CUSTOM.get_path())


def save_model(folder: Path, options: argparse.Namespace) -> Path:
    """A model's folder: its config.json, and a tokenizer of one word per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_config(folder, options.layers, options.heads, max(load.input + load.output for load in options.loads) + PAGE)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False).save_pretrained(folder)
    return folder


def environment(folder: Path, backend: str) -> dict[str, str]:
    """Variables of a server's processes, which find `in_server` by an entry of `folder`, as if it were installed."""
    installed = folder / f"{PLUGIN}-0.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN} = {PLUGIN}:in_server\n")
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, [str(folder), str(Path(__file__).parent), *path])),
        "PYTHONUNBUFFERED": "1",
        "VLLM_PLUGINS": PLUGIN,
        "MLA_SUITE_LOG": "dispatch",
        BACKEND_VARIABLE: backend,
    }


def start(name: str, model: Path, logs: Path, servers: int, options: argparse.Namespace) -> Server:
    """Start a server; it is not up when this returns."""
    backend, _, rounds = name.partition(":")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    most = max(load.concurrency for load in options.loads)
    settings: dict[str, Any] = {
        "--model": model,
        "--served-model-name": "model",
        "--load-format": "dummy",
        "--dtype": "bfloat16" if ON_GPU else "float32",
        "--max-num-seqs": most,
        "--max-num-batched-tokens": 8192,
        "--stream-interval": STREAM_INTERVAL,
        "--attention-backend": backend if ON_GPU else OWN_ON_CPU,
        "--gpu-memory-utilization": f"{MEMORY / servers:.2f}" if ON_GPU else "0.05",
        "--host": "127.0.0.1",
        "--port": port,
        "--seed": 0,
    }
    if ON_GPU:
        # A size for the cache spares vLLM to measure memory, which other servers take at the same time.
        pages = max(load.pages for load in options.loads)
        settings["--kv-cache-memory-bytes"] = pages * PAGE * ROW_BYTES * options.layers
        sizes = sorted({size for size in (1, 2, 4, *range(8, most, 8), most) if size <= most})
        compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    else:  # vLLM's rotary kernel for CPUs is wrong on the strided views that MLA gives it
        compilation = {"custom_ops": ["all", "-rotary_embedding"]}
    settings["--compilation-config"] = json.dumps(compilation)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--no-enable-prefix-caching"]
    command += ["--disable-uvicorn-access-log", *["--enforce-eager"] * (not ON_GPU)]
    command += [str(text) for setting in settings.items() for text in setting]
    log = logs / f"{backend}.log"
    with log.open("w") as out:
        # `-m` looks in the working directory first; a session of its own, so that all its processes can be ended
        process = subprocess.Popen(
            command, env=environment(model, backend), cwd=model, stdout=out, stderr=out, start_new_session=True
        )
    return Server(backend, int(rounds or options.rounds), process, port, log)


def wait_until_up(server: Server, end: float) -> None:
    import requests

    while True:
        with contextlib.suppress(requests.ConnectionError, requests.Timeout):
            if requests.get(f"http://127.0.0.1:{server.port}/health", timeout=5).ok:
                return
        if server.process.poll() is not None or time.monotonic() > end:
            state = "ended" if server.process.poll() is not None else "is not up"
            raise SystemExit(f"{server.log.read_text()[-4000:]}\nthe server of {server.backend} {state}; its log is above")
        time.sleep(0.2)


@contextlib.contextmanager
def running(options: argparse.Namespace, folder: Path) -> Iterator[list[Server]]:
    """All servers, up; they are stopped at the end, whatever ends it."""
    logs = options.logs or folder
    logs.mkdir(parents=True, exist_ok=True)
    model, servers = save_model(folder, options), []
    names = options.backends.split(",")
    began = time.monotonic()
    try:
        for name in names:
            servers.append(start(name, model, logs.absolute(), len(names), options))
        for server in servers:
            wait_until_up(server, began + START_LIMIT_S)
            print(f"{server.backend}: up after {time.monotonic() - began:.0f} s", flush=True)
        yield servers
    finally:
        for server in servers:
            server.process.terminate()
        for server in servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(timeout=STOP_LIMIT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)


def run_load(server: Server, model: Path, load: Load, seed: int) -> dict[str, Any]:
    """What vLLM's load generator measures."""
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
            f"{result['total_output_tokens']} of {tokens} tokens; see {server.log.parent}"
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
                    print(f"the limit of {options.limit_s:.0f} s is reached before {server.backend}, {load}", flush=True)
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


def table(rows: Sequence[Row]) -> str:
    """A line for each load and backend, with the medians of its rounds."""
    runs: dict[tuple[Load, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["load"], row["backend"]), []).append(row)
    medians = {key: {**own[0], **{name: median(r[name] for r in own) for name in FIELDS}} for key, own in runs.items()}
    lines = ["concur x in x out  backend       tokens/s  ratio  TPOT ms      p99  TTFT ms"]
    return "\n".join([*lines, *(show(row, medians.get((load, AGAINST))) for (load, _), row in medians.items())])


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


def check_implementations(servers: Sequence[Server]) -> int:
    """Says what ran our decode; 1 where it did not run in our server, or ran in another's."""
    status = 0
    for server in servers:
        found = server.implementations()
        print(f"{server.backend}: our decode " + (f"was {', '.join(sorted(found))}" if found else "did not run"))
        status |= bool(found) != (server.backend == OURS)
    return status


def main() -> int:
    options = arguments()
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    print(versions(), f"{options.layers} layers, {options.heads} heads", sep="; ", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, running(options, Path(folder)) as servers:
        for row in measure(servers, Path(folder), options):
            rows.append(row)
            print(show(row, None), f"  round {row['round']}, {row['seconds']:.1f} s", flush=True)
            if options.csv:
                save(rows, options)
        status = check_implementations(servers)
    print(table(rows))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
