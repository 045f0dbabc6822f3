"""Another compiler's code for the same machine agrees: Triton's and Gluon's kernels, compiled offline, give numpy's
numbers with nothing for the sanitizer to find. Their compilers lay out matrix operands for the real units, so a wrong
layout here would show as wrong numbers; the instructions a case is meant to confirm are looked for in its text.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: its code generator is the other opinion")

import foreign_kernels
import triton
from triton_offline import launches

from mla_suite.emulator import Report


class Done(NamedTuple):
    text: str
    report: Report

    def executed(self, pattern: str) -> int:
        """Wave instructions whose mnemonic matches."""
        return sum(times for name, times in self.report.mix().items() if re.match(pattern, name))


def execute(
    arch: str, kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any], constants: dict[str, Any],
    **options: Any
) -> Done:  # fmt: skip
    """Compiles for the arch and runs. Tensors become pointers that are multiples of 16."""
    given = [each for name, each in arguments.items() if name != "c"]
    with launches(arch, given) as done:
        kernel[grid](**arguments, **constants, num_warps=4, **options)
    ((_, compiled, report),) = done
    assert [str(finding) for finding in report.findings] == []
    return Done(compiled.asm["amdgcn"], report)


@pytest.fixture(scope="module", autouse=True)
def no_interpreter(own_cache):
    if not isinstance(foreign_kernels.matmul, triton.runtime.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: there is no compiled code to run")


EIGHT_BITS = {
    "gfx942": {"e4m3": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2fnuz},
    "gfx950": {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2},
}


def numbers(kind: str, arch: str, *shape: int) -> torch.Tensor:
    x = torch.randn(shape)
    if kind == "fp16":
        return x.half()
    if kind == "bf16":
        return x.bfloat16()
    return x if kind == "fp32" else x.to(EIGHT_BITS[arch][kind])


def close(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Within f32 rounding of sums of |a b|, whatever their order."""
    a, b = a.double(), b.double()
    assert ((got.double() - a @ b).abs() <= 2.0**-18 * (a.abs() @ b.abs()) + 1e-30).all()


@pytest.mark.parametrize(("b_rows", "size"), [(True, 16), (False, 32)], ids=["b_by_rows", "b_by_columns"])
@pytest.mark.parametrize("kind", ["fp16", "bf16", "e4m3", "e5m2"])
def test_matmul(arch, kind, b_rows, size):
    m, n, k = 72, 80, 256
    a, b = numbers(kind, arch, m, k), numbers(kind, arch, k, n)
    stored = b if b_rows else b.view(torch.uint8).t().contiguous().view(b.dtype) if b.element_size() == 1 else b.t()
    stored = stored.contiguous()
    c = torch.full((m, n), torch.nan)
    constants = {"K": k, "stride_bk": n if b_rows else 1, "stride_bn": 1 if b_rows else k, "BM": 64, "BN": 64, "BK": 64}
    arguments = {"a": a, "b": stored, "c": c, "M": m, "N": n}
    done = execute(
        arch, foreign_kernels.matmul, (2, 2, 1), arguments, constants, matrix_instr_nonkdim=size, num_stages=2
    )
    close(c, a.float(), b.float())
    assert done.executed(f"v_mfma_.*_{size}x{size}x") > 0
    if b_rows and arch == "gfx950":
        # A transposed operand goes through the transposing LDS load of its element size.
        assert done.executed("ds_read_b64_tr_b8" if a.element_size() == 1 else "ds_read_b64_tr_b16") > 0


# Values of E2M1 by code; bytes hold two, the lower first.
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def narrow(kind: str, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes [.., K or K / 2] as bytes, and their values [.., K]."""
    if kind == "e2m1":
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
        both = torch.stack([raw & 15, raw >> 4], -1).flatten(-2)
        return raw, FP4[both.long()]
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    value = torch.randn(shape).to(dtype)
    return value.view(torch.uint8), value.float()


@pytest.mark.parametrize(
    ("left", "right", "b_rows", "size"),
    [
        ("e4m3", "e4m3", False, 16),
        ("e5m2", "e4m3", True, 32),
        ("e2m1", "e2m1", False, 32),
        ("e4m3", "e2m1", False, 16),
        ("e2m1", "e5m2", True, 16),
    ],
)
def test_scaled_matmul(left, right, b_rows, size):
    """gfx950 alone: Triton has no code for these formats on gfx942."""
    arch = "gfx950"
    m, n, k = 64, 64, 256
    a, a_value = narrow(left, m, k)
    b, b_value = narrow(right, n, k)  # columns of b are its rows here
    a_scale, b_scale = (torch.randint(120, 134, (rows, k // 32), dtype=torch.uint8) for rows in (m, n))
    stored = (b.t() if b_rows else b).contiguous()
    c = torch.full((m, n), torch.nan)
    constants = {"K": k, "BM": m, "BN": n, "BK": 128, "ROW_MAJOR_B": b_rows, "FORMAT_A": left, "FORMAT_B": right}
    constants |= {"PACK_A": 1 + (left == "e2m1"), "PACK_B": 1 + (right == "e2m1")}
    arguments = {"a": a, "a_scale": a_scale, "b": stored, "b_scale": b_scale, "c": c}
    done = execute(
        arch, foreign_kernels.scaled, (1, 1, 1), arguments, constants, matrix_instr_nonkdim=size, num_stages=1
    )
    a_full = a_value * torch.exp2(a_scale.float() - 127).repeat_interleave(32, 1)
    b_full = b_value * torch.exp2(b_scale.float() - 127).repeat_interleave(32, 1)
    close(c, a_full, b_full.t())
    assert done.executed(f"v_mfma_scale_f32_{size}x{size}x.*_f8f6f4") > 0
    if b_rows:
        assert done.executed("ds_read_b64_tr_b8") > 0


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(("arch", "direct"), [("gfx942", False), ("gfx950", False), ("gfx950", True)])
def test_gluon_matmul(arch, direct, size):
    """On gfx950 sixteen bytes per lane may go from memory to LDS."""
    a, b, c = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.full((64, 64), torch.nan)
    version, width, flop = (3, 4, 256) if arch == "gfx942" else (4, 8, 512)
    depth = flop // size
    constants = {"VERSION": version, "SIZE": size, "DEPTH": depth, "WIDTH": width, "DIRECT": direct}
    done = execute(arch, foreign_kernels.gluon_matmul, (1, 1, 1), {"a": a, "b": b, "c": c}, constants)
    close(c, a.float(), b.float())
    assert done.executed(f"v_mfma_f32_{size}x{size}x{depth}_bf16") > 0
    assert done.executed("buffer_load") > 0
    assert (re.search(r"buffer_load_dwordx4 .* lds", done.text) is not None) == direct
    assert np.isfinite(c.numpy()).all()


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_deep_matmul_of_eight_bits(kind, size):
    """gfx950: blocks of 128 along K take the f8f6f4 instructions without scales."""
    a, b, c = numbers(kind, "gfx950", 64, 256), numbers(kind, "gfx950", 256, 64), torch.full((64, 64), torch.nan)
    constants = {"K": 256, "stride_bk": 64, "stride_bn": 1, "BM": 64, "BN": 64, "BK": 128}
    arguments = {"a": a, "b": b, "c": c, "M": 64, "N": 64}
    done = execute("gfx950", foreign_kernels.matmul, (1, 1, 1), arguments, constants, matrix_instr_nonkdim=size)
    close(c, a.float(), b.float())
    assert done.executed(f"v_mfma_f32_{size}x{size}x.*_f8f6f4") > 0
    assert done.executed("ds_read_b64_tr_b8") > 0
