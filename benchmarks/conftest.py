"""Options of the benchmarks: `pytest benchmarks --benchmark-enable --set quick --backend reference`."""

from __future__ import annotations

import pytest
import torch

from mla_suite.bench import sets


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--set", default="quick", help=f"shapes of bench_operators: {', '.join(sets.SETS)}")
    parser.addoption("--backend", default=None, help="native, triton or reference (default: those of this device)")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parameters are strings, so that a saved benchmark says what it ran."""
    if {"shape", "backend"} <= set(metafunc.fixturenames):
        usual = ["native", "triton"] if torch.cuda.is_available() else ["reference"]
        asked = metafunc.config.getoption("--backend")
        metafunc.parametrize("backend", [asked] if asked else usual)
        metafunc.parametrize("shape", [case.id for case in sets.named(metafunc.config.getoption("--set"))])


@pytest.fixture
def case(shape: str, request: pytest.FixtureRequest) -> sets.Case:
    return next(case for case in sets.named(request.config.getoption("--set")) if case.id == shape)
