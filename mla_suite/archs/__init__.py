"""GPU architectures: what each one is (`ArchSpec`), and everything that varies with it, behind one class.

An arch has a folder in `csrc/` with its sources and `arch.toml`, and a folder here with a `Kernels` class that says for
each operator which kernel takes a problem. An arch without a folder here has a record and no native kernels.

Importing this package needs neither torch nor a GPU: the build reads records, and kernels are imported at first use.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mla_suite.archs.spec import CSRC, ArchSpec, get, names, read_arch_file

if TYPE_CHECKING:
    from mla_suite.archs.base import ArchKernels

__all__ = [
    "CSRC",
    "ArchSpec",
    "get",
    "kernels",
    "names",
    "needed_gpu",
    "no_kernels",
    "read_arch_file",
    "registered",
    "specs",
]


def specs() -> tuple[dict[str, ArchSpec], dict[str, str]]:
    """(records by name, sentences by name of the records that are wrong): one bad record leaves the others usable."""
    good: dict[str, ArchSpec] = {}
    bad: dict[str, str] = {}
    for name in names():
        try:
            good[name] = get(name)
        except ValueError as error:
            bad[name] = str(error)
    return good, bad


@cache
def registered() -> tuple[str, ...]:
    """Names of the archs that have native kernels: a record and a folder here."""
    return tuple(name for name in names() if find_spec(f"{__name__}.{name}") is not None)


@cache
def kernels(arch: ArchSpec) -> ArchKernels | None:
    """The native kernels of an arch; None for one that has none, or whose wavefront is not theirs."""
    if arch.name not in registered():
        return None
    made: ArchKernels = importlib.import_module(f"{__name__}.{arch.name}").Kernels(arch)
    return made if made.wavefront == arch.wavefront else None


def no_kernels(arch: ArchSpec | None) -> str:
    """Why `kernels` gives none, as a sentence; None is a device that is no arch."""
    if arch is None:
        return needed_gpu()
    if arch.name in registered():
        return f"the kernels of {arch.name} are not written for its wavefronts of {arch.wavefront} lanes"
    return f"{needed_gpu()}, not {arch.name}"


def needed_gpu() -> str:
    """The devices that native kernels need, as a sentence: the reason for every other device."""
    gpus = registered()
    emulated = next((name for name in gpus if name in (good := specs()[0]) and good[name].emulable), None)
    hint = f' (or `mla_suite.emulate("{emulated}")` on a CPU)' if emulated else ""
    return f"native kernels need a {', '.join(gpus[:-1])} or {gpus[-1]} GPU{hint}"
