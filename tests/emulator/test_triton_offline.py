"""The triton backends' machine code for gfx942 and gfx950, run in the emulator, gives the reference's results.

bf16 is covered here alone among tests without a GPU: the dot of Triton's interpreter is wrong in it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton==3.6.0")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter is on, and with it Triton compiles nothing", allow_module_level=True)

from hostile_inputs import in_turn
from sparse_problems import exact
from triton_offline import Launch, launches

from mla_suite import archs, testing
from mla_suite.core import register
from mla_suite.core.dispatch import Supported
from mla_suite.core.op import Sample
from mla_suite.ops.append_kv.samples import sample as append_sample
from mla_suite.ops.combine.samples import sample as combine_sample
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.samples import sample as plan_sample
from mla_suite.ops.sparse_decode import triton_rows
from mla_suite.ops.sparse_decode.samples import PoolShape
from mla_suite.ops.sparse_decode.samples import sample as sparse_sample

pytestmark = pytest.mark.usefixtures("own_cache")
CPU = torch.device("cpu")
ARCHS = ("gfx942", "gfx950")  # in turn: each case takes Triton seconds to compile
# The error that bf16 weights may add: each is rounded by half an ulp, 2^-9 of itself, and their sum is not.
WEIGHTS = 2.0**-8


def run(
    op: str, arch: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[torch.Tensor, ...], list[Launch]]:
    """The triton backend's outputs, poisoned before it runs, and its launches."""
    module, record = importlib.import_module(f"mla_suite.ops.{op}.triton"), register.get(op)
    answer = module.supports(record.problem(*args, **kwargs), archs.get(arch))
    assert isinstance(answer, Supported), answer
    outputs = tuple(testing.poison(torch.empty(o.shape, dtype=o.dtype)) for o in record.specify(*args, **kwargs))
    with launches(arch) as done:
        module.run(answer.config, outputs, record.Args(*args, **kwargs))
    return outputs, done


def assert_exact(out: torch.Tensor, lse: torch.Tensor, exact: testing.Exact) -> None:
    """Within an ulp of out, and what rounded weights may do, of the exact result."""
    error = (out.double() - exact.out).abs()
    allowed = testing.ulp(out, out.dtype) + WEIGHTS * exact.magnitude
    assert bool((error <= allowed).all()), f"{(error / allowed).max().item():.3g} times the bound"
    torch.testing.assert_close(lse.double(), exact.lse, atol=1e-5, rtol=1e-5)


def named(given: str | Sample) -> str:
    return given if isinstance(given, str) else given.name


def test_combine(arch: str) -> None:
    args, kwargs = combine_sample(2, 4, 3, ragged=True, sink=True).make(CPU)
    got, _ = run("combine", arch, args, kwargs)
    torch.testing.assert_close(got, torch.ops.mla_suite.combine(*args, **kwargs), atol=1e-6, rtol=2.0**-7)


PLAN = [
    plan_sample([4096, 0, 1, 700, 12000], num_heads=16, num_sm_parts=12, max_seqlen_kv=16384, varlen=True),
    plan_sample([5000, 64, 900], num_heads=64, num_sm_parts=4, max_seqlen_kv=8192, split_size=1024),
]


@pytest.mark.parametrize(("arch", "case"), in_turn(ARCHS, PLAN), ids=named)
def test_plan(arch: str, case: Sample) -> None:
    args, kwargs = case.make(CPU)
    (got,), _ = run("plan", arch, args, kwargs)
    assert torch.equal(got, torch.ops.mla_suite.plan(*args, **kwargs))


@pytest.mark.skipif(triton_rows.TOO_OLD is not None, reason=str(triton_rows.TOO_OLD))
@pytest.mark.parametrize(("arch", "name"), in_turn(ARCHS, ["bf16", "fp8", "dsv4_fnuz", "dsv4", "v32"]))
def test_append_kv(arch: str, name: str) -> None:
    args, kwargs = append_sample(5, name, page=3, rope=True, skip=True).make(CPU)
    mine = args[2].clone(memory_format=torch.preserve_format)
    torch.ops.mla_suite.append_kv(*args, **kwargs)
    run("append_kv", arch, (*args[:2], mine, *args[3:]), kwargs)
    assert torch.equal(mine.view(torch.uint8), args[2].view(torch.uint8))


DECODE = [
    decode_sample([130, 0, 7], planned=True),
    decode_sample([70, 33], heads=24, q_len=2, num_splits=2, page=16, sink=True, varlen=True),
    decode_sample([65, 40], heads=8, kv_format="fp8", page=1),
    decode_sample([65, 40], heads=8, kv_format="fp16", page=16),  # multiplied as fp32
]


@pytest.mark.parametrize(("arch", "case"), in_turn(ARCHS, DECODE), ids=named)
def test_decode(arch: str, case: Sample) -> None:
    args, kwargs = case.make(CPU)
    (out, lse), done = run("decode", arch, args, kwargs)
    assert_exact(out, lse, testing.exact_decode(*args, **kwargs))
    assert "v_mfma" in done[0].compiled.asm["amdgcn"]


# KVFormats whose values are exact in bf16: what is left is the rounding of weights.
V4_POOLS = [PoolShape("dsv4", 2, 64, 40), PoolShape("dsv4_fnuz", 9, 2, 12, ragged=True)]
SPARSE = [
    (sparse_sample(2, 1, 16, [PoolShape("v32_pow2", 3, 64, 48)]), 1),
    (sparse_sample(2, 1, 24, V4_POOLS, sink=True), 1),
    (sparse_sample(2, 2, 8, [PoolShape("bf16", 4, 16, 70)], lengths=True), 2),
]


@pytest.mark.skipif(triton_rows.TOO_OLD is not None, reason=str(triton_rows.TOO_OLD))
@pytest.mark.parametrize(("arch", "case"), in_turn(ARCHS, SPARSE))
def test_sparse_decode(arch: str, case: tuple[Sample, int]) -> None:
    sample, num_splits = case
    args, kwargs = sample.make(CPU)
    kwargs["num_splits"] = num_splits
    (out, lse), _ = run("sparse_decode", arch, args, kwargs)
    assert_exact(out, lse, exact(*args[:6], **kwargs))  # neither a plan nor descales
