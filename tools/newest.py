"""Prints which packages of this environment are newer than the versions that a constraints file pins.

`tox run -e newest` runs it before the tests of integrations, so that a failure there stands beside its likely cause:

    python tools/newest.py constraints.txt
"""

import argparse
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def pinned(constraints: str) -> dict[str, str]:
    """The version of every package that a constraints file pins for this interpreter and platform."""
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {
        each.name: str(each.specifier).removeprefix("==")
        for each in requirements
        if each.marker is None or each.marker.evaluate()
    }


def main(constraints: Path) -> None:
    for name, tested in pinned(constraints.read_text()).items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if found != tested:
            print(f"{name} {tested} -> {found}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("constraints", type=Path, help="the constraints file")
    main(**vars(parser.parse_args()))
