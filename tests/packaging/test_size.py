"""The installed package is small: Python, sources, the objects of every arch and their assembly texts."""

import pytest
from built import require_objects
from check_wheel import LIMIT

import mla_suite
from mla_suite.archs import CSRC
from mla_suite.build import manifest

PACKAGE = CSRC.parent


def test_the_installed_package_is_within_the_wheels_limit():
    built = manifest.read(require_objects())
    if len({arch for arch, _ in built.kernels}) < len(mla_suite.archs.names()):
        pytest.skip("only some archs are built here; the wheel carries all of them")
    objects = sum((built.root / name).stat().st_size for name in built.files())
    skipped = ("objects", "__pycache__")
    files = [
        path
        for folder in (PACKAGE, PACKAGE / "ops", PACKAGE / "csrc")  # rglob does not follow links
        for path in folder.resolve().rglob("*")
        if path.is_file() and not any(part in skipped for part in path.parts)
    ]
    code = sum(path.stat().st_size for path in files)
    compiled = sum(path.stat().st_size for path in files if path.suffix == ".py")  # pip's .pyc files, about as large
    assert objects + code + compiled <= LIMIT, (objects, code, compiled)
    assert not [name for name in built.files() if name.endswith(".s")]
