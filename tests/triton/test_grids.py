"""Launches of many blocks stay within a GPU's grid: 2^31 - 1 along the first dimension, 65535 along the others."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton==3.6.0")

from triton.runtime.jit import JITFunction

from mla_suite.core import register
from mla_suite.core.dispatch import Supported
from mla_suite.ops.combine import triton as combine
from mla_suite.ops.decode import triton as decode
from mla_suite.ops.sparse_decode import triton as sparse_decode

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1",
    reason="here a launch would happen; the process around it has them stopped",
)
MANY = 70_000


def grids(module: Any, op: str, *args: Any, **kwargs: Any) -> list[tuple[int, ...]]:
    """The grids of a backend's launches, none of which happens."""
    found: list[tuple[int, ...]] = []
    record = register.get(op)
    answer = module.supports(record.problem(*args, **kwargs), None)
    assert isinstance(answer, Supported), answer
    outputs = tuple(torch.empty(1, dtype=o.dtype).expand(o.shape) for o in record.specify(*args, **kwargs))
    with patch.object(JITFunction, "run", lambda self, *_, grid, **__: found.append(grid)):
        module.run(answer.config, outputs, record.Args(*args, **kwargs))
    return found


def filled(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """One row of zeros, repeated without taking memory for it."""
    return torch.zeros(shape[-1], dtype=dtype).expand(shape)


def within(grid: tuple[int, ...]) -> bool:
    return grid[0] < 2**31 and all(size <= 65535 for size in grid[1:])


@pytest.mark.parametrize(("batch", "rows"), [(MANY, 16), (2, MANY)])
def test_combine(batch: int, rows: int) -> None:
    partial_out = filled(2 * batch, rows, 16, dtype=torch.float32)
    partial_lse = filled(2 * batch, rows, dtype=torch.float32)
    (grid,) = grids(combine, "combine", partial_out, partial_lse, num_splits=2)
    assert within(grid)
    assert grid[0] == batch * rows


def test_decode() -> None:
    cache, lens = torch.zeros(1, 16, 576).bfloat16(), torch.full((MANY,), 5, dtype=torch.int32)
    table = torch.zeros(MANY, 1, dtype=torch.int32)
    (grid,) = grids(decode, "decode", filled(MANY, 1, 16, 576), cache, lens, table, softmax_scale=1.0)
    assert within(grid)
    assert grid == (1, 65535)  # a block then takes several sequences


def test_sparse_decode() -> None:
    args = filled(MANY, 40, 576), [torch.zeros(1, 16, 576).bfloat16()], [torch.zeros(MANY, 4).int()], [None], [None]
    (grid,) = grids(sparse_decode, "sparse_decode", *args, kv_formats=["bf16"], softmax_scale=1.0)
    assert within(grid)
    assert grid[0] == MANY * 2  # tiles of 32 heads
