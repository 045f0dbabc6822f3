"""Build the objects of a checkout unless the ones it has are those that a build would make.

usage: python tools/need_objects.py ARCH[,ARCH]

`python -m mla_suite build` takes the compilers of another environment for others and compiles everything again.
Here a compiler's version counts and not its path, so several tox environments share one build: the one of an editable
install, or that of the first of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from mla_suite import archs as arch_records
from mla_suite.build import BuildError, ObjectError, compilers, manifest
from mla_suite.build.instances import instances
from mla_suite.emulator import core
from mla_suite.launch.driver import DriverError


def lacking(archs: Sequence[str]) -> str:
    """A clause on the first thing that a build would make or replace; empty where the objects are up to date."""
    try:
        made = manifest.installed()
        core.load()
        for arch in archs:
            version = _compiler(arch)
            for item in instances(arch):
                entry = made.find(arch, item.id)
                if entry.compiler != version:
                    return f"{arch} {item.id} is of {entry.compiler}, not of {version}"
                entry.read_object()
                if entry.text:
                    entry.read_text()
    except (BuildError, DriverError, ObjectError) as error:
        return str(error)
    return ""


def _compiler(arch: str) -> str:
    """The version of the compiler that a build would use for an arch. BuildError where there is none."""
    if arch_records.get(arch).vendor == "amd":
        return compilers.packaged().version
    nvidia = compilers.find_nvidia()
    if nvidia is None:
        raise BuildError(f"no nvcc of CUDA 12 or newer serves here for {arch}")
    return nvidia.version


def main(names: str) -> int:
    why = lacking(names.split(","))
    if not why:
        print(f"the objects of {names} are up to date")
        return 0
    print(f"building the objects of {names}: {why}", flush=True)
    status = subprocess.run([sys.executable, "-m", "mla_suite", "build", "--arch", names]).returncode
    manifest.forget()
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
