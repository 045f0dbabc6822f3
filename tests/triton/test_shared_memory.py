"""Every tile that Triton's decode kernels choose fits the shared memory of the GPU it is chosen for.

Compiled for NVIDIA GPUs by Triton on this machine; on AMD the emulator's tests run the code itself.
"""

import os
from typing import Any

import pytest
import torch

from mla_suite import archs as arch
from mla_suite.archs import ArchSpec
from mla_suite.core import register
from mla_suite.core.dispatch import Supported
from mla_suite.core.op import Sample
from mla_suite.ops.decode import triton as decode
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.sparse_decode import triton as sparse_decode
from mla_suite.ops.sparse_decode import triton_rows
from mla_suite.ops.sparse_decode.samples import PoolShape
from mla_suite.ops.sparse_decode.samples import sample as sparse_sample

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing; the process around it does"
)
SM_90 = arch.get("sm_90")
OTHERS = 101376  # bytes: sm_86, sm_89 and sm_120 have the least beside bf16 matrix units
GPUS = {"sm_90": (90, SM_90, SM_90.lds_bytes), "another": (89, None, OTHERS)}
FP8 = torch.float8_e4m3fn
MANY = [5] * 200  # sequences, which fill a GPU: small tiles are for launches that would leave it idle
ROWS = decode_sample(MANY, heads=32, page=1)
TURNED = decode_sample(MANY, heads=32, page=1, rotate=True)  # keys are turned as they are read
BYTES = decode_sample(MANY, heads=64, kv_format="fp8", dtype=FP8, page=1)
WIDER = decode_sample(MANY, heads=32, kv_format="fp32", page=1, rotate=True)  # 16-bit queries, multiplied as fp32
WIDE, WIDE_OF_64 = (decode_sample(MANY, heads=heads, latent=1024, window_left=63) for heads in (16, 64))  # dots3_note's
RECORDS, MIXED, VALUES, VALUES_OF_64, RECORDS_OF_64, WIDER_POOL = (
    sparse_sample(2, 1, heads, [PoolShape(kv_format, 3, 64, 48) for kv_format in kv_formats])
    for heads, kv_formats in (
        (16, ["v32"]),
        (16, ["dsv4", "dsv4_fnuz"]),
        (16, ["bf16"]),
        (64, ["bf16"]),
        (64, ["dsv4"]),
        (64, ["dsv4", "fp32"]),
    )
)
LARGE = [decode_sample(MANY, heads=64, page=1, rotate=turned) for turned in (False, True)]
SAMPLES = {
    ("sm_90", "decode"): [ROWS, TURNED, *LARGE, BYTES, WIDER, WIDE, WIDE_OF_64],
    ("another", "decode"): [ROWS, TURNED, BYTES, WIDER, WIDE],
    ("sm_90", "sparse_decode"): [RECORDS, MIXED, VALUES, VALUES_OF_64, RECORDS_OF_64, WIDER_POOL],
    ("another", "sparse_decode"): [MIXED, VALUES, VALUES_OF_64, WIDER_POOL],
}
"""Each tile that a GPU's rules choose, with the operands that take most beside it."""
MODULES: dict[str, Any] = {"decode": decode, "sparse_decode": sparse_decode}
old = pytest.mark.skipif(
    triton_rows.TOO_OLD is not None, reason="this Triton is older than 3.6, which sparse_decode needs"
)
CASES = [
    pytest.param(gpu, name, sample, id=f"{gpu}-{name}-{sample.name}", marks=[old] if name == "sparse_decode" else [])
    for (gpu, name), samples in SAMPLES.items()
    for sample in samples
]


def shared_of(name: str, sample: Sample, capability: int, chosen: Any) -> int:
    """Bytes that the kernel of a sample needs with a tile, or with the one chosen for an arch."""
    from nvidia_offline import first_launch, shared_bytes

    op = register.get(name)
    args, kwargs = sample.make(torch.device("cpu"))
    if chosen is None or isinstance(chosen, ArchSpec):
        answer = MODULES[name].supports(op.problem(*args, **kwargs), chosen)
        assert isinstance(answer, Supported), answer
        chosen = answer.config
    outputs = tuple(torch.empty(o.shape, dtype=o.dtype) for o in op.specify(*args, **kwargs))
    launch = first_launch(lambda: MODULES[name].run(chosen, outputs, op.Args(*args, **kwargs)))
    return shared_bytes(*launch, capability)


@pytest.mark.parametrize(("gpu", "name", "sample"), CASES)
def test_the_chosen_tile_fits(gpu: str, name: str, sample: Sample) -> None:
    capability, record, limit = GPUS[gpu]
    assert shared_of(name, sample, capability, record) <= limit


def test_a_tile_that_does_not_fit_is_seen() -> None:
    """64 keys, turned as they are read: what an H200 refused with 233472 bytes of 232448."""
    sample = decode_sample([96, 40], q_len=2, page=1, rotate=True, causal=False, split_size=64)
    assert shared_of("decode", sample, 90, decode.Tile(64, 64, 8, 2)) == 233472 > SM_90.lds_bytes
