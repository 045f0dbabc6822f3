"""One call of pytest can collect all tests, and every import between them finds the one file of that name."""

from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_two_files_share_a_name() -> None:
    """The folders of tests are no packages, so a file is imported by its bare name."""
    places = defaultdict(list)
    for path in TESTS.rglob("*.py"):
        places[path.name].append(str(path.relative_to(TESTS)))
    del places["conftest.py"]  # pytest itself tells these apart
    assert [paths for paths in places.values() if len(paths) > 1] == []
