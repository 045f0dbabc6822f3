"""Triton stores and reads KV formats that nobody ships as the reference does, or refuses them in a sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from backend import run
from backend_calls import assert_refused
from hostile_inputs import filled, raw
from made_formats import made

from mla_suite.core import register
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import KVFormat
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.append_kv import AppendKvArgs
from mla_suite.ops.append_kv import triton as append
from mla_suite.ops.convert_kv import ConvertKvArgs
from mla_suite.ops.convert_kv import triton as convert
from mla_suite.ops.sparse_decode import SparseDecodeArgs, compare
from mla_suite.ops.sparse_decode import triton as sparse

POWERS = dict(scale="e8m0", power_of_two=True)
TAKEN = [
    made(),
    made(rope="fp16"),
    made(rope="fp32", tile=256),
    made("fp16", scale="e4m3fn", divisor=4.0),
    made(rope="e4m3fnuz", scale="bf16", power_of_two=True),
    made("e2m1", scale="e4m3fn", tile=16, divisor=6.0, rope=None),
]


def rows(fmt: KVFormat) -> torch.Tensor:
    return torch.randn(2, 4, fmt.head_dim, generator=torch.Generator().manual_seed(fmt.width)) * 4


def asked(module: Any, op: str, *args: Any, **kwargs: Any) -> Supported | Unsupported:
    return module.supports(register.get(op).problem(*args, **kwargs), None)


def appended(fmt: KVFormat) -> Any:
    kv_c, k_pe = rows(fmt).flatten(0, 1).split((fmt.latent, fmt.rope), dim=-1)
    return (kv_c, k_pe, filled(fmt, 2, 4), torch.arange(8)), dict(kv_format=fmt)


def converted(source: KVFormat, destination: KVFormat) -> Any:
    slots, names = torch.arange(8), dict(source_format=source, destination_format=destination)
    return (caches.pack(source, rows(source)), filled(destination, 2, 4), slots, slots), names


def attended(fmt: KVFormat) -> Any:
    q = torch.randn(2, 3, fmt.head_dim, generator=torch.Generator().manual_seed(1))
    selected = torch.tensor([[5, 0, 1, 7], [2, 2, -1, 6]], dtype=torch.int32)
    options = dict(kv_formats=[fmt], softmax_scale=0.05, head_dim_v=fmt.head_dim_v)
    return (q, [caches.pack(fmt, rows(fmt))], [selected], [None], [None]), options


@pytest.mark.parametrize("fmt", TAKEN, ids=lambda fmt: fmt.name)
def test_a_format_that_is_taken_is_stored_and_read_as_declared(fmt: KVFormat) -> None:
    args, kwargs = appended(fmt)
    assert isinstance(asked(append, "append_kv", *args, **kwargs), Supported)
    append.run(None, (), AppendKvArgs(*args, **kwargs))
    expected = filled(fmt, 2, 4)
    caches.scatter(fmt, expected, torch.arange(8), rows(fmt).flatten(0, 1))
    assert torch.equal(raw(args[2]), raw(expected))

    plain = dataclasses.replace(caches.get_kv_format("fp32").sized(fmt.head_dim, 0), name=f"fp32 of {fmt.head_dim}")
    args, kwargs = converted(fmt, plain)
    assert isinstance(asked(convert, "convert_kv", *args, **kwargs), Supported)
    convert.run(False, (), ConvertKvArgs(*args, **kwargs))
    assert torch.equal(args[1], caches.unpack(fmt, args[0]))

    args, kwargs = attended(fmt)
    outputs = run(sparse, "sparse_decode", args, kwargs)
    for found in compare.compare(None, outputs, SparseDecodeArgs(*args, **kwargs)):
        assert bool(((found.got.double() - found.exact).abs() <= found.allowed).all()), found.name


def scaled_rope(**rule: Any) -> KVFormat:
    """A record whose last tile of scaled values is its rope values, and V all of it."""
    return dataclasses.replace(made(tile=64, count=448, tiles=8, **POWERS | rule), head_dim_v=512)


@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        (made(scale="e8m0"), "has scales of any bits in e8m0"),
        (made(scale="bf16"), "has scales of any bits in bf16"),
        (made(scale="e4m3fnuz"), "has scales of any bits in e4m3fnuz"),
        (made(scale="e4m3fn", power_of_two=True), "has powers of two in e4m3fn"),
        (made(smallest=2.0**-127, power_of_two=True), "has powers of two from 5.88e-39 on"),
        (made(tiles=3), "has scales for 384 of 512 values"),
        (scaled_rope(), "has scales for 512 of 448 values"),
        (made(tile=96, count=480, ropes=32), "has a scale for 96 values"),
        (made(rope="e8m0"), "has values in e8m0"),
        (made(pad=5), "has fields that lie off their elements"),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_what_is_not_stored_is_refused(fmt: KVFormat, reason: str) -> None:
    args, kwargs = appended(fmt)
    answers = [asked(append, "append_kv", *args, **kwargs)]
    args, kwargs = converted(made(count=fmt.latent, tile=32, ropes=fmt.rope), fmt)
    answers += [asked(convert, "convert_kv", *args, **kwargs)]
    for answer in answers:
        assert_refused(answer, f"kv_format {fmt.name} {reason}")


@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        (made(tiles=3), "has scales for 384 of 512 values"),
        (scaled_rope(), "has scales for 512 of 448 values"),
        (dataclasses.replace(made(tile=96, count=480, ropes=32), head_dim_v=512), "has a scale for 96 values"),
        (made(pad=5), "has fields that lie off their elements"),
        (dataclasses.replace(made(count=256, ropes=64), head_dim_v=64), "has a scale for 128 values"),
        (
            dataclasses.replace(made("e2m1", scale="e4m3fn", tile=16, count=448, divisor=6.0), head_dim_v=512),
            "has 448 values of 4 bits",
        ),
        (made(rope="e2m1"), "has rope values of 4 bits"),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_what_is_not_read_is_refused(fmt: KVFormat, reason: str) -> None:
    args, kwargs = attended(fmt)
    assert_refused(asked(sparse, "sparse_decode", *args, **kwargs), f"kv_format {fmt.name} {reason}")
