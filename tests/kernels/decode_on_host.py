"""Sources of csrc/sm_90/decode that a CPU can execute.

The headers of tests/kernels/cuda_on_host take the place of sm_90/ptx: they say what each instruction does. Threads are
fibers in an order that changes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from mla_suite.archs import CSRC

HOST = Path(__file__).parent / "cuda_on_host"
DECODE = "sm_90/decode"
INSTRUCTIONS = {
    "producer.hpp": {
        r'asm volatile\("st\.shared\.v4.*?"memory"\);': "st_shared_v4(to, tile.sequence, tile.length, tile.first_key,"
        " tile.end_key);",
        r'asm volatile\("st\.shared\.v2.*?"memory"\);': "st_shared(to + 16, tile.partial_row);"
        " st_shared(to + 20, info);",
    },
    "softmax.hpp": {r'asm\("ex2\.approx.*?\)\);': "y = std::exp2(x); if (y < 0x1p-126f) y = 0.0f;"},
    "convert_fp8.hpp": {
        r'asm\("cvt\.rn\.f16x2\.e4m3x2.*?\)\)\);': "const uint32_t two = stored >> HALF * 16;"
        " pair = float_to_fp16(e4m3_to_float(two)) | float_to_fp16(e4m3_to_float(two >> 8)) << 16;",
    },
    "query_operands.hpp": {
        r'asm\("max\.u16x2.*?\)\);': "larger = max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16;",
        r'asm volatile\("ld\.shared\.v4.*?\)\);': "uint32_t words[4]; ld_shared_v4(from, words);"
        " a = words[0], b = words[1], c = words[2], d = words[3];",
        r'asm volatile\("ldmatrix.*?"memory"\);': "ldmatrix_x4(from, q[0], q[1], q[2], q[3]);",
    },
    "cluster/none.hpp": {r'asm volatile\("st\.shared\.v4.*?"memory"\);': "st_shared_v4(to, 0, 0, 0, 0);"},
}
"""Headers with instructions of their own -> these, and what takes their place."""


def translated(folder: Path) -> Path:
    """A copy of the sources whose own instructions are C++."""
    sources = folder / "csrc"
    shutil.copytree(CSRC / "common", sources / "common")
    shutil.copytree(CSRC / DECODE, sources / DECODE)
    shutil.copytree(CSRC / "sm_90" / "ptx", sources / "sm_90" / "ptx")
    shutil.copy(CSRC / "sm_90" / "spin_limit.hpp", sources / "sm_90")
    shutil.copytree(HOST / "sm_90", sources / "sm_90", dirs_exist_ok=True)
    for name, changes in INSTRUCTIONS.items():
        path = sources / DECODE / name
        text = path.read_text()
        for pattern, code in changes.items():
            text, count = re.subn(pattern, lambda _, code=code: code, text, flags=re.DOTALL)
            assert count == 1, f"{name}: {count} of {pattern}"
        path.write_text(text)
    return sources


def compiled(program: Path, main: str, sources: Path, constants: list[str]) -> Path:
    """The program of the file `main` of `HOST`."""
    options = ["-std=c++20", "-O2", "-fno-strict-aliasing", "-w", "-include", str(HOST / "cuda.hpp")]
    command = ["g++", *options, f"-I{sources}", f"-I{HOST}", *constants, str(HOST / main), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program
