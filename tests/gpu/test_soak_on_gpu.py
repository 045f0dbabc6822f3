"""A slice of soak_streaming.py: some thousand captured calls of the cases that differ most."""

from __future__ import annotations

import pytest
import torch
from decode_calls import require_kernels
from soak_streaming import QUICK, soak

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def test_alternating_calls_repeat_their_bits_beside_a_busy_stream():
    require_kernels("sm_90")
    wrong = soak(list(QUICK), 100_000, busy=True, process=False, step=lambda name, count: None)
    assert set(wrong.values()) == {0}
