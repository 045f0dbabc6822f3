"""Options of the benchmarks, and what pytest-benchmark writes beside their numbers."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_suite import archs as arch_records
from mla_suite.bench import environment, sets
from mla_suite.build import manifest
from mla_suite.build.locations import ObjectError

COUNTED = {"clocks": "clock", "instructions": "instruction", "modelled ns": "modelled ns"}
"""Groups whose statistic is not measured, and its unit; what follows a comma in a group's name says more."""

STEADY = {*COUNTED, "device time"}
"""Groups that a comparison may fail by without being asked to: counts, and a GPU's graph replays."""

KEEPING = tuple(f"benchmark_{name}" for name in ("autosave", "save", "json", "compare", "compare_fail"))
"""Options that store a run or compare it, which a run without measurements could not."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--set", default="quick", help=f"shapes of bench_operators: {', '.join(sets.SETS)}")
    parser.addoption("--backend", default=None, help="native, triton or reference (default: those of this device)")
    parser.addoption("--no-floors", action="store_true", help="leave out the ceilings of the GPU, which take 20 s")
    parser.addoption("--host-times", action="store_true", help="let --benchmark-compare-fail judge host times too")
    parser.addoption("--arch", default=None, help="AMD archs to count for without a GPU (default: all that are built)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves times of the host out of a comparison that can fail: they move by 5 to 55 % without a change."""
    if not config.getoption("benchmark_compare_fail", None) or config.getoption("--host-times"):
        return
    kept, noisy = [], []
    for item in items:
        marker = item.get_closest_marker("benchmark")
        steady = "benchmark" not in getattr(item, "fixturenames", ()) or (marker and marker.kwargs["group"] in STEADY)
        (kept if steady else noisy).append(item)
    config.hook.pytest_deselected(items=noisy)
    items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Counting makes many objects and no times of the host: the collector would take a sixth of it."""
    if session.config.getoption("--set") == "counted":
        gc.freeze()
        gc.set_threshold(50_000, 10, 10)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    if not config.getoption("benchmark_compare_fail", None) or config.getoption("--host-times"):
        return []
    return ["times of the host cannot fail this comparison and are left out; --host-times has them in"]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--set") not in sets.SETS:
        given = config.getoption("--set")
        raise pytest.UsageError(f"--set {given}: there is no such set of shapes; there are {', '.join(sets.SETS)}")
    if any(config.getoption(name, None) for name in KEEPING):
        config.option.benchmark_enable = True  # pyproject.toml disables benchmarks, or each test would measure


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("device time needs a GPU; without one, counts of AMD kernels are tracked")
    return device


def _built() -> list[str]:
    """AMD archs that have kernels here."""
    try:
        built = {name for name, _ in manifest.installed().kernels}
    except ObjectError:
        return []
    return [name for name in arch_records.names() if arch_records.get(name).vendor == "amd" and name in built]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parameters are strings, so that a saved benchmark says what it ran."""
    names, option = set(metafunc.fixturenames), metafunc.config.getoption
    if "backend" in names and "case" in names:
        usual = ["native", "triton"] if torch.cuda.is_available() else ["reference"]
        metafunc.parametrize("backend", [option("--backend")] if option("--backend") else usual)
    if "arch" in names:
        asked = option("--arch").split(",") if option("--arch") else _built()
        metafunc.parametrize("arch", [] if torch.cuda.is_available() else asked)
    if "case" in names:
        metafunc.parametrize("shape", [case.id for case in sets.named(option("--set"))])


@pytest.fixture
def case(shape: str, request: pytest.FixtureRequest) -> sets.Case:
    return next(case for case in sets.named(request.config.getoption("--set")) if case.id == shape)


@pytest.fixture(scope="session")
def stored(request: pytest.FixtureRequest) -> frozenset[str]:
    """Benchmarks of the file that the run is compared with: none of them may be skipped."""
    path = Path(str(request.config.getoption("benchmark_compare") or ""))
    if not path.is_file():
        return frozenset()
    return frozenset(entry["fullname"] for entry in json.loads(path.read_text())["benchmarks"])


def pytest_benchmark_scale_unit(
    config: pytest.Config, unit: str, benchmarks: Sequence[Mapping[str, Any]], best: str, worst: str, sort: str
) -> tuple[str, float] | None:
    """Clocks and instructions are shown as they are; None leaves times to pytest-benchmark."""
    groups = {entry["group"].split(",")[0] for entry in benchmarks}
    if not groups <= set(COUNTED):
        return None
    return (" and ".join(sorted(COUNTED[group] for group in groups)) if unit == "seconds" else ""), 1.0


def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any]:
    """Device, driver and versions. Counts depend on the compiler and on nothing else."""
    if torch.cuda.is_available():
        return environment.describe(torch.device("cuda"))
    try:
        compilers = {entry.compiler for (arch, _), entry in manifest.installed().kernels.items() if arch in _built()}
    except ObjectError:
        compilers = set()
    return {"emulated": True, "compiler": "; ".join(sorted(compilers))}


def pytest_benchmark_generate_commit_info(config: pytest.Config) -> dict[str, Any]:
    facts = environment.describe(torch.device("cpu"))
    return {"id": facts["commit"], "dirty": facts["changed"]}


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Sequence[Any], output_json: dict[str, Any]) -> None:
    """A count has one round, which its median says; what the tables of a comparison do not ask for is left out."""
    unread = ("data", "ld15iqr", "hd15iqr", "q1", "q3", "iqr_outliers", "stddev_outliers", "total")
    for entry in output_json["benchmarks"]:
        if entry["group"].split(",")[0] in COUNTED:
            entry["stats"] = {name: value for name, value in entry["stats"].items() if name not in unread}
            entry.pop("options")


def pytest_benchmark_compare_machine_info(
    config: pytest.Config, benchmarksession: Any, machine_info: Mapping[str, Any], compared_benchmark: Mapping[str, Any]
) -> None:
    """Numbers of two devices, or counts of two compilers, say nothing about each other."""
    before = compared_benchmark["machine_info"]
    for name in ("device", "compiler", "emulated"):
        if before.get(name) != machine_info.get(name):
            raise pytest.UsageError(
                f"the compared run has {name} {before.get(name)!r}, this one {machine_info.get(name)!r}; compare runs "
                "of one device, or counts of one compiler"
            )
