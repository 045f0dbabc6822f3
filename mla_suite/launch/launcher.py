"""Finds the driver and the kernel for a tensor's device, and launches."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from mla_suite import archs
from mla_suite.archs import ArchSpec
from mla_suite.build import instances, manifest
from mla_suite.build.locations import ObjectError
from mla_suite.core import checks, dispatch
from mla_suite.errors import UsageError
from mla_suite.launch.cuda import CudaDriver
from mla_suite.launch.driver import Driver, DriverError, Kernel, LaunchError
from mla_suite.launch.hip import HipDriver

EMULATED_BY_ENVIRONMENT = os.environ.get("MLA_SUITE_EMULATE") or None
"""ArchSpec named by MLA_SUITE_EMULATE when this module was imported; a wrong name is reported at its first use."""

CPU_UNITS = 8  # compute units that a CPU is taken for, so that plans made on it share work out

_prepared: dict[tuple[int | str, str], tuple[Driver, Kernel]] = {}
_drivers: dict[int | str, Driver] = {}
_lock = threading.Lock()


@contextmanager
def emulate(arch: str) -> Iterator[ArchSpec]:
    """Within the block, and in this thread, CPU tensors run the machine code of `arch` in the emulator.

    ValueError for an arch that is unknown or that the emulator cannot execute.
    """
    if not isinstance(arch, str):
        checks.fail("emulate", "arch", f"is {arch!r}", f"it takes a name: {' or '.join(_executed())}", TypeError)
    record = _emulable(arch)
    with checks.having(dispatch.emulated, record):
        yield record


def _emulable(name: str) -> ArchSpec:
    record = archs.get(name)
    if not record.emulable:
        raise ValueError(f"emulate: {name} is not emulated; the emulator executes {' and '.join(_executed())}")
    return record


def _executed() -> list[str]:
    """Names of the archs whose machine code the emulator executes."""
    return [spec.name for spec in archs.specs()[0].values() if spec.emulable]


@cache
def _environment() -> ArchSpec | None:
    try:
        return _emulable(EMULATED_BY_ENVIRONMENT) if EMULATED_BY_ENVIRONMENT else None
    except ValueError as error:
        raise UsageError(f"MLA_SUITE_EMULATE={EMULATED_BY_ENVIRONMENT}: {error}") from None


def current_arch(tensor: torch.Tensor) -> ArchSpec | None:
    """The arch of this tensor's device, with the device's own figures; for a CPU tensor the emulated one.

    None for a device that has no record.
    """
    if tensor.is_cuda:
        return _gpu_arch(tensor.get_device())
    if tensor.is_cpu:
        return dispatch.emulated.get() or _environment()
    return None


@cache
def _gpu_arch(index: int) -> ArchSpec | None:
    """The record with the compute units of the GPU with this index and, where the driver says them, its memory's rate
    and its highest clock."""
    record = archs.specs()[0].get(_gpu_name(index))
    if record is None:
        return None
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return record.on_device(properties.multi_processor_count)
    rate = read_rate(properties.memory_clock_rate, properties.memory_bus_width)
    return record.on_device(properties.multi_processor_count, rate, properties.clock_rate // 1000 or None)


def read_rate(clock_khz: int, bus_bits: int) -> int | None:
    """Bytes a second that kernels read of memory with two transfers a clock: an H100 and an H200 reach 0.94 of the
    product. None where the driver gives neither figure."""
    return int(0.94 * 2 * 1000 * clock_khz * bus_bits / 8) or None


@cache  # asking torch takes 2 us of every call
def compute_units(device: torch.device) -> int:
    """Compute units (SMs) of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_UNITS


def _gpu_name(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName.split(":")[0])
    return f"sm_{properties.major}{properties.minor}"


_declared_suffices: ContextVar[bool] = ContextVar("mla_suite_declared_suffices", default=False)


@contextmanager
def declared_kernels() -> Iterator[None]:
    """Within the block `has_kernel` says yes to kernels that are declared and not built, for documentation."""
    with checks.having(_declared_suffices, True):
        yield


def has_kernel(arch: ArchSpec | str, instance_id: str) -> bool:
    """Whether a code object of that name was built for `arch`. ObjectError when the manifest is damaged."""
    return instance_id in usable_kernels(arch if isinstance(arch, str) else arch.name)


def usable_kernels(arch: str) -> Collection[str]:
    """Ids of the kernels of an arch that `has_kernel` says yes to."""
    if _declared_suffices.get():
        return [instance.id for instance in instances.instances(arch)]
    return manifest.built(arch)


def missing(arch: ArchSpec, *instances: str) -> dispatch.Unsupported | None:
    """The reason why kernels that exist in source cannot run: one was not built. None when all were."""
    kernels = usable_kernels(arch.name)
    for wanted in instances:
        if wanted not in kernels:
            return dispatch.Unsupported(f"kernel {wanted} is not built for {arch.name}; {dispatch.HOW_TO_BUILD}")
    return None


def find(op: str, instance_id: str, tensor: torch.Tensor) -> tuple[Driver, Kernel]:
    """Driver and loaded kernel for a tensor's device. LaunchError names the operator where there is none."""
    index: int | str = tensor.get_device()
    if index == -1:
        index = _emulated_name(op)
    return _prepared.get((index, instance_id)) or _prepare(op, instance_id, index)


def _emulated_name(op: str) -> str:
    record = dispatch.emulated.get() or _environment()
    if record is None:
        raise LaunchError(f"{op}: CPU tensors have no native kernels; name an arch with mla_suite.emulate(...)")
    return record.name


def _prepare(op: str, instance_id: str, index: int | str) -> tuple[Driver, Kernel]:
    """Driver and loaded kernel, kept for the next launch."""
    with _lock:
        driver = _drivers.get(index)
        if driver is None:
            try:
                driver = _drivers[index] = _make_driver(index)
            except (DriverError, ObjectError) as error:
                raise LaunchError(f"{op}: kernel {instance_id}: {error}") from error
    try:
        kernel = driver.load(manifest.installed().find(driver.arch.name, instance_id))
    except (DriverError, ObjectError) as error:
        raise LaunchError(f"{op}: kernel {instance_id} on {driver.arch.name} cannot be loaded: {error}") from error
    _prepared[index, instance_id] = driver, kernel
    return driver, kernel


def _make_driver(index: int | str) -> Driver:
    if isinstance(index, str):
        made: Driver = importlib.import_module("mla_suite.emulator").EmulatorDriver(archs.get(index))
        return made
    record = _gpu_arch(index)
    if record is None:
        known = ", ".join(archs.registered())
        raise DriverError(f"no native kernels for {_gpu_name(index)}; they exist for {known}")
    return HipDriver(record, index) if torch.version.hip else CudaDriver(record, index)


def install(driver: Driver) -> None:
    """Makes `driver` the one that CPU tensors of its emulated arch are launched with in this process.

    LaunchError when launches of that arch were prepared already.
    """
    with _lock:
        if _drivers.get(driver.arch.name, driver) is not driver:
            raise LaunchError(f"{driver.arch.name} is already emulated in this process by another driver")
        _drivers[driver.arch.name] = driver
