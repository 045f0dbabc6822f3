"""Install the wheel of a folder where no compiler, ninja or checkout can be found, and decode from it: `tox -e wheel`.

pip and the programs below have a PATH of this interpreter's folder alone, which must hold no build tool. The programs
run elsewhere, with a cache of their own; decode fails if it starts a program, since a compiler may lie anywhere.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distribution, distributions
from pathlib import Path

ARCHS = {"gfx942", "gfx950", "sm_90"}
LIMIT = 44_500_000  # bytes, of which the objects of all archs take 39.2 million
TOOLS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "hipcc", "amdclang++", "nvcc", "ptxas", "zig", "ninja", "git")
PACKAGES = re.compile(r"ninja|ziglang|nvidia[-_](cuda[-_]nvcc|nvvm|cuda[-_]crt).*")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

DECODE = """
import os, sys
def refuse(event, given):
    if event in ("subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system"):
        raise RuntimeError(f"the wheel's code started a program: {event} {given}")
sys.addaudithook(refuse)

import mla_suite
from mla_suite.build import manifest

assert mla_suite.__file__.startswith(sys.prefix), f"another copy was imported: {mla_suite.__file__}"
for entry in manifest.installed().kernels.values():
    entry.read_object()  # which compares its hash
"""
CHECK = """
import torch
from mla_suite.testing import exact_decode, ulp

torch.manual_seed(0)
q, kv_cache = torch.randn(2, 1, 16, 576).bfloat16(), torch.randn(8, 16, 576).bfloat16()
seq_lens = torch.tensor([50, 7], dtype=torch.int32)
block_table = torch.randperm(8).int().view(2, 4)
call = (q, kv_cache, seq_lens, block_table)
exact = exact_decode(*call, softmax_scale=192**-0.5)
def check(where, backend):
    answer = str(mla_suite.explain("decode", *call, softmax_scale=192**-0.5)).splitlines()[0]
    assert f"-> {backend}" in answer, answer
    out, lse = mla_suite.decode(*call, softmax_scale=192**-0.5)
    allowed = 2.0**-8 * exact.magnitude + ulp(exact.out, out.dtype)
    assert bool(((out.double() - exact.out).abs() <= allowed).all()), where
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-4, atol=1e-4)
    print(f"decoded on {where}: {answer}")
check("the CPU", "reference")
for arch in ("gfx942", "gfx950"):
    with mla_suite.emulate(arch):
        check(arch, "native")
"""
"""Decodes by the module `mla_suite` on the CPU and in the emulator."""
EXPLAIN = ("explain", "decode", "--on", "sm_90", "--batch", "32", "--heads", "128", "--kv", "4096")


def find(folder: Path) -> Path:
    """The one wheel of the folder. It holds the objects of every arch, and nothing that its manifest does not name."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        manifest = json.loads(packed.read("mla_suite/objects/manifest.json"))
        kernels = manifest["kernels"]
        named = {row[part] for row in kernels for part in ("object", "text") if row[part]}
        named |= {"manifest.json", *(library["file"] for library in manifest["libraries"].values())}
        objects = "mla_suite/objects/"
        held = {name.removeprefix(objects) for name in packed.namelist() if name.startswith(objects)}
    assert {row["arch"] for row in kernels} == ARCHS, "a wheel carries the objects of every arch"
    assert held == named, f"in the wheel or in its manifest, not in both: {sorted(held ^ named)}"
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {len(kernels)} kernels")
    return wheel


def main(folder: Path) -> None:
    wheel = find(folder)
    place = Path(sys.executable).parent
    tools = [tool for tool in TOOLS if shutil.which(tool, path=str(place))]
    packages = [found.name for found in distributions() if PACKAGES.fullmatch(found.name)]
    assert not tools + packages, f"this environment must lack {', '.join(tools + packages)}"
    passed_on = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as elsewhere:

        def python(*words: str) -> str:
            environment = passed_on | {"PATH": str(place), "XDG_CACHE_HOME": elsewhere}
            command = [sys.executable, *words]
            done = subprocess.run(command, cwd=elsewhere, env=environment, stdout=subprocess.PIPE, text=True)
            print(done.stdout, end="", flush=True)
            assert done.returncode == 0, f"{' '.join(words[:4])} ended with status {done.returncode}"
            return done.stdout

        for version in PYTHONS:
            alone = ("--quiet", "--no-deps", "--no-index", "--dry-run", "--target", elsewhere, "--only-binary=:all:")
            python("-m", "pip", "install", *alone, "--python-version", version, str(wheel))
        python("-m", "pip", "uninstall", "--quiet", "--yes", "mla_suite")  # of an earlier run
        python("-m", "pip", "install", "--quiet", str(wheel))
        python("-c", DECODE + CHECK)
        assert "decode on sm_90 -> native (sm_90)" in python("-m", "mla_suite", *EXPLAIN)
    files = distribution("mla_suite").files
    assert files is not None, "pip leaves a list of the files that it installs"
    unpacked = sum(path.size or 0 for path in files)
    assert unpacked <= LIMIT, f"the wheel unpacks to {unpacked} bytes; at most {LIMIT} are allowed"
    print(f"{unpacked / 1e6:.1f} MB unpacked; installed and run without a compiler")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the wheel")
    main(parser.parse_args().folder.resolve())
