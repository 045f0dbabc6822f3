"""Check the installed wheel, from a directory without the sources: its objects, its size, and that an operator runs.

usage: python tools/check_wheel.py
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import distribution

ARCHS = {"gfx942", "gfx950", "sm_90"}
LIMIT = 30_000_000

PROGRAM = """
import torch, mla_suite
out, lse = mla_suite.combine(torch.ones(2, 16, 512), torch.zeros(2, 16), num_splits=2, out_dtype=torch.float32)
assert torch.equal(out, torch.ones(1, 16, 512)), out
print("combine ran from", mla_suite.__file__)
"""


def main() -> None:
    installed = distribution("mla_suite")
    assert installed.read_text("direct_url.json") is None or "editable" not in installed.read_text("direct_url.json")
    manifest = next(path for path in installed.files if path.match("mla_suite/objects/manifest.json"))
    built = json.loads(manifest.locate().read_text())["kernels"]
    assert {row["arch"] for row in built} == ARCHS, "a wheel carries the objects of every arch"
    unpacked = sum(path.size or 0 for path in installed.files)
    assert unpacked <= LIMIT, f"the wheel unpacks to {unpacked} bytes; at most {LIMIT} are allowed"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as elsewhere:
        for command in (["-c", PROGRAM], ["-m", "mla_suite", "kernels"]):
            subprocess.run([sys.executable, *command], cwd=elsewhere, env=environment, check=True)
    print(f"{unpacked / 1e6:.1f} MB unpacked, {len(built)} kernels; installed and run")


if __name__ == "__main__":
    main()
