"""Install the torch build of one ROCm version and this package, or say in a sentence why it cannot be had here.

The build is named by its local version (torch==2.9.1+rocm6.4); point pip at an index that carries it, for example with
PIP_EXTRA_INDEX_URL. The exit status is 77 where none does, which tox shows as SKIP (toxfile.py).
"""

import argparse
import subprocess
import sys

from skip import skip


def main(rocm: str, torch: str) -> int:
    build = f"torch=={torch}+rocm{rocm}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    if subprocess.run([*pip, build]).returncode:
        return skip(f"{build} is on none of this machine's package indexes; set PIP_EXTRA_INDEX_URL to one that has it")
    subprocess.run([*pip, "-e", ".[test,bench,hf]"], check=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rocm", metavar="ROCM_VERSION")
    parser.add_argument("torch", metavar="TORCH_VERSION")
    sys.exit(main(**vars(parser.parse_args())))
