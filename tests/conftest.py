"""Every test starts from a seed of its own, printed when it fails; MLA_SUITE_TEST_SEED adds to it for another draw."""

import gc
import os
import platform
import zlib
from collections.abc import Callable, Iterator
from importlib import metadata

import pytest
import torch

from mla_suite import archs
from mla_suite.archs import ArchSpec
from mla_suite.build import BuildError, KernelEntry, compilers, manifest
from mla_suite.core import dispatch
from mla_suite.launch import launcher

# These tests need a process whose HIP runtime is AMD's own; `tox -e hip` starts it and sets the variable.
collect_ignore = [] if os.environ.get("MLA_SUITE_HIP_ARCH") else ["hip"]
# What imports and parameters make stays until the end: a collector that looks at it all the time takes a tenth longer.
gc.disable()
BASE = int(os.environ.get("MLA_SUITE_TEST_SEED", "0"))


def pytest_report_header() -> str:
    """Names the version of every installed package, so that a log says what it tested."""
    found = {f"{each.metadata['Name']}=={each.version}" for each in metadata.distributions()}
    return " ".join([f"python=={platform.python_version()}", *sorted(found, key=str.lower)])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest test first, so that no core waits for it at the end."""
    items.sort(key=lambda item: item.name != "test_kernels_in_the_interpreter")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)  # at Python's 700 the collector takes 7 % of the time of kernel and operator tests
    gc.enable()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> int:
    seed = BASE + zlib.crc32(request.node.nodeid.encode())
    print(f"torch.manual_seed({seed}); MLA_SUITE_TEST_SEED={BASE}")
    torch.manual_seed(seed)
    return seed


@pytest.fixture(scope="session")
def archs_left_out() -> frozenset[str]:
    """The archs that MLA_SUITE_ARCHS left out of the build; none where nothing was built, which fails tests."""
    root = manifest.locate()
    if isinstance(root, str):
        return frozenset()
    return frozenset(archs.names()) - {arch for arch, _ in manifest.read(root).kernels}


@pytest.fixture(autouse=True)
def _no_kernels_to_emulate(archs_left_out: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that emulates an arch which was left out of the build is skipped."""
    emulable = launcher._emulable

    def built(name: str) -> ArchSpec:
        record = emulable(name)
        if name in archs_left_out:
            pytest.skip(f"no kernels for {name} are built here; run `python -m mla_suite build --arch {name}`")
        return record

    monkeypatch.setattr(launcher, "_emulable", built)


@pytest.fixture
def altered_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[KernelEntry, str], str]], None]]:
    """altered_kernels(change): from now on the emulator runs change(entry, text) in the place of a kernel's text."""
    usual = KernelEntry.read_text

    def alter(change: Callable[[KernelEntry, str], str]) -> None:
        monkeypatch.setattr(KernelEntry, "read_text", lambda entry: change(entry, usual(entry)))
        monkeypatch.setattr(launcher, "_prepared", {})
        monkeypatch.setattr(launcher, "_drivers", {})
        dispatch.clear_caches()

    yield alter
    dispatch.clear_caches()


@pytest.fixture(scope="session")
def amd_compiler() -> compilers.AmdCompiler:
    """The compiler that a build would use."""
    try:
        return compilers.find_amd()
    except BuildError as error:
        pytest.skip(str(error))
