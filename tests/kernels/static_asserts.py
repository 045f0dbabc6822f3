"""Figures that Python has of an sm_90 header, held against the compiler's view of it."""

import subprocess

import pytest

from mla_suite.archs import CSRC
from mla_suite.build import compilers


def equal(of, values):
    """Lines that compare expressions of C++ with figures of Python, for the instance that they are `of`."""
    return [f'static_assert({expression} == {value}, "{expression} of {of}");' for expression, value in values.items()]


def assert_compiles(folder, headers, lines):
    """A source of these headers and static_asserts compiles. Skips where there is no nvcc."""
    nvidia = compilers.find_nvidia()
    if nvidia is None:
        pytest.skip("nvcc is not installed")
    source = folder / "asserts.cu"
    included = [f'#include "sm_90/{header}"' for header in headers]
    source.write_text("\n".join([*included, "using namespace mla::sm_90;", *lines]) + "\n")
    command = [*nvidia.to_object("sm_90"), f"-I{CSRC}", str(source), "-o", str(folder / "asserts.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
