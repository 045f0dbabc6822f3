"""Build the AMD objects of a checkout unless the ones it has are those that a build would make.

usage: python tests/packaging/need_objects.py ARCH[,ARCH]

`python -m mla_suite build` takes the ziglang of another environment for another compiler and compiles everything again.
Here the compiler's version counts and not its path, so several tox environments share one build: the one of an editable
install, or that of the first of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from mla_suite.build import BuildError, ObjectError, compilers, manifest
from mla_suite.build.instances import instances
from mla_suite.emulator import core
from mla_suite.launch.driver import DriverError


def lacking(archs: Sequence[str]) -> str:
    """A clause on the first thing that a build would make or replace; empty where the objects are up to date."""
    try:
        made, version = manifest.installed(), compilers.packaged().version
        core.load()
        for arch in archs:
            for item in instances(arch):
                entry = made.find(arch, item.id)
                if entry.compiler != version:
                    return f"{arch} {item.id} is of {entry.compiler}, not of {version}"
                entry.read_object()
                entry.read_text()
    except (BuildError, DriverError, ObjectError) as error:
        return str(error)
    return ""


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
