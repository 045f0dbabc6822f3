"""Floors of fp8 shapes come from an fp8 ceiling, which a product of e4m3 matrices gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import runs
import torch

from mla_suite.bench import floors, sets
from mla_suite.bench import run as runner
from mla_suite.bench.record import Result

FP8 = replace(runs.FLOORS, fp8_tflops=1500.0)
E4M3 = {"kv_format": "fp8", "dtype": torch.float8_e4m3fn}


def test_only_fp8_queries_over_fp8_keys_are_fp8_products() -> None:
    assert sets.decode(1, 16, 64, **E4M3).fp8_products
    assert not sets.decode(1, 16, 64, kv_format="fp8").fp8_products
    assert not sets.decode(1, 16, 64).fp8_products
    assert {case.fp8_products for case in sets.named("aiter-3003")} == {True}
    assert {case.fp8_products for name in ("v4", "gpu-mode-2025", "counted") for case in sets.named(name)} == {
        False,
        True,
    }


@pytest.mark.parametrize(("ceilings", "rate"), [(FP8, 1500.0), (runs.FLOORS, 800.0)])
def test_a_compute_floor_is_at_the_ceiling_of_its_operands(ceilings: floors.Floors, rate: float) -> None:
    flops = 10**13
    assert ceilings.of(1 << 20, flops, fp8=True) == (pytest.approx(flops / rate / 1e6), "compute")
    assert ceilings.of(1 << 20, flops) == (pytest.approx(flops / 800.0 / 1e6), "compute")
    assert floors.from_json(ceilings.as_json()) == ceilings
    older = {name: value for name, value in ceilings.as_json().items() if name != "fp8_tflops"}
    assert floors.from_json(older).fp8_tflops == 0


def test_a_run_takes_each_shapes_own_ceiling() -> None:
    both = [sets.decode(1, 128, 64, **E4M3), sets.decode(1, 128, 64)]
    found = {}
    for case in both:
        result = Result(case.op, case.shape, "native", dict(case.facts), 1 << 20, 10**13)
        found[result.key] = result
    timed = runner._with_floors(both, found, FP8)
    assert timed[1].floor_us == pytest.approx(timed[0].floor_us * 1500 / 800)


def test_the_fp8_product_is_a_product() -> None:
    left, right = torch.randn(32, 64).bfloat16(), torch.randn(64, 48).bfloat16()
    found = floors.fp8_product(left, right)
    assert found is not None, "torch multiplies e4m3 on a CPU"
    rows, product = found
    assert rows.dtype == torch.float8_e4m3fn
    expected = rows.double() @ right.to(rows.dtype).double()
    torch.testing.assert_close(product(rows).double(), expected, rtol=1e-2, atol=1e-2)


def test_a_device_without_fp8_has_no_such_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*tensors: object, **options: object) -> torch.Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on devices with fp8")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert floors.fp8_product(torch.ones(16, 16).bfloat16(), torch.ones(16, 16).bfloat16()) is None
