"""The servers that bench_vllm_server.py puts under load: vLLM's own with a random model, each with another backend."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm_decode import OURS, VOCAB, save_config, use_random_weights

PLUGINS = {"bench_in_server": "vllm_servers:in_server", "bench_on_cpu": "vllm_servers:on_cpu"}
ON_GPU = torch.cuda.is_available()
OWN_ON_CPU = "CPU_MLA"
ROW_BYTES, PAGE = 576 * (2 if ON_GPU else 4), 64
MEMORY = 0.85  # of the GPU, for all servers together
STREAM_INTERVAL = 8  # tokens per streamed event, so that neither server nor load generator waits for Python
START_LIMIT_S, STOP_LIMIT_S = 300, 30
UNKNOWN = "a-word-that-is-not-known"
CAPTURED = "Graph capturing finished"  # a line of vLLM's
CHOICE = re.compile(r"decode \w*Problem.* on (\S+) -> (\w+)")  # a line of MLA_SUITE_LOG=dispatch


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

    def has_graphs(self) -> bool:
        return CAPTURED in self.log.read_text()


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

    save_config(folder, layers, heads, max(load.input + load.output for load in loads) + PAGE)
    vocabulary = {UNKNOWN: 0, **{f"w{token}": token for token in range(1, VOCAB)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False).save_pretrained(folder)
    return folder


def environment(folder: Path, backend: str) -> dict[str, str]:
    """Variables of a server's processes, which find the plugins by an entry of `folder`, as if they were installed."""
    installed = folder / "bench_vllm_server-0.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: bench_vllm_server\nVersion: 0\n")
    lines = ["[vllm.general_plugins]", *(f"{name} = {place}" for name, place in PLUGINS.items()), ""]
    (installed / "entry_points.txt").write_text("\n".join(lines))
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
