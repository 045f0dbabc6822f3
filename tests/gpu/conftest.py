"""The GPU suite: `tox -e sm_90`, or its command alone. It ends with one table of what was asked of which operator.

Everything here is about the GPU that torch finds, NVIDIA's or AMD's; without one the files named _on_gpu are skipped.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import decode_calls
import gpu_summary

from mla_suite.archs.sm_90 import decode_splits
from mla_suite.archs.sm_90.costs import Estimate
from mla_suite.core import dispatch

HERE = Path(__file__).parent
ON_CPU_AS_WELL = "test_calls_in_turn"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent == HERE and item.path.stem.endswith("_on_gpu") and ON_CPU_AS_WELL not in item.name:
            item.add_marker(pytest.mark.skip(reason="no GPU that torch can use"))


@pytest.fixture
def native_decode() -> None:
    """Skips where a plain decode has no native kernel on this GPU."""
    decode_calls.require_kernels()


@pytest.fixture
def sm_90_decode() -> None:
    """Skips where the GPU is not of sm_90, or decode has no native kernel on it."""
    decode_calls.require_kernels("sm_90")


@pytest.fixture(autouse=True)
def forgotten_graphs() -> Iterator[None]:
    """Compiled code and its graphs belong to one test. Importing torch._dynamo, 5 s, is left to those that compile."""
    yield
    if torch.cuda.is_available() and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Replaces rules by which sm_90's decode chooses, whatever pays, until the test ends.

    cluster_mode  what blocks of clusters send each other wherever they can: "reduce_o", "exchange_p" or "none"
    shared        whether row tiles may share keys
    pairs         whether clusters walk the SM parts of a plan in pairs
    every_plan    a plan is used however little it saves
    folds         whether CTAs fold batch-invariant splits
    """

    def replace(
        *,
        cluster_mode: str = "",
        shared: bool = True,
        pairs: bool | None = None,
        every_plan: bool = False,
        folds: bool | None = None,
    ) -> None:
        def mode(estimate: Estimate, splits: int) -> str:
            return cluster_mode if estimate.in_pairs(splits) else "none"

        if cluster_mode:
            monkeypatch.setattr(Estimate, "cluster_mode", mode)
        if not shared:
            monkeypatch.setattr(decode_splits, "unmerged", lambda config, *sizes: config)
        if pairs is not None:
            monkeypatch.setattr(decode_splits, "pairing_pays", lambda *sizes: pairs)
        if every_plan:
            monkeypatch.setattr(Estimate, "plan_saves_little", lambda self, splits: False)
        if folds is not None:
            monkeypatch.setattr(Estimate, "folding_pays", lambda self, splits, nodes: folds)
            monkeypatch.setattr(Estimate, "joining_pays", lambda self, splits: folds)
        dispatch.clear_caches()

    yield replace
    monkeypatch.undo()
    dispatch.clear_caches()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    params = getattr(item, "callspec", None)
    given = params.params if params is not None else {}
    subject = " ".join(str(given[name]) for name in ("name", "backend") if name in given)
    check = item.originalname if isinstance(item, pytest.Function) else item.name
    if subject:
        outcome.get_result().cell = [subject, check.removeprefix("test_").replace("_", " ")]


def _cells(reporter: Any) -> dict[tuple[str, str], Counter[str]]:
    """Results by (operator and backend, or file; check), in the order in which they came."""
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for word in gpu_summary.WORDS:
        for report in reporter.stats.get(word, ()):
            if not hasattr(report, "when"):  # a file that could not be collected
                continue
            file, _, name = report.nodeid.partition("::")
            plain = (Path(file).stem, name.split("[")[0].removeprefix("test_").replace("_", " "))
            found[tuple(getattr(report, "cell", plain))][word] += 1
    return found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not torch.cuda.is_available():
        return  # each file was skipped, and its reason says so
    terminalreporter.section(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for line in gpu_summary.table(_cells(terminalreporter)):
        terminalreporter.write_line(line)
