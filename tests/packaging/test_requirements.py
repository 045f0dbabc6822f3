"""The requirements that pip installs: a build's compilers are pinned, and the same ones wherever they are named."""

import re
import sys
from pathlib import Path

from mla_suite.build.compilers import PINNED_ZIGLANG

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPILERS = ("ziglang", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")


def requirements(lines):
    """Name -> version specifier and marker of each requirement."""
    return {re.match(r"[\w-]+", line)[0]: line[re.match(r"[\w-]+", line).end() :] for line in lines}


def test_a_build_from_source_brings_its_compilers():
    for lines in (PROJECT["build-system"]["requires"], PROJECT["project"]["optional-dependencies"]["build"]):
        named = requirements(lines)
        assert {"ninja", *COMPILERS} <= set(named)
        pinned = {name for name in COMPILERS if named[name].startswith("==")}
        assert {"nvidia-cuda-runtime"} >= set(COMPILERS) - pinned, "every machine makes the same objects"


def test_the_compilers_are_the_same_wherever_they_are_named():
    isolated = requirements(PROJECT["build-system"]["requires"])
    extra = requirements(PROJECT["project"]["optional-dependencies"]["build"])
    for name in COMPILERS[:-1]:
        assert extra[name] == isolated[name]
    assert isolated["ziglang"].split(";")[0] == f"=={PINNED_ZIGLANG}"
    environments = (ROOT / "tox.ini").read_text()
    for name in COMPILERS[:-1]:
        pin = isolated[name].split(";")[0]
        rows = [line for line in environments.splitlines() if re.match(rf"    {name}\b", line)]
        assert all(line.strip().split(";")[0] == name + pin for line in rows), rows
    headers = [*re.findall(r"nvidia-cuda-runtime(\S+?)[;\s]", environments), extra["nvidia-cuda-runtime"].split(";")[0]]
    release = extra["nvidia-cuda-nvcc"].split(";")[0].removeprefix("==")
    major, minor, _ = map(int, release.split("."))
    assert set(headers) == {f">={release},<{major}.{minor + 1}"}, "nvcc cannot compile the headers of a later release"
    assert "mla_suite[build]" in PROJECT["project"]["optional-dependencies"]["test"]
