"""The named sets are the grids that were published."""

import math

import pytest

from mla_suite.bench import sets
from mla_suite.core import register


@pytest.mark.parametrize(
    ("name", "count", "batches", "contexts"),
    [
        ("gpu-mode-2025", 4, {128}, {512, 2048, 4096, 6144}),
        ("gpu-mode-2025-layer", 4, {128}, {513, 2049, 4097, 6145}),
        ("mixed-mla", 8, {4, 32, 64, 256}, {1024, 8192}),
        ("mixed-mla-fp8", 8, {4, 32, 64, 256}, {1024, 8192}),
    ],
)
def test_published_grids(name, count, batches, contexts):
    cases = sets.named(name)
    assert len(cases) == count
    assert {case.facts["batch"] for case in cases} == batches
    assert {case.facts["kv_len"] for case in cases} == contexts


@pytest.mark.parametrize("name", sets.SETS)
def test_every_set_has_distinct_ids_and_honest_sizes(name):
    cases = sets.named(name)
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert case.op in register.registry()
        assert case.sample.bytes > 0
        assert case.sample.flops > 0 or case.op == "plan"


def test_bytes_of_the_contest_shape_by_hand():
    (case,) = (case for case in sets.named("gpu-mode-2025") if case.facts["kv_len"] == 6144)
    cache = 128 * 6144 * 576 * 2
    queries_and_results = 128 * 128 * (576 * 2 + 512 * 2 + 4)
    assert case.sample.bytes == cache + queries_and_results
    assert case.sample.flops == 2 * 128 * 128 * 6144 * (576 + 512)


@pytest.mark.parametrize("behind", [0, 2048])
def test_an_extend_counts_the_keys_that_its_tokens_see(behind):
    (case,) = (case for case in sets.named("extend") if f"h16-q64-kv{behind + 64}-" in case.shape)
    assert case.sample.flops == 2 * 16 * (64 * behind + 64 * 65 // 2) * (576 + 512)


def test_uneven_lengths_have_the_mean_they_are_named_by():
    case = next(case for case in sets.named("flashmla") if "-kv~4096-" in case.shape and case.facts["heads"] == 16)
    cache = case.sample.bytes - 128 * 16 * (576 * 2 + 512 * 2 + 4)
    assert math.isclose(cache / (128 * 1152), 4096, rel_tol=0.1)
