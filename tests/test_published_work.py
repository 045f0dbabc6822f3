"""docs/published_work.md: each row is there once, and the tests, commands, environments and files it names exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import bench_aiter_3003
import pytest
from test_docs import parse_options

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "published_work.md").read_text()
ROW = re.compile(r"^\| ([A-F]\d+) \| (.+?) \| (.+) \|$", re.M)
NAMED = sorted(set(re.findall(r"`([^`\n]+)`", "\n".join(shown for _, _, shown in ROW.findall(PAGE)))))


def test_every_row_is_there_once():
    numbers = [number for number, _, _ in ROW.findall(PAGE)]
    last = {number[0]: int(number[1:]) for number in numbers}
    assert numbers == [f"{letter}{n}" for letter in sorted(last) for n in range(1, last[letter] + 1)]


def test_a_row_shows_something_or_says_why_not():
    for number, capability, shown in ROW.findall(PAGE):
        assert "`" in shown or capability.startswith("**needs hardware**"), f"{number} shows nothing"
        assert not shown.strip().startswith("**"), f"{number} says why in the wrong column"


@pytest.mark.parametrize("name", NAMED)
def test_what_a_row_names_exists(name):
    """A test, an environment of tox, a command, a file, or the label of a saved run's row."""
    words = shlex.split(name)
    if "::" in name:
        path, function = name.split("::")
        assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.M)
        assert function.startswith("test_")
    elif words[0] == "tox":
        assert words[1:3] == ["run", "-e"]
        declared = (ROOT / "tox.ini").read_text()
        for environment in words[3].split(","):
            stem, number = re.fullmatch(r"([a-z_-]+)(\d*)", environment).groups()  # type: ignore[union-attr]
            sections = re.findall(rf"^\[testenv:{stem}(\S*)\]$", declared, re.M)
            assert any(number == "" if not rest else number in rest for rest in sections), environment
    elif words[:2] == ["python", "-m"]:
        parse_options(name)
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), words[1]
    else:
        assert name == "B64 H128 q1 kv16384" or (ROOT / name).exists()


def capability(number: str) -> str:
    return next(text for name, text, _ in ROW.findall(PAGE) if name == number)


def test_the_saved_decode_run_is_as_the_row_says():
    rows = json.loads((ROOT / "benchmarks" / "results" / "decode_sm90" / "h200.json").read_text())["rows"]
    names = {f"B{batch} H32 kv{context} q4" for batch, context in bench_aiter_3003.pairs()}
    measured = names & {row["name"] for row in rows}
    assert f"has {len(measured)} of the {len(names)} pairs" in capability("B20")
