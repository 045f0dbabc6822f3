"""benchmarks/bench_flashmla.py names the commit that it measured, where the checkout or the caller knows it."""

import bench_flashmla
import pytest

from mla_suite.bench import environment


@pytest.mark.parametrize(
    ("given", "checkout", "named"),
    [("", "89abcde", "89abcde"), ("1234567", "89abcde", "1234567"), ("1234567", "", "1234567"), ("", "", "unknown")],
)
def test_a_saved_run_names_its_commit(monkeypatch, given, checkout, named):
    monkeypatch.setattr(environment, "_commit", lambda: {"commit": checkout, "changed": False})
    assert bench_flashmla.environment(given, "cpu")["commit"] == named
