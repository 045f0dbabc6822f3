"""convert_kv in Triton writes the reference's bytes, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from backend import CPU
from hostile_inputs import raw

import mla_suite
from mla_suite.kv_formats import KV_FORMATS
from mla_suite.ops.convert_kv import ConvertKvArgs
from mla_suite.ops.convert_kv import triton as convert
from mla_suite.ops.convert_kv.samples import sample

PAIRS = [
    (a, b)
    for a, read in KV_FORMATS.items()
    for b, written in KV_FORMATS.items()
    if read.dense or written.dense or read.head_dim == written.head_dim
]
# Each kv_format is read and written; bytes are copied, with and without another order; a row of one field becomes two,
# and two become one, also where a tile lies across both.
FEW = {
    *(("v41", "v41_vllm"), ("v41_fp4_interleaved", "v41_fp4"), ("v32_nope", "dsv4"), ("dsv4_fnuz", "v32_nope")),
    *(("v41_interleaved", "v41_fp4"), ("v41_fp4", "dsv4_fnuz"), ("dsv4", "v41"), ("v32", "v32_pow2"), ("bf16", "v32")),
    *(("v32_pow2", "fp16"), ("fp16", "fp8"), ("fp8_fnuz", "fp32"), ("fp32", "bf16"), ("v41_vllm", "fp8_fnuz")),
}


@pytest.mark.parametrize(
    ("a", "b"),
    [pytest.param(*pair, marks=[] if pair in FEW else pytest.mark.full, id="-".join(pair)) for pair in PAIRS],
)
def test_pairs(a: str, b: str) -> None:
    args, kwargs = sample(9, a, b, (3, 5), skip=True).make(CPU)
    raw(args[1]).fill_(0xAA)
    mine = raw(args[1]).clone().view(args[1].dtype).as_strided(args[1].shape, args[1].stride())
    mla_suite.convert_kv(*args, **kwargs)
    convert.run(False, (), ConvertKvArgs(args[0], mine, *args[2:], **kwargs))
    assert torch.equal(raw(mine), raw(args[1]))


def test_slots_past_a_cache_write_nothing() -> None:
    args, kwargs = sample(3, "v41", "dsv4", (4, 2)).make(CPU)
    before = raw(args[1]).clone()
    for position in (2, 3):
        given = list(args)
        given[position] = torch.full((3,), 2**40)
        convert.run(False, (), ConvertKvArgs(*given, **kwargs))
    assert torch.equal(raw(args[1]), before)
