"""Everything here runs in a process whose HIP runtime is AMD's own: `tox -e hip`, or tools/run_hip.py."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "kernels"), str(TESTS / "stubs"), str(TESTS.parent / "tools")]

ARCH = os.environ.get("MLA_SUITE_HIP_ARCH", "")
SPACE = os.environ.get("MLA_SUITE_HIP_SPACE", "")


def pytest_collection_modifyitems(items):
    for item in items:
        if not ARCH and Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason="no HIP runtime in this process; tox -e hip starts one"))


class Chosen:
    """A driver that hands each launch to one of two: AMD's HIP runtime, or the emulator's own driver."""

    name = "chosen"
    checks_buffers = True

    def __init__(self, session, direct):
        self.arch, self.session, self.direct = session.arch, session, direct
        self.current = session

    @contextmanager
    def use(self, driver):
        before, self.current = self.current, driver
        try:
            yield
        finally:
            self.current = before

    def load(self, entry):
        return self.current.load(entry)

    def bind(self, kernel, *how):
        def start(params, buffers):
            self.current.bind(self.current.load(kernel.entry), *how)(params, buffers)

        return start


@pytest.fixture(scope="session")
def drivers():
    """The HIP runtime's and the emulator's driver, behind every launch of this process."""
    from captures import CapturingSession
    from virtual_hip.user_space import hip_library

    from mla_suite import archs
    from mla_suite.emulator import EmulatorDriver
    from mla_suite.launch import launcher

    record = archs.get(ARCH)
    chosen = Chosen(CapturingSession(record, hip_library(Path(SPACE))), EmulatorDriver(record))
    launcher.install(chosen)
    return chosen


@pytest.fixture
def session(drivers):
    """The HIP session, with nothing left over from another test and nothing left behind."""
    drivers.session.gpu.check()
    noted = len(drivers.session.gpu.hip_memories())
    yield drivers.session
    drivers.session.gpu.check()
    assert len(drivers.session.gpu.hip_memories()) == noted, "memory of hipMalloc was left behind"


@pytest.fixture
def placed(session):
    """A launch of append_kv whose buffers lie in GPU memory."""
    from launches import Placed, recorded

    made = Placed(session, recorded(session))
    yield made
    made.close()
