"""Tuned tables: look-up by shape, user rows before shipped ones, and a linter that names file and line."""

import errno
import os

import pytest

from mla_suite.archs.combine import FORMAT
from mla_suite.core import tuning
from mla_suite.core.tuning import Choice, Format, Integer

FORM = Format(
    op="sum",
    exact=(Integer("heads", 1, 128), Choice("kv_format", ("bf16", "fp8"))),
    near=(Integer("batch", 1, 4096), Integer("context", 1, 1 << 20)),
    config=(Integer("num_splits", 1, 512),),
    refuse=lambda arch, values: "13 splits are unlucky" if values["num_splits"] == 13 else None,
)
HEADER = ",".join(FORM.header)


def counted(heads=16, kv_format="bf16", batch=1, context=1024, num_splits=4, **more):
    row = {"kind": "counted", "date": "2026-11-01", "commit": "1a2b3c4d"}
    row |= {"heads": heads, "kv_format": kv_format, "batch": batch, "context": context, "num_splits": num_splits}
    return FORM.line(row | more)


def measured(**more):
    row = {"kind": "measured", "microseconds": "41.3", "spread_percent": "0.4", "device": "H200"}
    row |= {"compute_units": "132", "driver": "580.159.04", "software": "CUDA 13.0"}
    return counted(**(row | more))


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Writes tables: `tables(shipped=[...], user=[...])` -> their paths."""
    monkeypatch.setenv("MLA_SUITE_TUNED_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "ops")
    tuning.clear_cache()

    def write(shipped=None, user=None):
        paths = tmp_path / "ops" / "sum" / "tuned" / "gfx950.csv", tmp_path / "user" / "sum" / "gfx950.csv"
        for path, lines in zip(paths, (shipped, user), strict=True):
            if lines is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("\n".join([HEADER, *lines]) + "\n")
        tuning.clear_cache()
        return paths

    yield write
    tuning.clear_cache()


def find(batch, context, heads=16, kv_format="bf16"):
    return tuning.find(FORM, "gfx950", {"heads": heads, "kv_format": kv_format, "batch": batch, "context": context})


def test_exact_then_nearest_in_log_space(tables):
    table, _ = tables(shipped=[counted(batch=1, num_splits=1), counted(batch=16, num_splits=2), counted(batch=256)])
    exact = find(16, 1024)
    assert exact.row.values["num_splits"] == 2
    assert exact.reason == f"counted row {table}:3"
    assert find(70, 1024).row.values["batch"] == 256  # by logarithm; 16 is nearer by difference
    assert find(60, 1024).row.values["batch"] == 16
    assert find(60, 1024).reason == f"nearest counted row {table}:3 (batch 16 for 60)"


def test_exact_columns_are_never_approximated(tables):
    tables(shipped=[counted()])
    assert find(1, 1024, heads=32) is None
    assert find(1, 1024, kv_format="fp8") is None
    assert tuning.find(FORM, "gfx942", {"heads": 16, "kv_format": "bf16", "batch": 1, "context": 1024}) is None


def test_user_rows_override_and_are_named(tables):
    _, own = tables(shipped=[counted(num_splits=4), counted(batch=64, num_splits=8)], user=[counted(num_splits=9)])
    match = find(1, 1024)
    assert match.row.values["num_splits"] == 9
    assert f"{own}:2" in match.reason
    assert find(64, 1024).row.values["num_splits"] == 8
    assert find(8, 1024).row.values["num_splits"] == 9  # as near as the shipped row


def test_user_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("MLA_SUITE_TUNED_DIR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuning.user_directory() == tmp_path / "mla_suite" / "tuned"
    monkeypatch.setenv("MLA_SUITE_TUNED_DIR", "/elsewhere")
    assert str(tuning.user_directory()) == "/elsewhere"


def test_a_user_without_a_home_has_no_tables(monkeypatch):
    """As in a container that is run under a number of no account."""
    for name in ("MLA_SUITE_TUNED_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    assert tuning.user_directory().is_absolute()
    assert not (tuning.user_directory() / "combine" / "sm_90.csv").is_file()
    assert tuning.rows(FORMAT, "sm_90")


@pytest.mark.parametrize("variable", ["HOME", "XDG_CONFIG_HOME"])
def test_a_user_who_may_not_enter_the_home_has_no_tables(monkeypatch, tmp_path, variable):
    """As in a container whose image sets root's HOME and that is run under another number."""
    for name in ("MLA_SUITE_TUNED_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    honest = os.stat

    def refusing(path, *args, **kwargs):
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return honest(path, *args, **kwargs)

    tuning.clear_cache()
    monkeypatch.setattr(os, "stat", refusing)
    assert tuning.rows(FORMAT, "sm_90")


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ([counted(heads=129)], 2, "heads is '129'; it takes an integer in 1..128"),
        ([counted(heads="016")], 2, "heads is '016'"),
        ([counted(heads="1e1")], 2, "heads is '1e1'"),
        ([counted(heads="")], 2, "heads is ''"),
        ([counted(kv_format="fp4")], 2, "kv_format is 'fp4'; it takes bf16, fp8"),
        ([counted(num_splits=13)], 2, "not legal on gfx950: 13 splits are unlucky"),
        ([counted(), counted()], 3, "a shape has one row"),
        ([counted(batch=2), counted(batch=1)], 3, "rows are sorted"),
        ([counted(context=2048), counted(context=16384)], None, ""),  # as numbers, not as text
        ([counted() + ",1"], 2, "cells; the header has"),
        ([counted(), ""], 3, "cells; the header has"),
        ([counted(source="../../etc/passwd")], 2, "source is '../../etc/passwd'; a cell has"),
        ([counted(source='"a')], 2, "a cell has"),
        ([counted(kind="guessed")], 2, "kind is 'guessed'; it takes measured, published, counted"),
        ([counted(microseconds="3.0")], 2, "counters give bounds, never microseconds"),
        ([counted(commit="")], 2, "a counted row needs commit"),
        ([counted(commit="HEAD")], 2, "commit is 'HEAD'"),
        ([counted(date="2026-13-01")], 2, "date is '2026-13-01'"),
        ([measured(device="", driver="")], 2, "a measured row needs device, driver"),
        ([measured(microseconds="fast")], 2, "microseconds is 'fast'"),
        ([measured(baseline="triton")], 2, "come together"),
        ([measured(baseline="triton", baseline_microseconds="40.9")], 2, "loses to triton (41.3 us against 40.9 us)"),
        ([measured(baseline="triton", baseline_microseconds="55")], None, ""),
    ],
)
def test_lint_names_file_line_and_reason(tables, lines, line, words):
    path, _ = tables(shipped=lines)
    findings = tuning.lint(FORM, "gfx950", path)
    if line is None:
        assert findings == ()
        return
    assert len(findings) == 1
    assert findings[0].startswith(f"{path}:{line}: ")
    assert words in findings[0]
    with pytest.raises(ValueError) as raised:
        find(1, 1024)
    assert str(raised.value) == findings[0]


def test_lint_reports_every_bad_row(tables):
    path, _ = tables(shipped=[counted(heads=0), counted(), counted(kv_format="x")])
    assert [finding.split(": ")[0] for finding in tuning.lint(FORM, "gfx950", path)] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the header is ''"),
        (b"heads,batch\n", "the header is 'heads,batch'; it must be"),
        (HEADER.replace("heads", "head").encode(), "it must be"),
        (HEADER.encode() + b"\n\xff", "is not ASCII"),
        ((HEADER + "\n" + "x\n" * (tuning.MAX_ROWS + 1)).encode(), f"at most {tuning.MAX_ROWS}"),
        (b" " * (tuning.MAX_BYTES + 1), f"at most {tuning.MAX_BYTES}"),
    ],
)
def test_lint_limits(tmp_path, content, words):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    findings = tuning.lint(FORM, "gfx950", path)
    assert len(findings) == 1
    assert findings[0].startswith(f"{path}:")
    assert words in findings[0]
