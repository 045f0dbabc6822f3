"""vLLM's OpenAI-compatible server under load, by attention backend: output tokens/s and time per output token.

    python benchmarks/bench_vllm.py server [--backends CUSTOM,FLASH_ATTN_MLA,TRITON_MLA:1] [--csv FILE]

CUSTOM is this package's backend. Every backend has a server of its own with the same model (DeepSeek V3's attention,
dense MLPs, random weights; vllm_model.py), decode steps in CUDA graphs. The servers start together and share the GPU;
then one at a time is under load, in turns, so that all see the same card. Load comes from vLLM's own generator,
`vllm.benchmarks.serve`: greedy requests with prompts of random tokens, over HTTP and streamed. A load is
concurrency x input tokens x output tokens, all requests sent at once.

Columns, of a round and at the end their medians over the rounds:
tokens_per_s          output tokens of all requests / seconds from the first request to the last answer, prefill
                      included
ratio                 tokens_per_s, of FLASH_ATTN_MLA's, which vLLM 0.33 takes by itself on an H100 or H200
tpot_ms, p99_tpot_ms  time per output token of a request after its first token: median and 99th percentile over requests
ttft_ms               time to the first token, median over requests

The program fails unless the servers' logs show that our decode ran, in our server alone, and that on a GPU every server
captured graphs. Whether results are right is checked by the other command, `engine`. To see that everything runs where
there is no GPU (vLLM's own attention there is CPU_MLA), try a tiny load:

    python benchmarks/bench_vllm.py server --layers 2 --heads 4 --loads 2x32x8 --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_model import ON_GPU, OURS, PEER, VOCAB, Row, install, medians, save_config, use_random_weights, versions

from mla_suite.bench.saving import Table
from mla_suite.cli import writable

PLUGINS = {"bench_in_server": "vllm_server:in_server", "bench_on_cpu": "vllm_server:on_cpu"}
OWN_ON_CPU = "CPU_MLA"
AGAINST = PEER if ON_GPU else OWN_ON_CPU
ROW_BYTES, PAGE = 576 * (2 if ON_GPU else 4), 64
MEMORY = 0.85  # of the GPU, for all servers together
STREAM_INTERVAL = 8  # tokens per streamed event, so that neither server nor load generator waits for Python
START_LIMIT_S, STOP_LIMIT_S = 300, 30
UNKNOWN = "a-word-that-is-not-known"
CAPTURED = "Graph capturing finished"  # a line of vLLM's
CHOICE = re.compile(r"decode \w*Problem.* on (\S+) -> (\w+)")  # a line of MLA_SUITE_LOG=dispatch

TIMES = ("output_throughput", "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "duration")
FIELDS = ("tokens_per_s", "tpot_ms", "p99_tpot_ms", "ttft_ms", "seconds")  # what a row calls those
SIZES = ("concurrency", "input", "output")  # of a load
SHOWN = (*SIZES, "backend", *FIELDS[:-1])


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
    """A server's process; it takes part in the last `rounds` rounds."""

    backend: str
    rounds: int
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    held: socket.socket | None = None  # bound to the port, so that nobody else is given it before the server listens

    def implementations(self) -> set[str]:
        """The implementations of our decode that ran in this server, such as "native on sm_90"."""
        return {f"{choice} on {where}" for where, choice in CHOICE.findall(self.log.read_text())}


def in_server() -> None:
    """Entry point for vLLM's plugins, called in each process of a server: random weights, and our backend."""
    from mla_suite.integrations import plugins

    use_random_weights()
    plugins.vllm()


def on_cpu() -> None:
    """The same for our server on a CPU, where vLLM takes no backend but CPU_MLA: that name is ours then."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    in_server()
    register_backend(AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.CUSTOM.get_path())


def save_model(folder: Path, layers: int, heads: int, loads: Sequence[Load]) -> Path:
    """A model's folder: its config.json, and a tokenizer of one word per token.

    vLLM refuses a text with more characters than the longest words could have, spaces not counted, so one word is long.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_config(folder, "v3", layers, heads, max(load.input + load.output for load in loads) + PAGE)
    vocabulary = {UNKNOWN: 0, **{f"w{token}": token for token in range(1, VOCAB)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False).save_pretrained(folder)
    return folder


def environment(folder: Path, backend: str) -> dict[str, str]:
    """Variables of a server's processes, which find the plugins by an entry of `folder`, as if they were installed."""
    install(folder, "bench_vllm_server", "vllm.general_plugins", PLUGINS)
    variables = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork could not use a GPU that a plugin's import has looked for
        **os.environ,
    }
    path = [part for part in variables.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, [str(folder), str(Path(__file__).parent), *path])),
        "PYTHONUNBUFFERED": "1",
        "VLLM_PLUGINS": "bench_on_cpu" if backend == OURS and not ON_GPU else "bench_in_server",
        "MLA_SUITE_LOG": "dispatch",
    }


def start(name: str, model: Path, logs: Path, servers: int, options: argparse.Namespace) -> Server:
    """Start a server; it is not up when this returns."""
    backend, _, rounds = name.partition(":")
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server sets it too, and may listen then
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
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
        # With a size for the cache vLLM need not measure the memory that is free, of which other servers take theirs.
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
    return Server(backend, int(rounds or options.rounds), process, port, log, held)


def wait_until_up(server: Server, end: float) -> None:
    import requests

    while True:
        with contextlib.suppress(requests.ConnectionError, requests.Timeout):
            if requests.get(f"http://127.0.0.1:{server.port}/health", timeout=5).ok:
                return
        if server.process.poll() is not None or time.monotonic() > end:
            state = "ended" if server.process.poll() is not None else "is not up"
            raise SystemExit(
                f"{server.log.read_text()[-4000:]}\n{server.backend}: the server {state}; its log is above"
            )
        time.sleep(0.2)


@contextlib.contextmanager
def running(options: argparse.Namespace, model: Path) -> Iterator[list[Server]]:
    """All servers, up; they are stopped at the end, whatever ends it."""
    logs, names = (options.logs or model).absolute(), options.backends.split(",")
    logs.mkdir(parents=True, exist_ok=True)
    servers: list[Server] = []
    began = time.monotonic()
    try:
        for name in names:
            servers.append(start(name, model, logs, len(names), options))
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    backends = f"{OURS},{PEER},TRITON_MLA:1" if ON_GPU else f"{OURS},{OWN_ON_CPU}"
    usual = "32x1024x256,32x4096x256,128x1024x256"
    parser.add_argument("--backends", default=backends, help="vLLM's names; NAME:1: in the last round alone")
    parser.add_argument(
        "--loads",
        type=lambda text: [Load.parse(part) for part in text.split(",")],
        default=usual,
        help=f"concurrency x input tokens x output tokens, comma-separated (default: {usual})",
    )
    parser.add_argument("--rounds", type=int, default=3, help="of every load (default: 3)")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default: 32)")
    parser.add_argument("--heads", type=int, default=128, help="attention heads (default: 128)")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--csv", type=writable, help="write a row for every backend, load and round here, as they come")


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
    warm = Load(max(load.concurrency for load in options.loads), min(256, options.loads[0].input), STREAM_INTERVAL)
    for server in servers:
        run_load(server, model, warm, seed=len(options.loads))
    for turn in range(options.rounds):
        for seed, load in enumerate(options.loads):
            for server in servers:
                if turn < options.rounds - server.rounds:
                    continue
                result = run_load(server, model, load, seed)
                times = {field: result[name] for field, name in zip(FIELDS, TIMES, strict=True)}
                yield {"backend": server.backend, **asdict(load), "round": turn, **times}


def summary(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each load and backend, with its medians and their ratio to the peer's."""
    found = medians(rows, (*SIZES, "backend"), FIELDS)
    for (*load, _), row in found.items():
        peer = found.get((*load, AGAINST))
        yield row | {"ratio": row["tokens_per_s"] / peer["tokens_per_s"] if peer else float("nan")}


def check(servers: Sequence[Server], on_gpu: bool = ON_GPU) -> int:
    """Says what ran our decode; 1 if it did not run in our server, ran in another, or steps were not in CUDA graphs."""
    status = 0
    for server in servers:
        found = server.implementations()
        graphs = ", without CUDA graphs" if on_gpu and CAPTURED not in server.log.read_text() else ""
        print(f"{server.backend}: our decode {'was ' + ', '.join(sorted(found)) if found else 'did not run'}{graphs}")
        status |= bool(found) != (server.backend == OURS) or bool(graphs)
    return int(status)


def main(options: argparse.Namespace) -> int:
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    facts = {"versions": versions(), "layers": options.layers, "heads": options.heads}
    print(versions(), f"{options.layers} layers, {options.heads} heads", sep="; ", flush=True)
    rows, kept = list[Row](), Table(options.csv, shown=("round", "seconds", *SHOWN))
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder), options.layers, options.heads, options.loads)
        with running(options, model) as servers:
            for row in measure(servers, model, options):
                rows.append(row)
                kept.add(row | facts)
            status = check(servers)
    table = Table(None, shown=(*SHOWN, "ratio"))
    for row in summary(rows):
        table.add(row)
    return status
