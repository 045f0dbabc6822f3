"""The wheel's name says which machines can install it, and the machine that makes it is one of them."""

import runpy
import sysconfig
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "setup.py"


@pytest.mark.parametrize(
    ("machine", "tag"), [("linux-x86_64", "manylinux_2_28_x86_64"), ("linux-aarch64", "linux_aarch64")]
)
def test_a_wheel_is_of_the_machine_that_makes_it(monkeypatch, machine, tag):
    setuptools = pytest.importorskip("setuptools", minversion="77", reason="setuptools is too old to build a wheel")
    found = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: found.update(given))
    runpy.run_path(str(SETUP))
    monkeypatch.setattr(sysconfig, "get_platform", lambda: machine)
    command = found["cmdclass"]["bdist_wheel"](found["distclass"]({"name": "mla_suite"}))
    command.ensure_finalized()
    assert command.get_tag() == ("py3", "none", tag)
