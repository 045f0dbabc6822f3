"""vLLM's OpenAI-compatible server decodes through our backend on a CPU, and answers over HTTP: `tox -e vllm`."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="this needs vLLM for CPUs: tox -e vllm")

import requests
import vllm_engine
import vllm_engine_plugin

LENGTHS = [5, 40, 17, 33]
START_LIMIT_S = 240
LAYERS = vllm_engine.SHAPE["num_hidden_layers"]


@contextlib.contextmanager
def server(model, folder):
    """The server's address, while it runs. `folder` gets its log and the counts of calls."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--max-model-len": str(vllm_engine.MAX_LEN),
        "--attention-backend": "CPU_MLA",
        "--gpu-memory-utilization": "0.05",  # the name is for CPUs as well
        "--compilation-config": json.dumps(vllm_engine.COMPILATION),
        "--port": str(port),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--skip-tokenizer-init", "--enforce-eager"]
    command += [text for option in options.items() for text in option]
    log = folder / "server.log"
    environment = vllm_engine_plugin.environment(folder)
    with log.open("w") as out:
        # `-m` looks in the working directory first, and the root of an editable checkout names plugins of its own.
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=out)
    try:
        address, end = f"http://localhost:{port}", time.monotonic() + START_LIMIT_S
        while not answers(address):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def answers(address):
    try:
        return requests.get(f"{address}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def test_completions_over_http(tmp_path):
    """Requests that arrive together, then one that streams, give the tokens of transformers."""
    model = vllm_engine.save_model(tmp_path / "model")
    batch = vllm_engine.prompts(LENGTHS)
    expected = [vllm_engine.greedy(model, prompt) for prompt in batch]
    with server(tmp_path / "model", tmp_path) as address:

        def ask(prompt, stream=False):
            body = dict(model="tiny", prompt=prompt, max_tokens=vllm_engine.NEW_TOKENS, temperature=0, ignore_eos=True)
            body |= dict(detokenize=False, return_token_ids=True, stream=stream)
            reply = requests.post(f"{address}/v1/completions", json=body, timeout=120, stream=stream)
            assert reply.ok, reply.text
            return reply

        with ThreadPoolExecutor(len(batch)) as clients:
            replies = [reply.json()["choices"][0]["token_ids"] for reply in clients.map(ask, batch)]
        events = [line[len(b"data: ") :] for line in ask(batch[0], stream=True).iter_lines() if line]
    assert replies == expected
    assert events.pop() == b"[DONE]"
    streamed = [token for event in events for token in json.loads(event)["choices"][0]["token_ids"] or []]
    assert streamed == expected[0]
    (calls,) = vllm_engine_plugin.calls(tmp_path)
    assert len(calls) >= 2 * LAYERS * (vllm_engine.NEW_TOKENS - 1)
