"""Prints how many lines of code and documents each part of this repository has.

Counted are the files that git tracks, of Python, C, C++, CUDA, HIP, Markdown and TOML.
"""

import argparse
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".hip", ".md", ".toml"}
PARTS = {
    "mla_suite + ops": ("mla_suite/", "ops/"),
    "tools": ("tools/",),
    "benchmarks": ("benchmarks/",),
    "tests": ("tests/",),
    "csrc": ("csrc/",),
}


def counts(root: Path = ROOT) -> dict[str, int]:
    """Lines by part. A link that git tracks, as mla_suite/ops, is no file of its own."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    found = dict.fromkeys(PARTS, 0)
    for name in filter(None, listed.split("\0")):
        path = root / name
        if path.suffix in SUFFIXES and path.is_file():
            for part, folders in PARTS.items():
                if name.startswith(folders):
                    found[part] += len(path.read_bytes().splitlines())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for part, lines in counts().items():
        print(f"{part:16}{lines:8,} lines")
