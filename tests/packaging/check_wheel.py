"""Build the wheel, install it into a fresh environment and run one operator from an unrelated directory.

usage: python tests/packaging/check_wheel.py WORK_DIRECTORY
"""

import json
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ARCHS = {"gfx942", "gfx950", "sm_90"}

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
    with zipfile.ZipFile(wheel) as packed:
        unpacked = sum(item.file_size for item in packed.infolist())
        built = json.loads(packed.read("mla_suite/objects/manifest.json"))["kernels"]
    assert {row["arch"] for row in built} == ARCHS, "a wheel carries the objects of every arch"
    assert unpacked <= 30_000_000, f"the wheel unpacks to {unpacked} bytes"
    environment = work / "environment"
    venv.create(environment, clear=True, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "torch==2.13.0"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        subprocess.run([python, "-c", PROGRAM], cwd=elsewhere, check=True)
        subprocess.run([python, "-m", "mla_suite", "kernels"], cwd=elsewhere, check=True)
    size = wheel.stat().st_size / 1e6
    print(f"{wheel.name}: {size:.1f} MB, {unpacked / 1e6:.1f} MB unpacked, {len(built)} kernels; installed and run")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
