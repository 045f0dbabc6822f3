"""`MLA` gives what GPU MODE's `amd-mla-decode` layer gives, at full width and every prefill of the task.

Batch is 2 here, since the contest's computation up-projects every cached token; sequences do not touch each other.
"""

import pytest
import torch
from contest import compare, drawn_weights, our_layer, problem

BATCH, ROOM = 2, 128
BENCHMARKS = [pytest.param(prefill, marks=pytest.mark.full) for prefill in (4096, 6144)]


@pytest.fixture(scope="module")
def weights():
    return drawn_weights()


@pytest.fixture(scope="module")
def layer(weights):
    return our_layer(weights)


@pytest.mark.parametrize("prefill", [128, 512, 1024, 2048, *BENCHMARKS])
@torch.no_grad()
def test_one_step_gives_the_contests_y_and_cache(weights, layer, prefill):
    task = problem(weights, BATCH, prefill, prefill + ROOM)
    y = layer(task.x, task.kv_cache, task.step, task.cos_sin)
    compare(y, task.kv_cache, task, prefill)
