"""The launch layer: code objects -> launches on torch's streams. Importing it opens no driver, no GPU, no manifest."""

from mla_suite.launch.driver import Buffer, Driver, DriverError, Kernel, LaunchError
from mla_suite.launch.launcher import bind, current_arch, declared_kernels, emulate, has_kernel

__all__ = [
    "Buffer",
    "Driver",
    "DriverError",
    "Kernel",
    "LaunchError",
    "bind",
    "current_arch",
    "declared_kernels",
    "emulate",
    "has_kernel",
]
