"""The compilers that make code objects on this machine, and the commands they are given.

An AMD object is made in the same three steps by every compiler: source -> assembly -> relocatable -> code object. The
assembly ships beside the object: the text that is read, budgeted and emulated is the one that runs.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mla_suite.build import wait_states
from mla_suite.build.locations import BuildError

MAX_TRIES = 10_000_000
"""Tries of a wait of a debug build. One takes a microsecond or less, so the trap comes after some seconds. In a sound
program a wait takes so long only where the previous kernel of the stream does."""

PINNED_ZIGLANG = "0.17.0"
"""The ziglang wheel whose objects CI checks for missing wait states. Those of other compilers are checked when made."""
OLDEST_LLVM = 22
"""That wheel's LLVM. LLVM 20 and 21 spill registers of some kernels, which no budget allows."""

_SDK = Path("/opt/rocm")

# -mcode-object-version=5: ROCm 6 and 7 both load it; the compiler's default is 6.
# -gline-directives-only: an assembly text names the source of each instruction, without DWARF, a third of its size.
# -fuse-cuid=none, -fdebug-compilation-dir: the same bytes from any directory.
# -mno-amdgpu-ieee with -fno-honor-nans: without them every fmax costs a canonicalising v_max per operand. With them the
#   compiler assumes that no operand is NaN.
_HIP_FLAGS = [
    *("-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-nostdinc", "-std=c++17", "-O3"),
    *("-mcode-object-version=5", "-fuse-cuid=none", "-gline-directives-only", "-fdebug-compilation-dir=."),
    *("-fno-exceptions", "-fno-rtti", "-Wall", "-Werror=return-type", "-fno-honor-nans", "-mno-amdgpu-ieee"),
]


@dataclass(frozen=True)
class AmdCompiler:
    """A clang with the AMDGPU backend and the lld beside it. `clang` and `lld` are command prefixes."""

    clang: tuple[str, ...]
    lld: tuple[str, ...]
    version: str
    pinned: bool = False

    @property
    def llvm(self) -> int:
        """The major number of its LLVM; 0 where the version has none."""
        number = re.search(r"version (\d+)", self.version)
        return int(number[1]) if number else 0

    def to_assembly(self, arch: str) -> list[str]:
        """Command that compiles HIP to assembly; source, output, include and -D flags follow it."""
        return [*self.clang, *_HIP_FLAGS, f"--offload-arch={arch}"]

    def to_relocatable(self, arch: str) -> list[str]:
        """Command that assembles; `text -o relocatable` follows it."""
        return [*self.clang, "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-mcode-object-version=5", "-c"]

    def unknown(self, archs: Sequence[str]) -> list[str]:
        """The names in `archs` that this compiler is too old for."""
        probe = ["-nogpulib", "-x", "c", "-fsyntax-only", os.devnull]
        commands = {arch: [*self.clang, "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", *probe] for arch in archs}
        return [arch for arch, command in commands.items() if subprocess.run(command, capture_output=True).returncode]

    def to_object(self) -> list[str]:
        """Command that links; `relocatable -o object` follows it. Source lines are in the text, shipped beside it."""
        return [*self.lld, "-m", "elf64_amdgpu", "-shared", "--no-undefined", "--strip-debug"]


@dataclass(frozen=True)
class NvidiaCompiler:
    """nvcc. `-Xptxas -v` prints the resources, which the manifest reports.

    With `debug` a kernel's waits end in a trap after MAX_TRIES tries (csrc/sm_90/spin_limit.hpp). The calls that report
    it make ptxas spill registers and run one wgmma after the other.
    """

    nvcc: str
    version: str
    debug: bool = False

    def for_debugging(self) -> NvidiaCompiler:
        """This compiler, whose version tells the manifest that its objects are no release objects."""
        return NvidiaCompiler(self.nvcc, f"{self.version}, debug", debug=True)

    def to_object(self, arch: str) -> list[str]:
        """Command that compiles CUDA to a cubin; source, output, include and -D flags follow it."""
        number = arch.removeprefix("sm_")
        return [
            self.nvcc,
            # The "a" set of an arch holds wgmma and TMA; its objects run on that arch alone.
            f"-gencode=arch=compute_{number}a,code=sm_{number}a",
            "-cubin",
            "-std=c++17",
            "-O3",
            "-Xptxas",
            "-v,--warn-on-spills",
            *([f"-DMLA_MAX_TRIES={MAX_TRIES}"] if self.debug else []),
        ]


def find_amd(rocm: Path | None = None, archs: Sequence[str] = ()) -> AmdCompiler:
    """The AMD compiler: `rocm` when named, else an installed ROCm, else the ziglang wheel.

    `rocm` is a ROCm root, or the path of one clang program. An installed ROCm is passed over with a sentence on stderr
    if it is too old for one of `archs`, has an LLVM before OLDEST_LLVM, cannot be run, or its objects cannot be checked
    here (`wait_states`). BuildError says what is missing.
    """
    found = _found_amd(rocm, archs)
    if not found.pinned:
        wait_states.need_checker(found.version)
    return found


def _found_amd(rocm: Path | None, archs: Sequence[str]) -> AmdCompiler:
    if rocm is not None:
        try:
            found = _clang_of(rocm)
        except BuildError as error:
            raise BuildError(f"--rocm {rocm}: {error}") from error
        if found is None:
            raise BuildError(f"--rocm {rocm}: no amdclang++, hipcc or clang++ with an lld beside it is there")
        too_new = found.unknown(archs)
        if too_new:
            raise BuildError(
                f"--rocm {rocm}: {found.version} does not know {', '.join(too_new)}; name a newer one, "
                "or leave these out with --arch"
            )
        return found
    try:
        installed = installed_rocm()
        too_new = installed.unknown(archs) if installed is not None else []
    except BuildError as error:
        return _instead(str(error))
    if installed is None:
        return packaged()
    if too_new:
        return _instead(f"{installed.version} does not know {', '.join(too_new)}")
    if installed.llvm < OLDEST_LLVM:
        return _instead(f"{installed.version} has an LLVM before {OLDEST_LLVM}, which spills registers of some kernels")
    if not wait_states.CHECKER.is_file():
        return _instead(f"objects of {installed.version} cannot be checked for missing wait states here")
    return installed


def _instead(why: str) -> AmdCompiler:
    """The packaged compiler in place of an installed ROCm; `why` explains what that one lacks."""
    try:
        found = packaged()
    except BuildError:
        raise BuildError(
            f"{why}, and there is no ziglang wheel; `pip install ziglang` or name a ROCm with --rocm"
        ) from None
    print(f"{why}: {found.version} of the ziglang wheel is used", file=sys.stderr)
    return found


def packaged() -> AmdCompiler:
    """The clang of the ziglang wheel. BuildError when it is not installed."""
    program = zig()
    if program is None:
        raise BuildError(
            "no AMD compiler: no ROCm under /opt/rocm or on PATH and no ziglang wheel; "
            "`pip install ziglang` or name a ROCm with --rocm"
        )
    pinned = PINNED_ZIGLANG in {wheel.version for wheel in metadata.distributions(name="ziglang")}
    return AmdCompiler((program, "clang"), (program, "ld.lld"), _first_line([program, "clang"]), pinned)


def zig() -> str | None:
    """The program of the ziglang wheel, or None when it is not installed."""
    wheel = importlib.util.find_spec("ziglang")
    return None if wheel is None or wheel.origin is None else str(Path(wheel.origin).parent / "zig")


def installed_rocm() -> AmdCompiler | None:
    """The compiler of the ROCm on PATH or under /opt/rocm, or None. BuildError for a hipcc that cannot serve."""
    on_path = shutil.which("amdclang++") or shutil.which("hipcc")
    for place in ([Path(on_path).resolve().parent.parent, Path(on_path)] if on_path else []) + [_SDK]:
        found = _clang_of(place)
        if found is not None:
            return found
    return None


def _clang_of(place: Path) -> AmdCompiler | None:
    """The clang and lld of a ROCm root, of a hipcc, or of one clang program (`clang-19` goes with `ld.lld-19`)."""
    hipcc = place / "bin/hipcc"
    if place.is_file() and place.name.startswith("hipcc"):
        return _clang_of_hipcc(place)
    if place.is_file():
        suffix = re.search(r"-\d+$", place.name)
        clangs, folders = [place], [place.parent, place.resolve().parent]
        linker = "ld.lld" + (suffix.group() if suffix else "")
    else:
        clangs = [place / "llvm/bin/amdclang++", place / "bin/amdclang++", place / "llvm/bin/clang++"]
        folders, linker = [place / "llvm/bin", place / "lib/llvm/bin"], "ld.lld"
    for clang, folder in itertools.product(clangs, folders):
        if clang.is_file() and (folder / linker).is_file():
            return AmdCompiler((str(clang),), (str(folder / linker),), _first_line([str(clang)]))
    return _clang_of_hipcc(hipcc) if hipcc.is_file() else None


def _clang_of_hipcc(hipcc: Path) -> AmdCompiler:
    """The clang that a hipcc calls. hipcc itself adds flags of its own, which the three steps of a build cannot have.

    BuildError when its hipconfig does not name that clang, or no lld lies beside it.
    """
    hipconfig = hipcc.with_name(hipcc.name.replace("hipcc", "hipconfig"))
    question = [str(hipconfig), "--hipclangpath"]
    amd = {**os.environ, "HIP_PLATFORM": "amd"}  # beside a CUDA it may name that one's folder
    try:
        done = subprocess.run(question, env=amd, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{hipcc} has no hipconfig beside it that names its clang ({error})") from error
    folder = Path(done.stdout.strip())
    clang, lld = folder / "clang++", folder / "ld.lld"
    if not clang.is_file():
        raise BuildError(f"{hipconfig} names {folder} as the folder of its clang, which has no clang++")
    if not lld.is_file():
        raise BuildError(f"{hipcc} compiles with {clang}, which has no ld.lld beside it; install the lld of that LLVM")
    return AmdCompiler((str(clang),), (str(lld),), _first_line([str(clang)]))


def find_nvidia(nvcc: Path | None = None) -> NvidiaCompiler | None:
    """The nvcc for sm_90: the one named, else of CUDA_HOME, of the PyPI wheels, on PATH, in /usr/local/cuda.

    `nvcc` is a CUDA root or the path of one nvcc. The wheels come before the machine's own, so every machine makes the
    same objects. A candidate that is older than CUDA 12, with which sm_90a begins, or that cannot compile here is
    passed over with a sentence on stderr; None when no candidate is left. BuildError when the named one cannot serve.
    """
    if nvcc is not None:
        program = next((path for path in (nvcc / "bin/nvcc", nvcc) if path.is_file()), None)
        if program is None:
            raise BuildError(f"--nvcc {nvcc}: there is no nvcc; name a CUDA root or the path of an nvcc")
        return _checked_nvcc(program)
    home = os.environ.get("CUDA_HOME")
    on_path, in_cuda = shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin")
    candidates = [Path(home, "bin/nvcc")] if home else []
    candidates += [path for path in (_nvcc_of_wheel(), on_path and Path(on_path), in_cuda and Path(in_cuda)) if path]
    for program in candidates:
        try:
            return _checked_nvcc(program)
        except BuildError as error:
            print(f"{error}; this nvcc is passed over", file=sys.stderr)
    return None


def _nvcc_of_wheel() -> Path | None:
    """The nvcc of the `nvidia-cuda-nvcc` wheel, or None when it is not installed.

    The wheels of one CUDA version share a folder without a module of its own, which imports cannot find.
    """
    folders = (Path(entry or ".", "nvidia/cu13/bin/nvcc") for entry in sys.path)
    return next((path.absolute() for path in folders if path.is_file()), None)


def _checked_nvcc(program: Path) -> NvidiaCompiler:
    """The compiler at `program`, tried on a small source. BuildError says why it cannot build sm_90."""
    release = re.search(r"V((\d+)[\d.]*)", _version([str(program)]))
    if release is None:
        raise BuildError(f"{program} does not say which CUDA release it is of")
    if int(release.group(2)) < 12:
        raise BuildError(f"{program} is of CUDA {release.group(1)}; sm_90 needs CUDA 12 or newer")
    compiler = NvidiaCompiler(str(program), f"nvcc {release.group(1)}")
    with tempfile.TemporaryDirectory() as folder:
        # __ldg comes from headers, which must be of nvcc's release.
        Path(folder, "probe.cu").write_text("__global__ void probe(const int* p, int* q) { *q = __ldg(p); }\n")
        probe = [*compiler.to_object("sm_90"), f"{folder}/probe.cu", "-o", f"{folder}/probe.cubin"]
        done = subprocess.run(probe, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise BuildError(
            f"{program} cannot compile here ({said}); it needs a gcc that it accepts, with C++, and the wheels "
            "nvidia-nvvm, nvidia-cuda-crt and nvidia-cuda-runtime of its release beside it if it came as a wheel"
        )
    return compiler


def _first_line(command: list[str]) -> str:
    """The name that the compiler prints for itself. BuildError when it cannot be run."""
    return _version(command).splitlines()[0]


def _version(command: list[str]) -> str:
    try:
        done = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"the compiler {command[0]} cannot be run: {error}") from error
    if not done.stdout.strip():
        raise BuildError(f"the compiler {command[0]} cannot be run: it does not say its version")
    return done.stdout.strip()
