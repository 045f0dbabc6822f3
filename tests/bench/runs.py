"""Runs as an H200 would leave them, made up: for tests of comparison, tables and pages, where no GPU is."""

from __future__ import annotations

import random

import simulated

from mla_suite.bench.floors import Floors
from mla_suite.bench.record import Report, Result
from mla_suite.bench.sets import Case, named

GPU = {
    "arch": "sm_90",
    "device": "Made-up GPU",
    "compute_units": 132,
    "driver": "580.00",
    "cuda": "13.0",
    "rocm": "",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "mla_suite": "0.1.0",
    "python": "3.12",
    "date": "2026-11-21",
    "commit": "0" * 40,
    "changed": False,
}
FLOORS = Floors(((65536, 1.6), (1 << 20, 2.0), (1 << 26, 17.0), (1 << 30, 231.0)), 800.0, "a Triton kernel")


def cases() -> list[Case]:
    return [*named("flashmla"), *named("v4")[:4], *named("aiter-3468")[:4]]


def report(seed: int, slowdown: float = 1.0, backends: tuple[str, ...] = ("native",), fixed: float = 4.0) -> Report:
    """Times of 1.3 floors and a fixed part, with simulated noise; `slowdown` multiplies them all."""
    source = random.Random(seed)
    results = []
    for case in cases():
        floor_us, bound = FLOORS.of(case.sample.bytes, case.sample.flops)
        for index, backend in enumerate(backends):
            us = (fixed + 1.3 * floor_us) * (1 + 0.3 * index) * slowdown
            results.append(
                Result(
                    case.op, case.shape, backend, dict(case.facts), case.sample.bytes, case.sample.flops,
                    config="Tile(rows=64)", reason="made up", rounds=simulated.run(us, source),
                    host_rounds=simulated.run(30.0, source), floor_us=floor_us, bound=bound, error=2e-3,
                    checked="reference",
                )
            )  # fmt: skip
    return Report(dict(GPU), "python -m mla_suite bench --set flashmla", ["flashmla", "v4"], results, FLOORS)
