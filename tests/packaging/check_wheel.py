"""Build the wheel, install it into a fresh environment and run one operator from an unrelated directory.

usage: python tests/packaging/check_wheel.py WORK_DIRECTORY
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PROGRAM = """
import torch, mla_suite
out, lse = mla_suite.combine(torch.ones(2, 16, 512), torch.zeros(2, 16), num_splits=2, out_dtype=torch.float32)
assert torch.equal(out, torch.ones(1, 16, 512)), out
print("combine ran from", mla_suite.__file__)
"""


def main(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    dist = work / "dist"
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(dist), "."], check=True)
    (wheel,) = dist.glob("mla_suite-*.whl")
    environment = work / "environment"
    venv.create(environment, clear=True, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "torch==2.13.0"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        subprocess.run([python, "-c", PROGRAM], cwd=elsewhere, check=True)
        subprocess.run([python, "-m", "mla_suite", "kernels"], cwd=elsewhere, check=True)
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, installed and run")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
