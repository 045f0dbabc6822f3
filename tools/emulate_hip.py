"""Run an operator's sample through AMD's own HIP runtime, with the emulator as its GPU.

usage: python tools/emulate_hip.py DIR decode --on gfx950

DIR is a ROCm 7.2: its root, or a folder into which debian_space.py unpacked its packages. The other arguments, what is
printed and the exit status are those of `python -m mla_suite emulate`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from virtual_hip import user_space
from virtual_hip.hip_session import HipSession

from mla_suite import archs
from mla_suite.cli import emulate
from mla_suite.errors import UsageError
from mla_suite.launch import DriverError, launcher


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hip", metavar="DIR", type=Path, help="a ROCm 7.2 whose libamdhip64 launches the kernels")
    emulate.add_arguments(parser)
    given = parser.parse_args(argv)
    try:
        if not user_space.entered(given.hip):
            return subprocess.run(user_space.command(given.hip, [sys.executable, __file__, *argv])).returncode
        record = archs.get(given.on)
        if not record.emulable:
            parser.error(f"{given.on} is not emulated; the emulator executes gfx942 and gfx950")
        launcher.install(HipSession(record, user_space.hip_library(given.hip)))
        return emulate.run(given)
    except UsageError as error:
        parser.error(str(error))
    except (DriverError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
