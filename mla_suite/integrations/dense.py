"""Our names for the caches of plain rows that other projects hand over, by their dtype."""

import torch

WIDE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP8 = {torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8_fnuz"}
KV_FORMATS = {**WIDE, **FP8}
