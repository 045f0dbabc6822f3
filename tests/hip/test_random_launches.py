"""Random decode problems through AMD's HIP runtime against fp64: NaN around the keys, absurd pages, all modes."""

import random

import decode_grid
import pytest
from conftest import ARCH

import mla_suite
from mla_suite.ops.decode.samples import decode_sample

PROBLEMS = 100  # per arch
PER_TEST = 10
FP8 = decode_grid.FP8_FORMATS.get(ARCH, "fp8")


def problem(seed):
    draw = random.Random(f"{ARCH} {seed}")
    mode = draw.choice(decode_grid.MODES)
    heads, q_len = draw.choice((1, 8, 12, 16, 24)), draw.choice((1, 1, 2, 3))
    lens = [draw.choice((0, 1, 15, 16, 17, 31, 33, 64, 65, 90)) for _ in range(draw.choice((1, 2, 3)))]
    kv_format = draw.choice(("bf16", "bf16", FP8))
    return decode_sample(
        lens, heads=heads, q_len=q_len, page=draw.choice((1, 16, 61, 64)), kv_format=kv_format, seed=seed, **mode
    )


@pytest.mark.parametrize("first", range(0, PROBLEMS, PER_TEST))
def test_against_fp64(session, first):
    before = session.gpu.dispatches
    with mla_suite.emulate(ARCH):
        for seed in range(first, first + PER_TEST):
            decode_grid.check(ARCH, problem(seed))
    assert session.gpu.dispatches - before >= PER_TEST
