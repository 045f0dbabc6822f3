"""docs/published_work.md: each row is there once, and the tests, commands, environments and files it names exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
from functools import cache
from pathlib import Path

import bench_aiter_3003
import pytest
from test_docs import parse_options

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "published_work.md").read_text()
ROW = re.compile(r"^\| ([A-F]\d+) \| (.+?) \| (.+) \|$", re.M)
NAMED = sorted(set(re.findall(r"`([^`\n]+)`", "\n".join(shown for _, _, shown in ROW.findall(PAGE)))))
TESTS = [name for name in NAMED if "::" in name]
COMMANDS = [name for name in NAMED if name.startswith(("python ", "tox "))]
FILES = [name for name in NAMED if name.startswith(("benchmarks/", "docs/", "ops/", "csrc/"))]


def test_every_row_is_there_once():
    numbers = [number for number, _, _ in ROW.findall(PAGE)]
    last = {number[0]: int(number[1:]) for number in numbers}
    assert numbers == [f"{letter}{n}" for letter in sorted(last) for n in range(1, last[letter] + 1)]


def test_a_row_shows_something_or_says_why_not():
    for number, capability, shown in ROW.findall(PAGE):
        assert "`" in shown or capability.startswith("**needs hardware**"), f"{number} shows nothing"
        assert not shown.strip().startswith("**"), f"{number} says why in the wrong column"


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", TESTS)
def test_a_named_test_exists(name):
    path, function = name.split("::")
    assert function.startswith("test_")
    assert function in functions(ROOT / path)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_named_command_exists(command):
    words = shlex.split(command)
    if words[0] == "tox":
        assert words[1:3] == ["run", "-e"]
        declared = (ROOT / "tox.ini").read_text()
        for environment in words[3].split(","):
            name, number = re.fullmatch(r"([a-z_-]+)(\d*)", environment).groups()  # type: ignore[union-attr]
            sections = re.findall(rf"^\[testenv:{name}(\S*)\]$", declared, re.M)
            assert any(number == "" if not rest else number in rest for rest in sections), environment
    elif words[1] == "-m":
        parse_options(command)
    else:
        assert (ROOT / words[1]).is_file(), words[1]


@pytest.mark.parametrize("name", FILES)
def test_a_named_file_exists(name):
    assert (ROOT / name).exists()


def test_kinds_of_names_are_known():
    """Nothing that a row names passes unlooked at, but for a label of a saved run's row."""
    assert set(NAMED) - {*TESTS, *COMMANDS, *FILES} == {"B64 H128 q1 kv16384"}


def capability(number: str) -> str:
    return next(text for name, text, _ in ROW.findall(PAGE) if name == number)


def test_the_saved_decode_run_is_as_the_row_says():
    rows = json.loads((ROOT / "benchmarks" / "results" / "decode_sm90" / "h200.json").read_text())["rows"]
    names = {f"B{batch} H32 kv{context} q4" for batch, context in bench_aiter_3003.pairs()}
    measured = names & {row["name"] for row in rows}
    assert f"has {len(measured)} of the {len(names)} pairs" in capability("B20")
