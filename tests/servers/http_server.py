"""A server in a process of its own, on a free port of this machine."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import requests

START_LIMIT_S = 240
STOP_LIMIT_S = 240  # on two busy cores SGLang took more than the 60 s that it had before


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[str]:
    """The address of the server that `command` starts in `folder`, while it runs. `folder` gets its log."""
    with socket.socket() as held:
        # A port that is bound is given to nobody else; a server, which sets this option too, may listen on it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        log, command = folder / "server.log", [*command, "--port", str(port)]
        with log.open("w") as out:
            # `-m` looks in the working directory first, and the root of an editable checkout names plugins of its own.
            process = subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + START_LIMIT_S
            while not _answers(address):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_LIMIT_S)
            finally:
                process.kill()  # one that does not end fails its test, and is not in the way of the next


def _answers(address: str) -> bool:
    try:
        return requests.get(f"{address}/health", timeout=5).ok
    except requests.RequestException:
        return False


def complete(address: str, prompt: list[int], stream: bool = False, **options: object) -> list[int]:
    """The tokens that follow a prompt, by a request of OpenAI's API to the model `tiny`."""
    body = dict(model="tiny", prompt=prompt, temperature=0, ignore_eos=True, return_token_ids=True, stream=stream)
    reply = requests.post(f"{address}/v1/completions", json=body | options, timeout=120, stream=stream)
    assert reply.ok, reply.text
    if not stream:
        return reply.json()["choices"][0]["token_ids"]
    events = [line[len(b"data: ") :] for line in reply.iter_lines() if line]
    assert events.pop() == b"[DONE]"
    return [token for event in events for token in json.loads(event)["choices"][0]["token_ids"] or []]
