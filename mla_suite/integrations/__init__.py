"""Other projects' models and interfaces on top of ours; each module imports its project, this one none.

Here are facts and errors that several of them share: cache formats by dtype, and one-sentence errors.
"""

from __future__ import annotations

from typing import NoReturn

import torch

# The KV format of a cache of plain rows, by the dtype in which another project hands it over.
WIDE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP8 = {torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8_fnuz"}
KV_FORMATS = {**WIDE, **FP8}


def refuse(name: str, given: str, possible: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise `error` with one sentence: the function's name, what was given, and what is accepted."""
    raise error(f"{name}: {given}; {possible}")
