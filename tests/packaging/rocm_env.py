"""Run the suite with the torch build of one ROCm version; exit with 77 and a sentence where it cannot be had.

usage: python tests/packaging/rocm_env.py ROCM_VERSION TORCH_VERSION

The build is named by its local version (torch==2.9.1+rocm6.4); point pip at an index that carries it, for example with
PIP_EXTRA_INDEX_URL. Without a GPU the suite's AMD kernels run in the emulator, as everywhere.
"""

import subprocess
import sys

from skip import skip


def main(rocm: str, torch: str) -> int:
    build = f"torch=={torch}+rocm{rocm}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    if subprocess.run([*pip, build]).returncode:
        return skip(f"{build} is on none of this machine's package indexes; set PIP_EXTRA_INDEX_URL to one that has it")
    subprocess.run([*pip, "-e", ".[test,bench,hf]"], check=True)
    return subprocess.run([sys.executable, "-m", "pytest", "tests"]).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
