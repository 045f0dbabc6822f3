"""An empty backend of Triton for CPUs, with which vLLM keeps Triton and its interpreter runs vLLM's kernels.

Import this before vLLM. There is no package with a backend that compiles for CPUs.
"""

from __future__ import annotations

import os
import types

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends
from triton.backends.driver import DriverBase


class _NoDriver(DriverBase):
    """A driver that says it is active, and that the interpreter never asks for anything else."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> None:
        return None

    def get_active_torch_device(self) -> None:
        return None

    def get_benchmarker(self) -> None:
        return None


backends["cpu"] = types.SimpleNamespace(driver=_NoDriver, compiler=None)
