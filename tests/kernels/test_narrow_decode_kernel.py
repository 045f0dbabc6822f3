"""Decode of narrow latents on AMD: machine code in the emulator with every check on, against fp64."""

from __future__ import annotations

import pytest
from built import require_built
from decode_grid import check

import mla_suite
from mla_suite.ops.decode.samples import decode_sample

WIDTHS = ((256, 64), (256, 32), (128, 32))
MODES = (
    dict(heads=16, page=61, num_splits=1),
    dict(heads=12, q_len=3, planned=True, sink=True, page=16),
    dict(heads=64, page=64, num_splits=3),
    dict(heads=40, q_len=3, varlen=True, planned=True, page=1),
)
CASES = [(arch, *width, mode) for arch in ("gfx942", "gfx950") for width in WIDTHS for mode in range(len(MODES))]
ALWAYS = [case for number, case in enumerate(CASES) if number % 5 == 0]
CASES = [case if case in ALWAYS else pytest.param(*case, marks=pytest.mark.full) for case in CASES]


@pytest.mark.parametrize(("arch", "latent", "rope", "mode"), CASES)
def test_results_are_those_of_fp64(arch, latent, rope, mode):
    require_built(arch)
    with mla_suite.emulate(arch):
        check(arch, decode_sample((300, 0, 17, 129), latent=latent, rope=rope, seed=mode, **MODES[mode]))
