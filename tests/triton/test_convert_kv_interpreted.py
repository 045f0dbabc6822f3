"""convert_kv in Triton writes the reference's bytes, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from backend import CPU
from hostile_inputs import raw

import mla_suite
from mla_suite import kv_formats
from mla_suite.kv_formats import KV_FORMATS
from mla_suite.kv_formats import cache as caches
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


def both(source: torch.Tensor, target: torch.Tensor, *descales: torch.Tensor | None, **names: str) -> None:
    """All slots in order."""
    slots = torch.arange(source.shape[0] * source.shape[1])
    mine = target.clone()
    mla_suite.convert_kv(source, target, slots, slots, *descales, **names)
    convert.run(False, (), ConvertKvArgs(source, mine, slots, slots, *descales, **names))
    torch.testing.assert_close(mine, target, atol=0, rtol=0, equal_nan=True)


def test_descales_that_differ() -> None:
    names = dict(source_format="fp8", destination_format="fp8")
    source = kv_formats.pack("fp8", torch.randn(2, 4, 576), descale=torch.tensor(0.25))
    target = kv_formats.empty("fp8", 2, 4).view(torch.uint8).zero_()
    for descales in ((torch.tensor(0.25), torch.tensor(0.4)), (torch.tensor(0.25), None), (None, torch.tensor(2.0))):
        both(source.view(torch.uint8), target, *descales, **names)


@pytest.mark.parametrize("name", [name for name, kind in KV_FORMATS.items() if not kind.dense])
def test_codes_and_scales_that_no_writer_makes(name: str) -> None:
    """NaN among them, the least and the largest scale. Rope is drawn: Triton's interpreter misreads denormal bf16."""
    kind, slots, draw = KV_FORMATS[name], torch.arange(16), torch.Generator().manual_seed(1)
    source = kv_formats.pack(name, torch.randn(2, 8, kind.head_dim, generator=draw))
    stored = {key: caches.fields_at(kind, source, slots)[key].view(torch.uint8) for key in ("latent", "scale")}
    for field in stored.values():
        field.random_(0, 256, generator=draw)
    if kind.by_name["scale"].encoding != "fp32":
        stored["scale"][:, 0] = torch.tensor([0, 1, 254, 255] * 4, dtype=torch.uint8)
    caches.put_fields(kind, source, slots, stored)
    both(source, torch.zeros(2, 8, kind.head_dim), source_format=name, destination_format="fp32")


def test_slots_past_a_cache_write_nothing() -> None:
    args, kwargs = sample(3, "v41", "dsv4", (4, 2)).make(CPU)
    before = raw(args[1]).clone()
    for position in (2, 3):
        given = list(args)
        given[position] = torch.full((3,), 2**40)
        convert.run(False, (), ConvertKvArgs(*given, **kwargs))
    assert torch.equal(raw(args[1]), before)
