"""A row of docs/rocm.md is put in its place, and every environment that the page has a row for exists."""

import re
from pathlib import Path

import pytest
import rocm_matrix

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n\n{rocm_matrix.HEAD}| `b` | two 2 | old |\n\nafter\n")
    return path


def test_rows_are_sorted_and_replaced(page):
    rocm_matrix.put("c", ["three 3"], "third", page)
    rocm_matrix.put("a", ["one 1", "more 1.1"], "first", page)
    rocm_matrix.put("b", ["two 2"], "new", page)
    rows = "| `a` | one 1, more 1.1 | first |\n| `b` | two 2 | new |\n| `c` | three 3 | third |\n"
    assert page.read_text() == f"before\n\n{rocm_matrix.HEAD}{rows}\nafter\n"


def test_every_row_is_of_an_environment_and_names_the_versions_it_declares():
    import debian_space

    text = rocm_matrix.PAGE.read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.M)
    assert {name for name, _ in rows} == {"hip", *debian_space.SPACES}
    for name, packages in rows:
        declared = debian_space.SPACES["hip72" if name == "hip" else name].packages
        named = dict(package.split(" ", 1) for package in packages.split(", "))
        assert {package: named[package].startswith(version) for package, version in declared.items()} == dict.fromkeys(
            declared, True
        )
