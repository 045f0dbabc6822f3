"""The logs of performance work, csrc/<arch>/**/PERF.md: an id means one try, and the index of sm_90 has every id."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
TABLE = re.compile(r"^\| id \|.*\n\|[-|: ]+\|\n((?:\|.*\n)*)", re.M)
PARAGRAPH = re.compile(r"^(?:- )?\*\*([A-Z]\d+)\. ", re.M)
NAMED = re.compile(r"\b([A-Z])(\d+)(?: to [A-Z](\d+))?\b")


def entries(folder: Path) -> list[str]:
    """Ids of the tries in the logs of an arch: of the rows of a table whose first column is `id`, and of paragraphs."""
    found = []
    for page in sorted(folder.rglob("PERF.md")):
        text = page.read_text()
        found += PARAGRAPH.findall(text)
        for rows in TABLE.findall(text):
            found += [row.split("|")[1].strip() for row in rows.splitlines()]
    return found


def named(index: str) -> set[str]:
    """The ids that a text names: `D3` is one, `D3 to D5` three."""
    found = set()
    for letter, first, last in NAMED.findall(index):
        found.update(f"{letter}{number}" for number in range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize("arch", sorted({path.parent.name for path in CSRC.glob("*/PERF.md")}))
def test_an_id_means_one_try(arch: str) -> None:
    found = entries(CSRC / arch)
    assert found
    assert sorted(found) == sorted(set(found))


def test_the_index_of_sm_90_has_every_try_and_no_other() -> None:
    page = (CSRC / "sm_90" / "PERF.md").read_text()
    index = page.split("\n## Which try had this idea\n")[1].split("\n## ")[0]
    cells = "\n".join(row.partition("| ")[2] for row in index.splitlines() if row.startswith("| "))
    without_links = re.sub(r"\]\([^)]*\)", "]", cells)
    assert named(without_links) == set(entries(CSRC / "sm_90"))


def test_a_range_names_what_lies_between() -> None:
    assert named("D3 to D5, F1 (see [x](#k9))") == {"D3", "D4", "D5", "F1"}
