"""Build the code objects: gfx942 and gfx950 with ROCm's clang or the ziglang wheel, sm_90 with nvcc.

  python -m mla_suite build                                   every arch that has a compiler here
  python -m mla_suite build --arch gfx942 --kernel decode     one kernel of one arch, after a change to it
  python -m mla_suite build --arch gfx942 --rocm /opt/rocm    with ROCm's clang instead of the wheel's
  python -m mla_suite build --arch sm_90                      with the nvcc of CUDA_HOME, the PyPI wheels or the machine
  python -m mla_suite build --nvcc /usr/local/cuda-12.9       with that nvcc: drivers from 525 on load what it makes
  python -m mla_suite build --arch sm_90 --debug              waits end in a trap that names them; again without, after

What is up to date is not compiled again. A kernel that spills, uses scratch memory or exceeds its budget of registers
or LDS (csrc/<arch>/arch.toml) fails the build, with both numbers. So does AMD code without the wait states that the ISA
asks for: this repository's CI checks the objects of the pinned compiler, and a build in a clone those of any other.
`python -m mla_suite kernels` shows what came out.
"""

import argparse
import sys
import time
from pathlib import Path

from mla_suite.build import BuildError, ObjectError, build
from mla_suite.cli import compiling, positive
from mla_suite.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="comma-separated, e.g. gfx942,gfx950,sm_90; default: all with a compiler")
    parser.add_argument("--rocm", type=Path, help="ROCm root, or one clang program, instead of the one found")
    parser.add_argument("--nvcc", type=Path, help="CUDA root, or the path of one nvcc, instead of the one found")
    parser.add_argument("--kernel", help="comma-separated kernel names; objects of the others stay as they are")
    parser.add_argument(
        "--debug", action="store_true", help="NVIDIA kernels whose waits end in a trap after some seconds"
    )
    parser.add_argument("--out", type=folder, help="object folder; default: the package's, else the user's cache")
    parser.add_argument("--jobs", type=positive, help="parallel compilers; default: one per processor")


def folder(text: str) -> Path:
    if not text:  # which Path reads as the working directory
        raise argparse.ArgumentTypeError("it is empty; it takes the path of a folder")
    return Path(text)


def run(arguments: argparse.Namespace) -> int:
    begin = time.monotonic()
    try:
        with compiling() as step:
            manifest = build(
                arguments.arch.split(",") if arguments.arch is not None else None,
                out=arguments.out,
                rocm=arguments.rocm,
                nvcc=arguments.nvcc,
                jobs=arguments.jobs,
                kernels=arguments.kernel.split(",") if arguments.kernel is not None else None,
                debug=arguments.debug,
                progress=step,
            )
    except UsageError:
        raise
    except (BuildError, ObjectError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    counts = {arch: sum(name == arch for name, _ in manifest.kernels) for arch, _ in manifest.kernels}
    made = ", ".join(f"{count} for {arch}" for arch, count in sorted(counts.items())) or "no kernels"
    print(f"{manifest.root}: {made} ({time.monotonic() - begin:.1f} s)")
    return 0
