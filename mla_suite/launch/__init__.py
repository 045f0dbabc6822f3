"""The launch layer: code objects -> launches on torch's streams. Importing it opens no driver, no GPU, no manifest."""

from mla_suite.launch.driver import Buffer, Driver, DriverError, Kernel, LaunchError
from mla_suite.launch.early_launch import early_launch
from mla_suite.launch.launcher import current_arch, declared_kernels, emulate, has_kernel, missing

__all__ = [
    "Buffer",
    "Driver",
    "DriverError",
    "Kernel",
    "LaunchError",
    "current_arch",
    "declared_kernels",
    "early_launch",
    "emulate",
    "has_kernel",
    "missing",
]
