"""Rows of docs/rocm.md are put in their places, are of environments that exist, and count the kernels of today."""

import datetime
import re

import pytest
import rocm_matrix

from mla_suite.build.instances import instances


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n\n{rocm_matrix.HEAD}| `b` | two 2 | 2026-01-31 | old |\n\nafter\n")
    return path


def test_rows_are_sorted_and_replaced(page):
    rocm_matrix.put("c", ["three 3"], "third", page)
    rocm_matrix.put("a", ["one 1", "more 1.1"], "first", page)
    rocm_matrix.put("b", ["two 2"], "new", page)
    day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    rows = (
        f"| `a` | one 1, more 1.1 | {day} | first |\n| `b` | two 2 | {day} | new |\n| `c` | three 3 | {day} | third |\n"
    )
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


def test_the_page_counts_the_kernels_that_a_build_makes():
    text = rocm_matrix.PAGE.read_text()
    count = {arch: len(list(instances(arch))) for arch in ("gfx942", "gfx950")}
    total = sum(count.values())
    assert f"{count['gfx942']} kernels for gfx942 and {count['gfx950']} for gfx950, {total} in all;" in text
    rows = dict(re.findall(r"^\| `(hip\d+)` \|.*\| comgr accepts ([^;]*);", text, re.M))
    assert set(rows) == {"hip57", "hip64", "hip72"}
    for name, accepted in rows.items():
        found = {arch: int(number) for number, arch in re.findall(r"(\d+) objects of (gfx\d+)", accepted)}
        known = {arch: count[arch] for arch in (["gfx942"] if name == "hip57" else ["gfx942", "gfx950"])}
        assert found == known, f"run `tox run -e {name} -- --record`"
