"""Checks our objects and our driver against one ROCm user space, without a GPU.

comgr reads every object of the archs it knows; our driver's calls, enums and handles are compiled against its headers;
the library lies where HipDriver looks for one; our stub's words are the library's; and HipDriver on the real library
says what to do without a GPU. --record writes the row of docs/rocm.md. The exit status is 77, with a sentence, where
the packages cannot be had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import debian_space
import rocm_matrix
from skip import skip
from virtual_hip import user_space

from mla_suite import archs
from mla_suite.build import manifest
from mla_suite.launch import hip
from mla_suite.launch.driver import DriverError, TorchDevice

HERE = Path(__file__).resolve().parent
STUBS = HERE.parent / "tests" / "stubs"
ARCHS = {"hip57": "gfx942", "hip64": "gfx942,gfx950", "hip72": "gfx942,gfx950"}
CODES = [100, 101, 201, 700, 900, 999, 4242, -1]  # hipError_t: those of our stub, and two of nothing


def main(name: str, record: bool = False) -> int:
    try:
        folder = debian_space.fetch(name)
    except debian_space.Unavailable as error:
        return skip(str(error))
    library = user_space.hip_library(folder)
    comgr = next(library.parent.glob("libamd_comgr.so.[0-9]"))
    done = _inside(folder, str(HERE / "comgr_check.py"), str(comgr), ARCHS[name])
    if done.returncode:
        return 1
    counts = json.loads(done.stdout)
    searched = [folder / place.relative_to("/") for place in hip.SEARCHED]
    if Path(hip.find_library(torch_lib=folder / "no torch", sdk=searched)).parent != library.parent:
        print(f"{name}: our driver does not look where Debian has {library.name}", file=sys.stderr)
        return 1
    stub = _compile_stub(folder)
    if stub is None or _inside(folder, __file__, "--inside", str(library), str(stub)).returncode:
        return 1
    checked = ", ".join(f"{count} objects of {arch}" for arch, count in counts["objects"].items())
    instructions = sum(counts["instructions"].values())
    summary = f"comgr accepts {checked}; {instructions:,} instructions read as the build wrote them, 0 unknown"
    named = debian_space.named(name, folder)
    print(f"{name} ({', '.join(named)}): {summary}; headers, error words and the sentence without a GPU are right")
    if record:
        rocm_matrix.put(name, named, f"{summary}; driver against headers, error words, no-GPU sentence")
    return 0


def _inside(folder: Path, *program: str) -> subprocess.CompletedProcess[str]:
    command = user_space.command(folder, [sys.executable, *program])
    return subprocess.run(command, stdout=subprocess.PIPE, text=True)


def _compile_stub(folder: Path) -> Path | None:
    """The stub and its static_asserts against this version's headers; None where the compiler says they differ."""
    out = Path(tempfile.mkdtemp(prefix="mla_suite-stub-")) / "libamdhip64.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-D__HIP_PLATFORM_AMD__", f"-I{folder / 'usr/include'}"]
    command = [sys.executable, "-m", "ziglang", "cc", *flags, str(STUBS / "libamdhip64.c"), "-o", str(out)]
    return None if subprocess.run(command).returncode else out


def inside(library: str, stub: str) -> int:
    """In a process of the user space: the library's words and errors."""
    real, ours = hip.open_library(library), hip.open_library(stub)
    for code in CODES:
        said = [(opened.hipGetErrorName(code), opened.hipGetErrorString(code)) for opened in (real, ours)]
        if said[0] != said[1]:
            print(f"of error {code} the library says {said[0]}, our stub {said[1]}", file=sys.stderr)
            return 1
    driver = hip.HipDriver(archs.get("gfx942"), 0, real, TorchDevice(lambda: 0, lambda _: 0, lambda _: nullcontext()))
    if driver.explain(4242) != "HIP error 4242, which this runtime has no words for":
        print(f"an unknown error is explained as {driver.explain(4242)}", file=sys.stderr)
        return 1
    entry = next(entry for (arch, _), entry in manifest.installed().kernels.items() if arch == "gfx942")
    try:
        driver.load(entry)
    except DriverError as error:
        if "no AMD GPU is visible to the HIP runtime" in str(error):
            return 0
        print(f"without a GPU the driver says: {error}", file=sys.stderr)
    else:
        print("a kernel was loaded without a GPU", file=sys.stderr)
    return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(inside(*sys.argv[2:]))
    parser.add_argument("name", choices=ARCHS)
    parser.add_argument("--record", action="store_true", help="write the row of docs/rocm.md")
    sys.exit(main(**vars(parser.parse_args())))
