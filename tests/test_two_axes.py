"""Two axes, two places: names of archs and vendors, and tests of configurations' types, stay where they belong."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Folders and files that know hardware.
KNOW_HARDWARE = (
    "mla_suite/archs/",
    "mla_suite/emulator/",
    "mla_suite/build/",
    "mla_suite/launch/cuda.py",
    "mla_suite/launch/hip.py",
    "mla_suite/launch/tensor_map.py",
)
# Whole files that name hardware for a reason that is no choice of a kernel.
NAMED = {
    "mla_suite/cli/": "choices and help of the command line",
    "mla_suite/bench/page.py": "prose of the report",
    "mla_suite/bench/plots.py": "prose of the report",
    "mla_suite/bench/environment.py": "the vendors' driver files in /proc and /sys",
    "mla_suite/bench/sets.py": "names of other projects' tasks",
    "mla_suite/models/": "the layer's Triton kernels, which are no operator of the suite",
    "mla_suite/kv_formats/": "the arch whose fp8 flavour a format has",
}
NAMES = re.compile(r"gfx\d|sm_\d\d|hopper|cdna|\bnvidia\b|\bamd\b|\bvendor\b", re.IGNORECASE)


def sources() -> list[Path]:
    """Python files of the package and the operators."""
    found = [*(ROOT / "mla_suite").rglob("*.py"), *(ROOT / "ops").rglob("*.py")]
    return [
        path
        for path in found
        if "csrc" not in path.parts and "objects" not in path.parts and "__pycache__" not in path.parts
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix().replace("mla_suite/ops/", "ops/")


SOURCES = sorted({name_of(path) for path in sources()})


def code_of(name: str) -> list[tuple[int, str]]:
    """(line, token) of names and strings; comments and docstrings may say on which device a number was measured."""
    found = []
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO((ROOT / name).read_text()).readline):
        docstring = token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type in (tokenize.NAME, tokenize.STRING) and not docstring:
            found.append((token.start[0], token.string))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            previous = token.type
    return found


@pytest.mark.parametrize("name", [n for n in SOURCES if not n.startswith((*KNOW_HARDWARE, *NAMED))])
def test_no_arch_or_vendor_is_named(name):
    named = [f"{name}:{line}: {text}" for line, text in code_of(name) if NAMES.search(text)]
    assert not named, "\n".join(named)


@pytest.mark.parametrize("name", [n for n in SOURCES if not n.startswith("mla_suite/archs/")])
def test_no_configuration_is_tested_for_its_type(name):
    tested = re.findall(r"isinstance\([^()]*config[^()]*\)", (ROOT / name).read_text())
    assert not tested


@pytest.mark.parametrize("part", ["mla_suite/archs/common/", "mla_suite/archs/cdna/"])
def test_shared_code_tests_no_configuration_for_its_type(part):
    """An arch's differences are its methods, within `archs/` too."""
    for name in (n for n in SOURCES if n.startswith(part)):
        assert "isinstance(config" not in (ROOT / name).read_text(), name
