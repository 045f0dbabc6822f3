"""Floors of fp8 shapes come from an fp8 ceiling, which a product of e4m3 matrices gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_suite.bench import floors, sets

FLOORS = floors.Floors(((65536, 1.6), (1 << 20, 2.0), (1 << 26, 17.0), (1 << 30, 231.0)), 800.0, "a Triton kernel")
FP8 = replace(FLOORS, fp8_tflops=1500.0)
E4M3 = {"kv_format": "fp8", "dtype": torch.float8_e4m3fn}


def test_only_fp8_queries_over_fp8_keys_are_fp8_products():
    assert sets.decode(1, 16, 64, **E4M3).fp8_products
    assert not sets.decode(1, 16, 64, kv_format="fp8").fp8_products
    assert not sets.decode(1, 16, 64).fp8_products
    assert {case.fp8_products for case in sets.named("aiter-3003")} == {True}
    assert {case.fp8_products for name in ("v4", "gpu-mode-2025", "counted") for case in sets.named(name)} == {
        False,
        True,
    }


@pytest.mark.parametrize(("ceilings", "rate"), [(FP8, 1500.0), (FLOORS, 800.0)])
def test_a_compute_floor_is_at_the_ceiling_of_its_operands(ceilings, rate):
    flops = 10**13
    assert ceilings.of(1 << 20, flops, fp8=True) == (pytest.approx(flops / rate / 1e6), "compute")
    assert ceilings.of(1 << 20, flops) == (pytest.approx(flops / 800.0 / 1e6), "compute")


def test_the_fp8_product_is_a_product():
    left, right = torch.randn(32, 64).bfloat16(), torch.randn(64, 48).bfloat16()
    found = floors.fp8_product(left, right)
    assert found is not None, "torch multiplies e4m3 on a CPU"
    rows, product = found
    assert rows.dtype == torch.float8_e4m3fn
    expected = rows.double() @ right.to(rows.dtype).double()
    torch.testing.assert_close(product(rows).double(), expected, rtol=1e-2, atol=1e-2)


def test_a_device_without_fp8_has_no_such_ceiling(monkeypatch):
    def refuse(*tensors: object, **options: object) -> torch.Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on devices with fp8")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert floors.fp8_product(torch.ones(16, 16).bfloat16(), torch.ones(16, 16).bfloat16()) is None


def test_a_curve_of_floors_never_falls():
    noisy = [(1 << 18, 2.0), (1 << 20, 1.9), (1 << 22, 4.0), (1 << 24, 3.5), (1 << 26, 17.0)]
    rising = floors._rising(noisy)
    assert [size for size, _ in rising] == [size for size, _ in noisy]
    assert [us for _, us in rising] == [1.9, 1.9, 3.5, 3.5, 17.0]


def test_floors_lie_between_what_was_measured():
    assert FLOORS.memory_us(1 << 20) == pytest.approx(2.0)
    assert 2.0 < FLOORS.memory_us(1 << 23) < 17.0
    assert FLOORS.memory_us(1000) == 1.6
    assert FLOORS.memory_us(1 << 31) == pytest.approx(462.0)
    assert FLOORS.of(1 << 20, 8_000_000_000) == (pytest.approx(10.0), "compute")
    assert FLOORS.of(1 << 30, 1000) == (231.0, "memory")
