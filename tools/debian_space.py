"""Fetch Debian packages of another suite and unpack them into a folder; nothing is installed.

Prints the folder of a user space, fetched if it is not there.

The mirror is the one that this machine's own apt is configured with, asked for another suite; apt verifies signatures
as ever. A user space is kept in `$MLA_SUITE_SPACES`, else in this user's cache, by a name that its declaration gives.
The exit status is 77 where apt, the suite or a pinned version cannot be had, with one sentence that says which.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from skip import skip

from mla_suite.build.locations import cache_root, locked

RECORD = "packages.json"
OS_RELEASE = Path("/etc/os-release")


class Unavailable(Exception):
    """A user space that cannot be had here; the text is a sentence."""


@dataclass(frozen=True)
class Space:
    """Packages with the upstream version each must have, the suites they are taken from, and headers to unpack alone.

    Dependencies come with `packages` at whatever version the suites hold; `alone` is unpacked without any.
    """

    suites: tuple[str, ...]
    packages: Mapping[str, str]
    alone: Mapping[str, str] = field(default_factory=dict)


SPACES = {
    "hip57": Space(
        ("trixie",),
        {"libamdhip64-5": "5.7.1", "libamd-comgr2": "6.0", "libhsa-runtime64-1": "6.1.2"},
        {"libamdhip64-dev": "5.7.1"},
    ),
    "hip64": Space(
        ("forky",),
        {"libamdhip64-6": "6.4.3", "libamd-comgr3": "7.0.2", "libhsa-runtime64-1": "6.4.3"},
        {"libamdhip64-dev": "6.4.3"},
    ),
    "hip72": Space(
        ("sid", "experimental"),
        {"libamdhip64-7": "7.2.4", "libamd-comgr3": "7.2.4", "libhsa-runtime64-1": "7.2.4"},
        {"libamdhip64-dev": "7.2.4"},
    ),
    "clang22": Space(("forky",), {"clang-22": "1:22.1.8", "lld-22": "1:22.1.8"}),
}


def fetch(name: str) -> Path:
    """The folder of a user space, unpacked now if it was not. Unavailable says why it cannot be had here."""
    space = SPACES[name]
    digest = hashlib.sha256(repr(space).encode()).hexdigest()[:12]
    base = _base()
    folder = base / f"{name}-{digest}"
    if (folder / RECORD).is_file():
        return folder
    with locked(base):
        if not (folder / RECORD).is_file():
            _fetch(space, base, folder)
    return folder


def versions(folder: Path) -> dict[str, str]:
    """Version of every package in a user space that `fetch` returned."""
    found: dict[str, str] = json.loads((folder / RECORD).read_text())
    return found


def named(name: str, folder: Path) -> list[str]:
    """The packages that a user space is there for, with their versions, as tables and messages name them."""
    there = versions(folder)
    return [f"{package} {there[package]}" for package in SPACES[name].packages]


def _base() -> Path:
    named = os.environ.get("MLA_SUITE_SPACES")
    root = Path(named) if named else cache_root()
    if root is None:
        raise Unavailable("there is no folder to unpack Debian packages in; set MLA_SUITE_SPACES")
    base = root if named else root / "debian"
    base.mkdir(parents=True, exist_ok=True)
    return base


def _fetch(space: Space, base: Path, folder: Path) -> None:
    if platform.machine() != "x86_64" or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise Unavailable("Debian packages are fetched with apt-get and dpkg-deb on x86-64, which this machine lacks")
    work = base / f".fetching-{folder.name}"
    shutil.rmtree(work, ignore_errors=True)
    for part in ("lists/partial", "archives/partial", "alone", "unpacked"):
        (work / part).mkdir(parents=True)
    environment = {**os.environ, "APT_CONFIG": str(_configure(work, space.suites)), "LC_ALL": "C"}
    done = subprocess.run(["apt-get", "update"], env=environment, capture_output=True, text=True)
    if done.returncode or re.search(r"^(E|Err)[: ]", done.stdout + done.stderr, re.M):
        raise Unavailable(f"apt has no suite {' or '.join(space.suites)} here: {_reason(done)}")
    for wanted, into, command in (
        (space.packages, work / "archives", ["install", "--download-only", "--yes"]),
        (space.alone, work / "alone", ["download"]),
    ):
        if not wanted:
            continue
        named = [f"{package}={version}*" for package, version in wanted.items()]
        done = subprocess.run(["apt-get", *command, *named], env=environment, cwd=into, capture_output=True, text=True)
        if done.returncode:
            suites = " and ".join(space.suites)
            raise Unavailable(f"{' '.join(named)} cannot be had from {suites}: {_reason(done)}")
    record = {}
    for package in sorted([*work.glob("archives/*.deb"), *work.glob("alone/*.deb")]):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(work / "unpacked")], check=True)
        shown = subprocess.run(
            ["dpkg-deb", "--show", "--showformat=${Package} ${Version}", str(package)],
            check=True,
            capture_output=True,
            text=True,
        )
        title, version = shown.stdout.split()
        record[title] = version
    (work / "unpacked" / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(work / "unpacked", folder)
    shutil.rmtree(work)


def _configure(work: Path, suites: tuple[str, ...]) -> Path:
    """An apt configuration whose state lies in `work`, over this machine's own, which names proxies and keys."""
    mirror = _mirror()
    (work / "status").touch()
    (work / "sources.list").write_text("".join(f"deb [arch=amd64] {mirror} {suite} main\n" for suite in suites))
    places = {
        "Dir::State": work,
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",  # empty: every dependency is fetched, the C library included
        "Dir::Cache": work,
        "Dir::Cache::archives": work / "archives",
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Architecture": "amd64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "APT::Update::Post-Invoke-Success": "",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "true",
    }
    path = work / "apt.conf"
    path.write_text("".join(f'{key} "{value}";\n' for key, value in places.items()))
    return path


def _mirror() -> str:
    """Where this machine's apt has its own Debian release from."""
    release = OS_RELEASE.read_text() if OS_RELEASE.is_file() else ""
    codename = re.search(r'^VERSION_CODENAME="?([\w-]+)', release, re.M)
    if not re.search(r"^ID=debian$", release, re.M) or codename is None:
        raise Unavailable("the user spaces are Debian's packages, and this machine is not a Debian release")
    done = subprocess.run(["apt-get", "update", "--print-uris"], capture_output=True, text=True)
    found = re.search(rf"'([^']+?)/?/dists/{codename[1]}/", done.stdout)
    if found is None:
        raise Unavailable(f"this machine's apt names no mirror of {codename[1]}")
    return found[1]


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith(("E:", "Err"))]
    return lines[0].removeprefix("E: ") if lines else f"apt-get ended with {done.returncode}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SPACES, help="the user space")
    try:
        print(fetch(parser.parse_args().name))
    except Unavailable as error:
        sys.exit(skip(str(error)))
