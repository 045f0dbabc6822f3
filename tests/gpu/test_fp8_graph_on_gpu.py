"""Decode of 32 heads and 4 query tokens in fp8, pages of one token, captured in a graph: on any GPU."""

from __future__ import annotations

import decode_grid
import pytest
import torch
from decode_calls import LENS, PLAN, assert_right_at_other_lengths

import mla_suite
from mla_suite.core import dispatch
from mla_suite.launch import current_arch
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import Exact

HEADS, Q_LEN = 32, 4
LENGTHS = ((512, 300, 64, 21), (4, 300, 33, 5), (256, 4, 64, 21))


@pytest.mark.parametrize("planned", [False, True], ids=["no plan", "plan"])
def test_a_captured_fp8_graph_replays_at_other_lengths(planned: bool) -> None:
    """The plan is made inside the graph. Results are within the rounding of P, in fp8 where the kernel keeps it so."""
    arch = current_arch(torch.empty(1, device="cuda"))
    fnuz = arch is not None and arch.fp8 == "fnuz"
    dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    sample = decode_sample(
        LENGTHS[0], heads=HEADS, q_len=Q_LEN, page=1, kv_format="fp8_fnuz" if fnuz else "fp8", dtype=dtype
    )
    args, kwargs = sample.make(torch.device("cuda"))
    lens, units = args[LENS], torch.cuda.get_device_properties(0).multi_processor_count
    sizes = dict(num_heads=HEADS, max_seqlen_q=Q_LEN, num_sm_parts=units, max_seqlen_kv=max(LENGTHS[0]))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        plan = mla_suite.plan(lens, **sizes) if planned else None
        return torch.ops.mla_suite.decode(*args[:PLAN], plan, **kwargs)

    plan = mla_suite.plan(lens, **sizes) if planned else None
    problem = DECODE.problem(*args[:PLAN], plan, **kwargs)
    config = dispatch.choose("decode", DECODE.backends, problem, arch, "cuda").supported.config
    rounding = decode_grid.COARSE if getattr(config, "fp8_weights", False) else 2.0**-8

    def within_bound(out: torch.Tensor, lse: torch.Tensor, exact: Exact) -> None:
        decode_grid.assert_within_bound(out.cpu(), lse.cpu(), exact, rounding)

    assert_right_at_other_lengths(step, args, kwargs, LENGTHS, within_bound)
